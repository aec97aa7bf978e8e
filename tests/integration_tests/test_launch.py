"""run_train.sh with real processes and a program of the user's own that needs no torch."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan.tools.launch import children

_ROOT = Path(__file__).parents[2]
_PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
import sibling
rank, folder = os.environ["RANK"], Path(sys.argv[-1])
stop = []
signal.signal(signal.SIGTERM, lambda *a: stop.append(1))
(folder / f"rank{rank}").write_text(json.dumps({"threads": os.environ["OMP_NUM_THREADS"], "argv": sys.argv[1:]}))
mode = sys.argv[-2]
if mode == "refuse":
    if rank == "0":
        print("--some.option=1: a fact; a rule; a remedy", file=sys.stderr)
    sys.exit(2)
if mode == "die" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
for step in range(1, 4):
    if rank == "0":
        print(f"a line of step {step}", flush=True)
        path = os.environ["TORCHTITAN_PROGRESS_FILE"]
        state = {"step": step, "steps": 4, "loss": 1.5, "seconds_per_step": 60.0}
        Path(path + ".tmp").write_text(json.dumps(state))
        os.replace(path + ".tmp", path)
    time.sleep(0.4)
while mode in ("wait", "die") and not stop:
    time.sleep(0.05)
(folder / f"saved{rank}").write_text("")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return the folder of a training program with a module beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/program.py").write_text(_PROGRAM)
    (tmp_path / "mine/sibling.py").write_text("")
    (tmp_path / "out").mkdir()
    return tmp_path


def _command(mode: str) -> list[str]:
    return [str(_ROOT / "run_train.sh"), mode, "out"]


def _environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOG_RANK")}
    return {**kept, "PYTHON": sys.executable, "NGPU": "2", "TRAIN_FILE": "mine/program.py", **changes}


def _run(program: Path, mode: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        _command(mode), cwd=program, env=_environment(), capture_output=True, text=True, check=False, timeout=120
    )


def _left_behind(program: Path) -> str:
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "args="], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listing.splitlines() if "mine/program.py" in line)


def test_a_pipe_gets_lines_and_no_bar(program: Path) -> None:
    result = _run(program, "go")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["a line of step 1", "a line of step 2", "a line of step 3"]
    assert "\x1b" not in result.stderr and "left" not in result.stderr
    assert {path.name for path in (program / "out").iterdir()} == {"rank0", "rank1", "saved0", "saved1"}
    assert '"threads": "' + str(max(1, len(os.sched_getaffinity(0)) // 2)) in (program / "out/rank0").read_text()


def test_a_terminal_gets_a_bar_below_the_lines(program: Path) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        _command("go"), cwd=program, env=_environment(), stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(controller, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait(60) == 0
    text = shown.decode()
    assert re.search(r"\[#{22}-{8}\]  75%  step 3/4  loss 1\.5000  0:01:00 left", text), text
    assert "a line of step 2\r\n" in text
    assert text.endswith("\r\x1b[K")  # the bar is gone at the end


def test_a_stop_signal_reaches_the_workers_and_ends_with_zero(program: Path) -> None:
    with subprocess.Popen(
        _command("wait"), cwd=program, env=_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[-1] == "a line of step 3\n"
        process.send_signal(signal.SIGUSR1)  # SLURM's early signal
        assert process.wait(60) == 0
    assert {"saved0", "saved1"} <= {path.name for path in (program / "out").iterdir()}
    assert not _left_behind(program)


def test_a_signal_before_the_workers_run_ends_with_zero_and_leaves_nothing(program: Path) -> None:
    for delay in (0.15, 0.6):  # the launcher or its agent is still loading
        with subprocess.Popen(_command("wait"), cwd=program, env=_environment()) as process:
            _await(lambda: b"torchtitan.tools.launch" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
            time.sleep(delay)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        assert not _left_behind(program)


def test_workers_end_when_their_agent_is_killed(program: Path) -> None:
    with subprocess.Popen(
        _command("wait"), cwd=program, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "a line of step 1\n"
        (agent,) = children(process.pid)
        os.kill(agent, signal.SIGKILL)
        assert process.wait(60) == 128 + signal.SIGKILL
        assert "[titan] the launcher's agent was killed by signal 9" in process.stderr.read()
    assert not _left_behind(program)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_refusal_keeps_its_exit_code_and_its_one_line(program: Path) -> None:
    result = _run(program, "refuse")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["--some.option=1: a fact; a rule; a remedy"]


def test_a_killed_worker_is_named_and_ends_the_job(program: Path) -> None:
    start = time.monotonic()
    result = _run(program, "die")
    assert result.returncode == 128 + signal.SIGKILL
    assert "[titan] rank 1 was killed by signal 9" in result.stderr.splitlines()
    assert time.monotonic() - start < 60
    assert not _left_behind(program)
