"""Start a job's workers on this machine, forward stop signals to them, and draw the progress bar.

Nothing of torch is imported, so that it is up at once. The workers are children of an agent (torchrun's), which would
answer a stop signal by failing; so the signals go to the workers themselves, which save and end with 0. No rank has
the terminal, so the bar is drawn here, from a file that rank 0 keeps up to date.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO

from torchtitan.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_DEBUG_CONFIG = _PACKAGE / "models/llama3/train_configs/debug_model.toml"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_POLL_S = 0.2
_BAR_WIDTH = 30


def main(argv: list[str]) -> int:
    """Run the job that the environment and `argv` describe; returns its exit code."""
    try:
        agent = agent_arguments(os.environ, argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="torchtitan-") as folder:
        progress_path = Path(folder) / "progress.json"
        environment = worker_environment(os.environ) | {"TORCHTITAN_PROGRESS_FILE": str(progress_path)}
        command = [sys.executable, "-m", "torchtitan.tools.agent", *agent]
        if sys.stderr.isatty():
            return _run_with_bar(command, environment, progress_path)
        job = _Job()
        job.start(command, environment)
        return job.wait()


def num_processes(environment: Mapping[str, str]) -> int:
    """Return NGPU, else the number of GPUs that are visible, else 2."""
    if "NGPU" in environment:
        return _positive("NGPU", environment["NGPU"])
    if "CUDA_VISIBLE_DEVICES" in environment:
        visible = [device for device in environment["CUDA_VISIBLE_DEVICES"].split(",") if device.strip()]
        return len(visible) or 2
    if shutil.which("nvidia-smi") is None:
        return 2
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listing.splitlines()) or 2


def _positive(name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            f"{name}={value}: not a number of processes or nodes; it must be 1 or more; correct or unset it"
        )
    return int(value)


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the workers' environment: cores shared out as threads (or OMP_NUM_THREADS), and where modules are."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = max(1, cores // num_processes(environment))
    # Nothing of the current folder comes before the package that was started: it may be another version of it. Programs
    # of the user's own are found behind.
    train_file = environment.get("TRAIN_FILE", "")
    own = str(Path(train_file).resolve().parent) if train_file.endswith(".py") else os.getcwd()
    path = os.pathsep.join([str(_PACKAGE.parent), environment.get("PYTHONPATH", ""), own])
    return {"OMP_NUM_THREADS": str(threads), **environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def agent_arguments(environment: Mapping[str, str], argv: list[str]) -> list[str]:
    """Return torchrun's arguments for the variables that run_train.sh documents, then the training program and its."""
    arguments = [f"--nproc_per_node={num_processes(environment)}"]
    if _positive("NNODES", environment.get("NNODES", "1").rpartition(":")[2]) > 1:
        endpoint = f"{environment.get('MASTER_ADDR', 'localhost')}:{environment.get('MASTER_PORT', '29500')}"
        arguments += [f"--nnodes={environment['NNODES']}", f"--rdzv_endpoint={endpoint}"]
        arguments += [f"--rdzv_backend={environment.get('RDZV_BACKEND', 'c10d')}"]
        arguments += [f"--rdzv_id={environment.get('RDZV_ID', 'torchtitan')}"]
        if "NODE_RANK" in environment:
            arguments += [f"--node_rank={environment['NODE_RANK']}"]
    else:
        arguments += ["--standalone"]
    arguments += [f"--max_restarts={environment.get('MAX_RESTARTS', '0')}"]
    train_file = environment.get("TRAIN_FILE", "torchtitan.train")
    if train_file.endswith(".py") and not Path(train_file).is_file():
        raise ConfigError(
            f"TRAIN_FILE={train_file}: there is no such file; it is a .py file or a module; correct the path"
        )
    arguments += [train_file] if train_file.endswith(".py") else ["-m", train_file]
    names_config = any(word.replace("-", "_").startswith("__job.config_file") for word in argv)
    config = [] if names_config else [f"--job.config_file={environment.get('CONFIG_FILE', _DEBUG_CONFIG)}"]
    return [*arguments, *config, *argv]


