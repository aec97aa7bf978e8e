"""loss_compare with the real run_train.sh, on a repository that holds a copy of this tree."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.compared_repo import git

_ROOT = Path(__file__).parents[2]
_SMALL = "--training.seq_len=64 --training.local_batch_size=1 --lr_scheduler.warmup_steps=0"
_FP32 = f"{_SMALL} --training.mixed_precision_param=float32 --training.global_batch_size=2"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with one commit, and a working tree whose training says so when it is imported."""
    repo = tmp_path_factory.mktemp("compared") / "the repo"
    for name in ("torchtitan", "scripts"):
        shutil.copytree(_ROOT / name, repo / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("run_train.sh", "pyproject.toml", ".gitignore"):
        shutil.copy2(_ROOT / name, repo / name)
    git(repo, "init", "-q", "-b", "main")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "all")
    with (repo / "torchtitan/trainer.py").open("a") as file:
        file.write('\nprint("the working tree\'s trainer", __file__, flush=True)\n')
    return repo


def _command(*arguments: str) -> list[str]:
    return [sys.executable, str(_ROOT / "scripts/loss_compare.py"), *arguments]


def _environment(**changes: str) -> dict[str, str]:
    """Return an environment in which the user's own tree is on the path, where it must not win."""
    return {**os.environ, "PYTHON": sys.executable, "NGPU": "1", "OMP_NUM_THREADS": "1", **changes}


def _compare(repo: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = _environment(PYTHONPATH=str(repo))
    result = subprocess.run(
        _command(*arguments), cwd=repo, env=environment, capture_output=True, text=True, check=False
    )
    assert git(repo, "status", "--porcelain") == " M torchtitan/trainer.py\n"
    assert git(repo, "worktree", "list").count("\n") == 1
    return result


def _sides(options: str, changed: str = "") -> list[str]:
    return [f"--baseline-options={options}", f"--test-options={options} {changed}"]


def test_a_revision_and_the_working_tree_run_their_own_code_and_are_equal(repo: Path, tmp_path: Path) -> None:
    arguments = [*_sides(_SMALL), "--steps=2", "--assert-equal", f"--output-folder={tmp_path}"]
    result = _compare(repo, "HEAD", ".", *arguments)
    assert result.returncode == 0, result.stdout
    assert "[LOSS_COMPARE] Extracted 2 steps from test log" in result.stdout
    baseline, test = ((tmp_path / f"{name}.log").read_text() for name in ("baseline", "test"))
    assert "the working tree's trainer" in test and str(repo / "torchtitan") not in test
    assert "the working tree's trainer" not in baseline
    assert "Checkpoint: loaded" in baseline and "Checkpoint: loaded" in test


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ("--debug.seed=7", "First difference: step 1, loss"),
        ("--optimizer.lr=1e-2", "First difference: step 2, loss"),  # the first update is what the rate changes
        ("--training.max_norm=0.5", "First difference: step 2, loss"),
    ],
)
def test_an_option_that_changes_the_result_fails_at_the_right_step(repo: Path, changed: str, first: str) -> None:
    result = _compare(repo, ".", ".", *_sides(_SMALL, changed), "--steps=3", "--assert-equal")
    assert result.returncode == 1, result.stdout
    assert f"[LOSS_COMPARE] {first}" in result.stdout


@pytest.mark.slow
def test_context_parallelism_is_deterministic_and_close_to_one_process(repo: Path) -> None:
    cp = f"{_FP32} --parallelism.context_parallel_degree=4"
    equal = _compare(repo, ".", ".", *_sides(cp), "--steps=3", "--assert-equal", "--baseline-ngpus=4", "--test-ngpus=4")
    assert equal.returncode == 0, equal.stdout
    layouts = [f"--baseline-options={_FP32}", f"--test-options={cp}", "--test-ngpus=4", "--steps=3", "--assert-equal"]
    close = _compare(repo, ".", ".", *layouts, "--rtol=1e-5")
    assert close.returncode == 0, close.stdout
    exact = _compare(repo, ".", ".", *layouts)  # sums in another order
    assert exact.returncode == 1 and "First difference: step 1" in exact.stdout


@pytest.mark.slow
def test_a_tolerance_does_not_hide_missing_steps_and_an_error_is_shown(repo: Path) -> None:
    short = _compare(repo, ".", ".", *_sides(_SMALL, "--training.steps=2"), "--steps=3", "--assert-equal", "--rtol=1")
    assert short.returncode == 1 and "Missing: the test lacks step 3" in short.stdout
    bad = _compare(repo, ".", ".", *_sides(_SMALL, "--training.seq_lem=64"), "--steps=2", "--no-seed-checkpoint")
    assert bad.returncode == 1 and "the test run ended with exit code" in bad.stdout
    assert "training.seq_len" in bad.stdout


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks_and_removes_the_worktrees(repo: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    arguments = ["HEAD", ".", *_sides(_SMALL), "--steps=100000", "--no-seed-checkpoint", f"--job-dump-folder={dump}"]
    process = subprocess.Popen(
        _command(*arguments), cwd=repo, env=_environment(NGPU="2"), stdout=subprocess.PIPE, text=True
    )
    log = dump / "baseline/train.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "step:  2" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130 and "Stopped by SIGINT" in output
    assert git(repo, "worktree", "list").count("\n") == 1
    commands = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(dump) not in commands
