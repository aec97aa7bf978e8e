"""loss_compare on a small repository whose run_train.sh writes the numbers at once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[3] / "scripts/loss_compare.py"
# Losses come from values.txt of the tree that runs, so that a test sees which code ran; an option may change them.
_RUN_TRAIN = """#!/usr/bin/env python3
import json, os, sys, time
from pathlib import Path
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
tree = Path(__file__).resolve().parent
folder = Path(options["job.dump_folder"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "seen.json").write_text(json.dumps({"argv": sys.argv[1:], "ngpu": os.environ["NGPU"],
    "config": os.environ.get("CONFIG_FILE"), "python": os.environ["PYTHON"],
    "untracked": (tree / "untracked.txt").exists(), "ignored": (tree / "ignored.log").exists()}))
print("a run of", tree)
if "--checkpoint.create_seed_checkpoint" in sys.argv:
    (folder / "checkpoint/step-0").mkdir(parents=True)
    sys.exit(0)
if "sleep" in options:
    print("sleeping", flush=True)
    time.sleep(60)
if "fail" in options:
    sys.exit("the run failed as asked")
values = [float(line) for line in (tree / "values.txt").read_text().split()]
for change in options.get("change", "").split(","):
    if change:
        step, amount = change.split(":")
        values[int(step) - 1] += float(amount)
count = int(options.get("logged", len(values)))
with (folder / "metrics.jsonl").open("w") as file:
    for step, value in enumerate(values[:count], 1):
        norm = value / 2
        row = {"step": step, "loss": value, "loss_hex": value.hex(), "grad_norm": norm, "grad_norm_hex": norm.hex()}
        file.write(json.dumps(row) + "\\n")
"""


def _git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *identity, *arguments], cwd=repo, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Return a repository of two commits, `old` and main, and two more files; its path has a space."""
    repo = tmp_path / "a repo"
    (repo / "scripts").mkdir(parents=True)
    (repo / "run_train.sh").write_text(_RUN_TRAIN)
    (repo / "run_train.sh").chmod(0o755)
    (repo / "scripts/environment.sh").write_text("use_environment() { PYTHON=/some/python; }\n")
    (repo / ".gitignore").write_text("*.log\n")
    (repo / "values.txt").write_text("9.0\n8.0\n7.0\n6.0\n5.0\n")
    _git(repo, "init", "-q", "-b", "main")
    _git(repo, "add", "-A")
    _git(repo, "commit", "-qm", "old")
    _git(repo, "tag", "old")
    (repo / "values.txt").write_text("9.0\n8.0\n7.0\n6.0000003\n5.0\n")
    _git(repo, "commit", "-qam", "new")
    (repo / "untracked.txt").write_text("")
    (repo / "ignored.log").write_text("")
    return repo


def _compare(repo: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "NGPU": "2"}
    command = [sys.executable, "-I", str(_SCRIPT), *arguments]  # isolated: the standard library alone
    return subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, check=False)


def _state(repo: Path) -> tuple[str, str]:
    return _git(repo, "status", "--porcelain", "--ignored"), _git(repo, "worktree", "list")


def _has_lines(output: str, lines: Sequence[str]) -> bool:
    """Return whether the lines come in this order, others between them."""
    rest = iter(output.splitlines())
    return all(any(line == wanted for line in rest) for wanted in lines)


