"""The training runs: run_train.sh of each side's tree, in the environment of the user's."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .children import StopSignals, run_child
from .console import CompareError, say

_SEED = 42
_TAIL_LINES = 40
_MARK = ".loss_compare"  # in folders that this script made
# Written after the user's options: without them there is nothing exact to compare.
_ALWAYS = ["--debug.deterministic", "--metrics.log_freq=1"]
_ONE_PROCESS = [
    f"--parallelism.{axis}_degree=1"
    for axis in (
        "data_parallel_replicate",
        "data_parallel_shard",
        "context_parallel",
        "tensor_parallel",
        "pipeline_parallel",
        "expert_parallel",
    )
]


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str  # baseline or test
    revision: str
    config: str
    options: list[str]
    train_file: str
    ngpus: int


@dataclass(frozen=True)
class Place:
    """Where a side runs: the top of its tree, and the folder of it that the user is in."""

    tree: Path
    folder: Path

    def path(self, text: str) -> str:
        """Return a user's path as the tree's own file, else as one of the user's folder."""
        if not text or (self.folder / text).exists():
            return text
        return str(Path(text).absolute())


@dataclass(frozen=True)
class Runner:
    """Starts runs, and knows where they write."""

    python: str  # empty: run_train.sh finds one
    dump: Path
    logs: Path | None  # None: beside what the run writes
    signals: StopSignals

    def seed_checkpoint(self, side: Side, place: Place) -> list[str]:
        """Make the initial weights once, in one process; returns the options that start a run from them."""
        say("Creating the seed checkpoint...")
        options = [*side.options, *_ONE_PROCESS, "--training.global_batch_size=-1", "--training.steps=1"]
        options += ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--checkpoint.folder=checkpoint"]
        self._run(Side("seed", side.revision, side.config, options, side.train_file, 1), place, [])
        path = self.dump / "seed/checkpoint/step-0"
        return ["--checkpoint.enable", "--checkpoint.load_only", f"--checkpoint.initial_load_path={path}"]

    def train(self, side: Side, place: Place, steps: int, start: list[str]) -> Path:
        """Run one side; returns the path of its log."""
        say(f"Running the {side.name}: {side.revision}, {side.ngpus} processes, {steps} steps...")
        return self._run(side, place, [f"--training.steps={steps}", *start])

    def metrics(self, side: Side) -> Path:
        """Return where a side's exact values are once it ran."""
        return self.dump / side.name / "metrics.jsonl"

    def _run(self, side: Side, place: Place, options: list[str]) -> Path:
        """Run to the end; raises a CompareError that shows the end of the log, if the run fails."""
        folder = _empty_folder(self.dump / side.name)
        log = self.logs / f"{side.name}.log" if self.logs else folder / "train.log"
        script = place.tree / "run_train.sh"
        if not script.is_file():
            raise CompareError(f"{side.revision} has no run_train.sh, so it cannot be run")
        start = [str(script)] if os.access(script, os.X_OK) else ["bash", str(script)]
        words = [f"--debug.seed={_SEED}", *options, *side.options, *_ALWAYS, f"--job.dump_folder={folder}"]
        with log.open("wb") as sink:
            code = run_child(
                [*start, *words],
                self.signals,
                cwd=place.folder,
                environment=self._environment(side, place),
                output=sink,
                errors=subprocess.STDOUT,
            )
        if code:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
            raise CompareError(f"the {side.name} run ended with exit code {code}; the end of its log:\n{tail}")
        return log

    def _environment(self, side: Side, place: Place) -> dict[str, str]:
        train_file = place.path(side.train_file) if side.train_file.endswith(".py") else side.train_file
        values = {"PYTHON": self.python, "CONFIG_FILE": place.path(side.config), "TRAIN_FILE": train_file}
        path = os.pathsep.join(filter(None, [str(place.tree), os.environ.get("PYTHONPATH", "")]))
        given = {name: value for name, value in values.items() if value}
        return {**os.environ, **given, "NGPU": str(side.ngpus), "PYTHONPATH": path}


def _empty_folder(folder: Path) -> Path:
    """Make a folder for a run; only what an earlier run left may be removed for it."""
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / _MARK).exists():
            raise CompareError(f"{folder} holds files that no comparison wrote; choose another --job-dump-folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).touch()
    return folder


def find_python(repo: Path, signals: StopSignals) -> str:
    """Return the interpreter that run_train.sh of the user's tree uses, as an absolute path; empty: it has no say."""
    script = repo / "scripts/environment.sh"
    if not script.is_file():
        return _active_python(repo)
    read, write = os.pipe()
    command = ["bash", "-c", 'source "$0"; use_environment train >&2; printf %s "$PYTHON"', str(script)]
    with open(read, "rb") as result:
        with open(write, "wb") as sink:
            code = run_child(command, signals, cwd=Path.cwd(), environment=os.environ, output=sink, errors=None)
        python = os.fsdecode(result.read())
    if code:
        raise CompareError("no environment to train in (see above)")
    return _absolute(python)


def _active_python(repo: Path) -> str:
    """Return the interpreter of PYTHON, of an active environment, or of the tree's .venv."""
    if python := os.environ.get("PYTHON", ""):
        return _absolute(python)
    folders = [os.environ.get("VIRTUAL_ENV", ""), os.environ.get("CONDA_PREFIX", ""), str(repo / ".venv")]
    candidates = [Path(folder) / "bin/python" for folder in folders if folder]
    return next((str(python) for python in candidates if python.exists()), "")


def _absolute(python: str) -> str:
    return os.path.abspath(python) if "/" in python else shutil.which(python) or python