class _Job:
    """The agent and its workers, in sessions of their own that a terminal's signals do not reach."""

    def __init__(self) -> None:
        self.agent: subprocess.Popen[bytes] | None = None
        self.signals = 0
        self.never_started = False  # a stop signal came before there was a worker that could have done a step
        _adopt_orphans()
        for number in _STOP_SIGNALS:
            signal.signal(number, self._forward)

    def start(
        self, command: list[str], environment: dict[str, str], output: int | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start the agent; signals are listened to already, so none can leave it behind."""
        self.agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        if self.signals:
            self._stop_before_start()
        return self.agent

    def wait(self) -> int:
        """Return the job's exit code once it has ended; nothing of it is left behind."""
        assert self.agent is not None
        code = self.agent.wait()
        self._kill_orphans()
        if self.never_started:
            return 0
        stopped_early = self.signals and code == 128 + signal.SIGTERM  # a worker was asked before it could listen
        if code < 0:
            print(f"[titan] the launcher's agent was killed by signal {-code}", file=sys.stderr)
            code = 128 - code
        return 0 if stopped_early else code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Ask the workers to stop; on a second signal the agent, and on a third kill all."""
        self.signals += 1
        if self.agent is None:
            return
        workers = children(self.agent.pid)
        if self.signals == 1 and not workers:
            self._stop_before_start()
        elif self.signals == 1:
            for worker in workers:
                _signal(worker, signal.SIGTERM)
        elif self.signals == 2:
            _signal(self.agent.pid, signal.SIGTERM)
        else:
            self._kill_all()

    def _stop_before_start(self) -> None:
        assert self.agent is not None
        self.never_started = True
        _signal(self.agent.pid, signal.SIGKILL)  # what it may just have started is found by wait

    def _kill_all(self) -> None:
        assert self.agent is not None
        for pid in (*children(self.agent.pid), self.agent.pid):
            _signal(pid, signal.SIGKILL)

    def _kill_orphans(self) -> None:
        """Kill what the agent left behind, and what that leaves behind."""
        while sys.platform == "linux" and (orphans := children(os.getpid())):
            for pid in orphans:
                _signal(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that no worker outlives the job; Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int) -> list[int]:
    """Return the processes that `pid` started itself."""
    if Path("/proc/self/stat").exists():
        pairs = [_proc_parent(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        pairs = [(int(child), int(parent)) for child, parent in map(str.split, listing.splitlines())]
    return [child for child, parent in pairs if parent == pid]


def _proc_parent(pid: int) -> tuple[int, int]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has just ended
        return pid, 0
    return pid, int(stat.rpartition(")")[2].split()[1])


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _run_with_bar(command: list[str], environment: dict[str, str], progress_path: Path) -> int:
    if "NO_COLOR" not in environment:
        environment = {"FORCE_COLOR": "1", **environment}
    job, bar = _Job(), _Bar(progress_path)
    agent = job.start(command, environment, subprocess.PIPE)
    assert agent.stdout is not None and agent.stderr is not None
    pumps = [
        threading.Thread(target=bar.pump, args=(source, sink))
        for source, sink in ((agent.stdout, sys.stdout.buffer), (agent.stderr, sys.stderr.buffer))
    ]
    for pump in pumps:
        pump.start()
    while agent.poll() is None:
        bar.draw()
        time.sleep(_POLL_S)
    code = job.wait()
    for pump in pumps:
        pump.join()
    bar.clear()
    return code


class _Bar:
    """The last line of the terminal; the job's own lines scroll above it."""

    def __init__(self, progress_path: Path) -> None:
        self.progress_path = progress_path
        self.lock = threading.Lock()
        self.text = ""

    def pump(self, source: IO[bytes], sink: IO[bytes]) -> None:
        """Copy lines to the terminal until the source ends, with the bar put back below each."""
        for line in source:
            with self.lock:
                self._erase()
                sink.write(line)
                sink.flush()
                self._show()

    def draw(self) -> None:
        """Show how far the run is."""
        text = self._read()
        with self.lock:
            if text != self.text:
                self._erase()
                self.text = text
                self._show()

    def clear(self) -> None:
        """Leave the terminal's last line empty."""
        with self.lock:
            self._erase()
            sys.stderr.flush()

    def _read(self) -> str:
        try:
            state = json.loads(self.progress_path.read_text())
        except FileNotFoundError:  # no step is done yet
            return ""
        done = state["step"] / state["steps"]
        bar = "#" * int(done * _BAR_WIDTH)
        left = _duration((state["steps"] - state["step"]) * state["seconds_per_step"])
        text = f"[{bar:-<{_BAR_WIDTH}}] {done:4.0%}  step {state['step']}/{state['steps']}  loss {state['loss']:.4f}"
        return f"{text}  {left} left"[: shutil.get_terminal_size().columns - 1]

    def _erase(self) -> None:
        if self.text:
            sys.stderr.write("\r\x1b[K")

    def _show(self) -> None:
        sys.stderr.write(self.text)
        sys.stderr.flush()


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