def test_equal_runs_pass_with_the_lines_that_scripts_read(repo: Path) -> None:
    before = _state(repo)
    result = _compare(repo, ".", ".", "--steps=5", "--assert-equal")
    assert result.returncode == 0, result.stdout + result.stderr
    wanted = [
        "[LOSS_COMPARE]",
        "[LOSS_COMPARE] Asserting losses are equal...",
        "[LOSS_COMPARE] Extracted 5 steps from baseline log",
        "[LOSS_COMPARE] Extracted 5 steps from test log",
        "OK",
        "[LOSS_COMPARE] All losses are equal. Assertion passed!",
        "[LOSS_COMPARE] ==========================================",
        "[LOSS_COMPARE] LOSS COMPARISON ANALYSIS",
        "[LOSS_COMPARE] ==========================================",
        "[LOSS_COMPARE]",
        "[LOSS_COMPARE] Step-by-step loss comparison:",
        "[LOSS_COMPARE] Step    Baseline Loss    Test Loss   Difference",
        "[LOSS_COMPARE] ----    -------------    ---------   ----------",
        "[LOSS_COMPARE] 1       9.0000           9.0000           0.000000",
        "[LOSS_COMPARE]",
        "[LOSS_COMPARE] Summary statistics:",
        "[LOSS_COMPARE] Average baseline loss:  7.00000006",
        "[LOSS_COMPARE] Average test loss: 7.00000006",
        "[LOSS_COMPARE] Average difference:     0.000000",
        "[LOSS_COMPARE] Largest difference:     0.000000 (step 1)",
        "[LOSS_COMPARE] Loss comparison complete. No results saved (no output folder specified).",
    ]
    assert _has_lines(result.stdout, wanted), result.stdout
    assert "test_losses_equal" in result.stdout and "Ran 1 test in" in result.stdout
    assert _state(repo) == before


def test_another_revision_runs_its_own_code_and_the_first_difference_is_named(repo: Path) -> None:
    """Runs that differ by 3e-7 at step 4: invisible in a log of six digits."""
    before = _state(repo)
    result = _compare(repo, "old", ".", "--steps=5", "--assert-equal")
    assert result.returncode == 1
    a, b = 6.0, 6.0000003
    first = f"First difference: step 4, loss: baseline {a!r} ({a.hex()}), test {b!r} ({b.hex()})"
    assert f"[LOSS_COMPARE] {first}" in result.stdout.splitlines()
    assert f"Largest difference: {b - a!r} at step 4, loss; 2 values differ" in result.stdout
    assert "[LOSS_COMPARE] Losses differ. Assertion failed!" in result.stdout
    assert _state(repo) == before


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--test-options=--change=2:1"], 0, "Largest difference:     1.000000 (step 2)"),
        (["--test-options=--change=2:1", "--assert-equal"], 1, "First difference: step 2, loss: baseline 8.0 "),
        (["--test-options=--logged=3", "--assert-equal"], 1, "the test lacks steps 4, 5"),
        (["--baseline-options=--logged=0", "--assert-equal"], 1, "a side logged no step"),
        (["--baseline-options=--logged=0"], 1, "a side logged no step"),
        (["--baseline-options=--change=3:nan", "--test-options=--change=3:nan", "--assert-equal"], 1, "step 3, loss"),
        (["--test-options=--change=2:1e-4", "--assert-equal", "--rtol=1e-4"], 0, "Assertion passed"),
        (["--test-options=--change=2:1e-2", "--assert-equal", "--rtol=1e-4"], 1, "Assertion failed"),
        (["--test-options=--change=2:1e-4", "--assert-equal", "--atol=1e-3"], 0, "Assertion passed"),
        (["--test-options=--change=2:1e-4", "--assert-equal", "--atol=1e-5"], 1, "Assertion failed"),
        (["--assert-equal", "--fields=perplexity"], 1, "field 'perplexity' was not logged by both sides"),
        (["--test-options=--fail=1"], 1, "the run failed as asked"),
        (["--rtol=1"], 2, "add it"),
        (["--steps=0"], 2, "at least one step"),
    ],
)
def test_what_differs_fails_and_is_named(repo: Path, arguments: list[str], code: int, part: str) -> None:
    before = _state(repo)
    result = _compare(repo, ".", ".", *arguments)
    assert result.returncode == code, result.stdout
    assert part in result.stdout + result.stderr
    assert _state(repo) == before


