"""The shell part: which Python is used, and when something is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FAKE_PYTHON = """#!/bin/sh
# Stands for the environment's interpreter: tells what pip was asked, and plays the real one for everything else.
if [ "$1" = -m ] && [ "$2" = pip ] && [ "$3" != --version ]; then echo "pip $*" >>"$PIP_LOG"; exit "${PIP_EXIT:-0}"; fi
exec "$REAL_PYTHON" "$@"
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a tree with this project's shell files and an interpreter that only plays pip."""
    tree = tmp_path / "tree"
    (tree / "scripts").mkdir(parents=True)
    for name in ("scripts/environment.sh", "scripts/constraints.txt", "pyproject.toml"):
        (tree / name).write_text((_ROOT / name).read_text())
    return tree


def _fake_venv(tree: Path) -> None:
    (tree / ".venv/bin").mkdir(parents=True)
    python = tree / ".venv/bin/python"
    python.write_text(_FAKE_PYTHON)
    python.chmod(0o755)


def _use(tree: Path, kind: str = "train", **changes: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHON")}
    environment = {**kept, "PIP_LOG": str(tree / "pip.log"), "REAL_PYTHON": sys.executable, "PYTHONPATH": "/theirs"}
    script = f'source "{tree}/scripts/environment.sh"; use_environment {kind}; echo "$PYTHON"; echo "$PYTHONPATH"'
    return subprocess.run(
        ["bash", "-c", script], env={**environment, **changes}, capture_output=True, text=True, check=False
    )


def _pip_calls(tree: Path) -> list[str]:
    log = tree / "pip.log"
    return log.read_text().splitlines() if log.exists() else []


def test_python_is_respected_and_the_tree_comes_first(tree: Path) -> None:
    result = _use(tree, PYTHON=sys.executable)
    assert result.stdout.splitlines() == [sys.executable, f"{tree}:/theirs"]
    assert not (tree / ".venv").exists()


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_is_used_and_never_changed(tree: Path, variable: str) -> None:
    active = tree / "active"
    (active / "bin").mkdir(parents=True)
    (active / "bin/python").symlink_to(sys.executable)
    (active / "bin/python").unlink()
    (active / "bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (active / "bin/python").chmod(0o755)
    result = _use(tree, **{variable: str(active)})
    assert result.stdout.splitlines()[0] == f"{active}/bin/python", result.stderr
    assert not _pip_calls(tree) and not (tree / ".venv").exists()


def test_no_such_python_is_one_line(tree: Path) -> None:
    result = _use(tree, PYTHON="/nowhere/python")
    assert result.returncode == 2
    assert result.stderr.splitlines() == [
        "[titan] PYTHON=/nowhere/python: there is no such program; name an interpreter from 3.10 to 3.13, or leave it "
        "unset to have .venv made"
    ]


def test_a_machine_without_python_is_told_so_and_nothing_is_made(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("bash", "cat", "cksum", "cut", "dirname", "flock", "sed"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
    result = _use(tree, PATH=str(tmp_path / "bin"))
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("[titan] no Python from 3.10 to 3.13 was found; install one")
    assert not (tree / ".venv").exists()


def test_an_environment_that_lacks_packages_gets_the_command_to_run(tree: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')  # without site-packages
    bare.chmod(0o755)
    result = _use(tree, "test", PYTHON=str(bare))
    assert result.returncode == 2
    assert "it lacks: torch torchdata" in result.stderr
    assert f"{bare} -m pip install -c {tree}/scripts/constraints.txt -e {tree}[test]" in result.stderr


def test_torch_is_installed_first_and_only_once(tree: Path) -> None:
    _fake_venv(tree)
    assert _use(tree).returncode == 0
    first, second = _pip_calls(tree)
    assert "install -q torch==2.13.0" in first
    assert f"install -q -c {tree}/scripts/constraints.txt -e {tree}" in second
    assert _use(tree, PIP_EXIT="1").returncode == 0  # a second start: pip would fail, but is not called
    assert len(_pip_calls(tree)) == 2
    assert _use(tree, "test").returncode == 0  # needs more, so it installs
    assert _pip_calls(tree)[-1].endswith("[test]")
    assert _use(tree).returncode == 0  # and what the tests need holds all that training needs
    assert len(_pip_calls(tree)) == 4


def test_an_interrupted_installation_is_done_again(tree: Path) -> None:
    _fake_venv(tree)
    result = _use(tree, PIP_EXIT="1")
    assert result.returncode == 2 and "installation failed" in result.stderr
    assert _use(tree).returncode == 0
    assert len(_pip_calls(tree)) == 3  # one that failed, then both


def test_other_requirements_install_again(tree: Path) -> None:
    _fake_venv(tree)
    _use(tree)
    (tree / "scripts/constraints.txt").write_text("torch==2.14.1\n")
    assert _use(tree).returncode == 0
    assert "torch==2.14.1" in _pip_calls(tree)[2]


def test_slurm_gives_each_node_its_rank_and_the_first_host(tmp_path: Path) -> None:
    """With stand-ins for SLURM's commands and run_train.sh; USR1 is passed on, and the job's code is the script's."""
    (tmp_path / "run_train.sh").write_text(
        '#!/bin/bash\ntrap "echo stopped; exit 0" USR1\n'
        'echo "$NNODES $NODE_RANK $MASTER_ADDR $MASTER_PORT $RDZV_ID $NGPU $*"\nsleep 0.1\n'
        'kill -USR1 "$OUTER"; for i in $(seq 100); do sleep 0.1; done\n'
    )
    (tmp_path / "scontrol").write_text(
        '#!/bin/sh\n[ "$2" = job ] && { echo "JobId=$3"; echo "   Command=$SCRIPT --nodes=2"; exit; }\n'
        "echo node7\necho node8\n"
    )
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nexport SLURM_NODEID=1\nexec "$@"\n')
    (tmp_path / "scripts").mkdir()
    for name in ("run_train.sh", "scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SCRIPT": str(tmp_path / "scripts/slurm_train.sh"),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "99",
        "SLURM_GPUS_ON_NODE": "4",
    }
    environment.pop("NGPU", None)
    script = f'export OUTER=$$; source "{_ROOT}/scripts/slurm_train.sh" --training.steps=5'
    result = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stdout.splitlines() == ["2 1 node7 29500 99 4 --training.steps=5", "stopped"], result.stderr
    assert result.returncode == 0