def test_fields_choose_what_is_asserted(repo: Path) -> None:
    sides = ["--test-options=--change=2:1e-300"]  # lost in the loss, and in half of it
    assert _compare(repo, ".", ".", "--assert-equal", *sides).returncode == 0
    tiny = ["--test-options=--change=2:1e-15"]
    assert _compare(repo, ".", ".", "--assert-equal", "--fields=loss", *tiny).returncode == 1


def test_both_sides_get_their_settings_and_one_seed_checkpoint(repo: Path, tmp_path: Path) -> None:
    dump = tmp_path / "dump"
    arguments = ["--baseline-ngpus=1", "--test-config=other.toml", "--test-options=--x=1 --y='a b'"]
    result = _compare(repo, ".", ".", f"--job-dump-folder={dump}", "--steps=7", *arguments)
    assert result.returncode == 0, result.stdout
    seed, base, test = (json.loads((dump / name / "seen.json").read_text()) for name in ("seed", "baseline", "test"))
    assert (seed["ngpu"], base["ngpu"], test["ngpu"]) == ("1", "1", "2")
    assert (base["config"], test["config"]) == (None, "other.toml")
    assert base["python"] == test["python"] == "/some/python"
    assert base["untracked"] and not base["ignored"]
    for side in (base, test):
        wanted = {"--debug.deterministic", "--debug.seed=42", "--metrics.log_freq=1", "--training.steps=7"}
        wanted |= {"--checkpoint.load_only", f"--checkpoint.initial_load_path={dump}/seed/checkpoint/step-0"}
        assert wanted <= set(side["argv"])
    assert test["argv"][-2:] == ["--x=1", "--y=a b"]  # last, so that they win
    _compare(repo, ".", ".", f"--job-dump-folder={tmp_path / 'none'}", "--no-seed-checkpoint")
    assert not (tmp_path / "none/seed").exists()


def test_output_and_results_are_kept(repo: Path, tmp_path: Path) -> None:
    out, stored = tmp_path / "out", tmp_path / "result.json"
    result = _compare(repo, "old", ".", f"--export-result={stored}", "--steps=5")
    assert result.returncode == 0, result.stdout
    same = _compare(repo, ".", ".", f"--import-result={stored}", "--assert-equal")
    other = _compare(repo, ".", "old", f"--import-result={stored}", "--assert-equal")
    assert (same.returncode, other.returncode) == (0, 1)
    (repo / "scripts/environment.sh").write_text(f"use_environment() {{ PYTHON={sys.executable}; }}\n")
    kept = _compare(repo, "old", ".", f"--output-folder={out}")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"baseline.log", "test.log", "losses.csv", "losses.json", "losses.png", "statistics.json"}
    assert (out / "losses.csv").read_text().splitlines()[4].startswith("4,6.0,6.0000003,")
    assert json.loads((out / "statistics.json").read_text())["largest_difference_step"] == 4
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_unknown_revisions_name_near_ones(repo: Path) -> None:
    result = _compare(repo, "mian", ".")
    assert result.returncode == 1
    assert "'mian' is no revision of" in result.stdout and "branches and tags: main" in result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_behind(repo: Path, tmp_path: Path, number: signal.Signals) -> None:
    before = _state(repo)
    dump = tmp_path / "dump"
    command = [
        sys.executable,
        "-I",
        str(_SCRIPT),
        "old",
        "main",
        "--baseline-options=--sleep=1",
        "--no-seed-checkpoint",
    ]
    process = subprocess.Popen(
        [*command, f"--job-dump-folder={dump}"],
        cwd=repo,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "NGPU": "1"},
    )
    log = dump / "baseline/train.log"
    deadline = time.monotonic() + 20
    while not (log.exists() and "sleeping" in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _git(repo, "worktree", "list").count("\n") == 3
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and f"Stopped by {number.name}" in output
    assert _state(repo) == before
    running = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(dump) not in running
