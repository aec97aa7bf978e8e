"""loss_compare on a small repository whose run_train.sh writes the numbers at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.compared_repo import RUN_TRAIN, git, make_compared_repo

_SCRIPT = Path(__file__).parents[3] / "scripts/loss_compare.py"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Return the repository; its path has a space."""
    return make_compared_repo(tmp_path / "a repo")


def _environment(**changes: str) -> dict[str, str]:
    names = ("NGPU", "CONFIG_FILE", "TRAIN_FILE", "PYTHON", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in names} | changes


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-I", str(_SCRIPT), *arguments]  # isolated: the standard library alone


def _compare(folder: Path, *arguments: str, seed: bool = False, **env: str) -> "subprocess.CompletedProcess[str]":
    """Compare 5 steps, unless the arguments say another number."""
    command = _command("--steps=5", *([] if seed else ["--no-seed-checkpoint"]), *arguments)
    environment = _environment(**{"NGPU": "2", **env})
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def _state(repo: Path) -> tuple[str, ...]:
    files = {
        str(path.relative_to(repo)): path.stat().st_mtime_ns for path in repo.rglob("*") if ".git" not in path.parts
    }
    return git(repo, "status", "--porcelain", "--ignored"), git(repo, "worktree", "list"), str(files)


def _seen(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "seen.json").read_text())


def _has_lines(output: str, lines: Sequence[str]) -> bool:
    """Return whether the lines come in this order, others between them."""
    rest = iter(output.splitlines())
    return all(any(line == wanted for line in rest) for wanted in lines)


def test_equal_runs_pass_with_the_lines_that_scripts_read(repo: Path) -> None:
    before = _state(repo)
    result = _compare(repo, ".", ".", "--assert-equal", seed=True)
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
        "[LOSS_COMPARE]",
        "[LOSS_COMPARE] Loss comparison complete. No results saved (no output folder specified).",
    ]
    assert _has_lines(result.stdout, wanted), result.stdout
    others = [line for line in result.stdout.splitlines() if not line.startswith("[LOSS_COMPARE]")]
    assert re.fullmatch(r"test_losses_equal \(.*\) \.\.\. ok", others[0]) and others[-1] == "OK"
    assert any(line.startswith("Ran 1 test in") for line in others)
    assert _state(repo) == before


def test_another_revision_runs_its_own_code_and_the_first_difference_is_named(repo: Path) -> None:
    """Runs that differ by 3e-7 at step 4: invisible in a log of six digits."""
    before = _state(repo)
    result = _compare(repo, "old", ".", "--assert-equal")
    assert result.returncode == 1
    a, b = 6.0, 6.0000003
    first = f"First difference: step 4, loss: baseline {a!r} ({a.hex()}), test {b!r} ({b.hex()})"
    assert f"[LOSS_COMPARE] {first}" in result.stdout.splitlines()
    assert f"[LOSS_COMPARE] Largest difference of loss: {b - a!r} at step 4; steps that differ: 1" in result.stdout
    assert "[LOSS_COMPARE] Losses differ. Assertion failed!" in result.stdout
    assert _state(repo) == before


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["--test-options=--change=2:1"], 0, "Largest difference:     1.000000 (step 2)"),
        (["--test-options=--change=2:1", "--assert-equal"], 1, "First difference: step 2, loss: baseline 8.0 "),
        (["--test-options=--logged=3", "--assert-equal"], 1, "the test lacks steps 4-5"),
        (["--test-options=--logged=4"], 1, "the test lacks step 5"),
        (["--steps=7", "--assert-equal"], 1, "the baseline lacks steps 6-7"),
        (["--baseline-options=--logged=0", "--assert-equal"], 1, "the baseline lacks steps 1-5"),
        (["--baseline-options=--change=3:nan", "--test-options=--change=3:nan", "--assert-equal"], 1, "step 3, loss"),
        (["--test-options=--change=2:1e-4", "--assert-equal", "--rtol=1e-4"], 0, "Assertion passed"),
        (["--test-options=--change=2:1e-2", "--assert-equal", "--rtol=1e-4"], 1, "Assertion failed"),
        (["--test-options=--change=2:1e-4", "--assert-equal", "--atol=1e-5"], 1, "Assertion failed"),
        (["--assert-equal", "--fields=perplexity"], 1, "no step has the field 'perplexity'"),
        (["--test-options=--fail=1"], 1, "\n[LOSS_COMPARE] the run failed as asked"),
        (["--test-options=--trailer=torn"], 1, "metrics.jsonl, line 6: no row of metrics"),
    ],
)
def test_what_differs_fails_and_is_named(repo: Path, arguments: list[str], code: int, part: str) -> None:
    before = _state(repo)
    result = _compare(repo, ".", ".", *arguments)
    assert result.returncode == code, result.stdout
    assert part in result.stdout
    assert _state(repo) == before


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([".", ".", "--rtol=1"], "add it"),
        ([".", ".", "--assert-equal", "--atol=inf"], "finite"),
        ([".", ".", "--steps=0"], "0 is not 1 or more"),
        ([".", ".", "--test-ngpus=two"], "two"),
        ([".", ".", "--fields=,"], "nothing would be compared"),
        ([".", ".", "--test-options='open"], "--test-options: No closing quotation"),
        (["."], "two revisions are needed"),
        ([".", ".", "."], "two revisions are needed"),
        (["mian", "."], "'mian' is no revision of"),
        ([".", "mian"], "branches and tags: main"),
        ([".", "--import-result=absent.json"], "absent.json"),
        ([".", "--import-result=values.txt"], "not what --export-result writes"),
    ],
)
def test_misuse_is_refused_before_anything_runs(repo: Path, arguments: list[str], part: str) -> None:
    before = _state(repo)
    result = _compare(repo, *arguments)
    assert result.returncode == 2
    assert part in result.stdout + result.stderr and "Running" not in result.stdout
    assert _state(repo) == before


def test_a_bad_ngpu_variable_and_a_folder_without_git_are_refused(repo: Path, tmp_path: Path) -> None:
    assert _compare(repo, ".", ".", NGPU="many").returncode == 2
    result = _compare(tmp_path, ".", ".")
    assert result.returncode == 2 and "is not inside a git working tree" in result.stdout


def test_equal_sides_are_two_runs(repo: Path, tmp_path: Path) -> None:
    """One code, one set of options: that is the check of determinism."""
    runs = f"--runs={tmp_path / 'runs'}"
    result = _compare(repo, "main", "main", f"--baseline-options={runs}", f"--test-options={runs}", "--assert-equal")
    assert result.returncode == 1 and "First difference: step 5, loss: baseline 6.0 " in result.stdout


def test_fields_choose_what_is_asserted(repo: Path) -> None:
    (repo / "run_train.sh").write_text(RUN_TRAIN.replace("norm = value / 2", "norm = float(len(options))"))
    sides = [".", ".", "--test-options=--one=1 --more=1", "--assert-equal"]
    assert _compare(repo, *sides, "--fields=loss").returncode == 0
    failed = _compare(repo, *sides)
    assert failed.returncode == 1 and "First difference: step 1, grad_norm" in failed.stdout


def test_both_sides_get_their_settings_and_one_seed_checkpoint(repo: Path, tmp_path: Path) -> None:
    dump = tmp_path / "the dump"
    config = str(tmp_path / "other.toml")
    arguments = ["--baseline-ngpus=1", f"--test-config={config}", "--test-options=--debug.seed=1 --y='a b'"]
    arguments += ["--baseline-train-file=my.trainer", f"--job-dump-folder={dump}"]
    result = _compare(repo, ".", ".", *arguments, seed=True)
    assert result.returncode == 0, result.stdout
    seed, base, test = (_seen(dump / name) for name in ("seed", "baseline", "test"))
    assert (seed["NGPU"], base["NGPU"], test["NGPU"]) == ("1", "1", "2")
    assert (seed["CONFIG_FILE"], base["CONFIG_FILE"], test["CONFIG_FILE"]) == (None, None, config)
    assert (seed["TRAIN_FILE"], base["TRAIN_FILE"], test["TRAIN_FILE"]) == ("my.trainer", "my.trainer", None)
    assert base["PYTHON"] == test["PYTHON"] == "/some/python"
    start = [
        "--debug.seed=42",
        "--training.steps=5",
        "--checkpoint.enable",
        "--checkpoint.load_only",
        f"--checkpoint.initial_load_path={dump}/seed/checkpoint/step-0",
    ]
    always = ["--debug.deterministic", "--metrics.log_freq=1"]
    assert base["argv"] == [*start, *always, f"--job.dump_folder={dump}/baseline"]
    # The user's options come later and win, but not over what makes the values comparable.
    assert test["argv"] == [*start, "--debug.seed=1", "--y=a b", *always, f"--job.dump_folder={dump}/test"]
    assert {"--parallelism.context_parallel_degree=1", "--parallelism.data_parallel_shard_degree=1"} <= set(
        seed["argv"]
    )


def test_variables_of_run_train_are_the_defaults(repo: Path, tmp_path: Path) -> None:
    (repo / "my.toml").write_text("")
    environment = {"CONFIG_FILE": "my.toml", "TRAIN_FILE": "my.trainer"}
    _compare(repo, ".", ".", f"--job-dump-folder={tmp_path / 'dump'}", **environment)
    seen = _seen(tmp_path / "dump/baseline")
    assert (seen["CONFIG_FILE"], seen["TRAIN_FILE"]) == ("my.toml", "my.trainer")
    command = _command(".", ".", "--steps=5", "--no-seed-checkpoint", f"--job-dump-folder={tmp_path / 'dump'}")
    subprocess.run(command, cwd=repo, env=_environment(), check=True, capture_output=True)
    assert _seen(tmp_path / "dump/test")["NGPU"] == "8"
    assert not (tmp_path / "dump/seed").exists()


def test_a_side_runs_in_its_own_tree_with_its_own_code_first(repo: Path, tmp_path: Path) -> None:
    """From a folder of the tree, and with the user's tree on the path; a file that the tree lacks is the user's."""
    configs = ["--baseline-config=environment.sh", "--test-config=../ignored.log"]
    arguments = ["old", ".", f"--job-dump-folder={tmp_path / 'dump'}", *configs]
    result = _compare(repo / "scripts", *arguments, PYTHONPATH=str(repo))
    assert result.returncode == 0, result.stdout
    old, now = _seen(tmp_path / "dump/baseline"), _seen(tmp_path / "dump/test")
    for seen in (old, now):
        assert Path(seen["tree"]) not in (repo, repo / "scripts")
        assert seen["cwd"] == f"{seen['tree']}/scripts"
        assert seen["PYTHONPATH"] == f"{seen['tree']}:{repo}"
    assert old["tree"] != now["tree"]
    assert old["CONFIG_FILE"] == "environment.sh" and Path(now["CONFIG_FILE"]).samefile(repo / "ignored.log")
    assert "untracked.txt" in now["files"] and "ignored.log" not in now["files"]
    assert "untracked.txt" not in old["files"]


def test_the_working_tree_is_taken_as_it_was_at_the_start(repo: Path) -> None:
    (repo / "values.txt").write_text("1.0\n2.0\n3.0\n4.0\n5.0\n")
    (repo / "untracked.txt").unlink()
    (repo / "scripts/link").symlink_to("environment.sh")
    git(repo, "rm", "-q", "--cached", "run_train.sh")  # staged as deleted, and there
    edit = f"--baseline-options='--edit={repo / 'values.txt'}'"
    result = _compare(repo, ".", ".", edit, "--assert-equal")
    assert result.returncode == 0, result.stdout
    assert "[LOSS_COMPARE] Average test loss: 3.0" in result.stdout


def test_results_are_exported_and_imported(repo: Path, tmp_path: Path) -> None:
    stored = tmp_path / "a/result.json"
    assert _compare(repo, "old", ".", "--assert-equal", f"--export-result={stored}").returncode == 1
    assert not stored.exists()  # no golden values from a run that is wrong
    assert _compare(repo, ".", ".", "--assert-equal", f"--export-result={stored}").returncode == 0
    command = _command(".", "--no-seed-checkpoint", f"--import-result={stored}", "--assert-equal")  # steps: as stored
    same = subprocess.run(command, cwd=repo, env=_environment(), capture_output=True, text=True, check=False)
    assert same.returncode == 0 and "Running the baseline" not in same.stdout
    assert f"[LOSS_COMPARE] Baseline log: {stored}" in same.stdout
    other = _compare(repo, ".", "old", f"--import-result={stored}", "--assert-equal")
    assert other.returncode == 1 and "First difference: step 4" in other.stdout
    short = _compare(repo, ".", f"--import-result={stored}", "--assert-equal", "--steps=3")
    assert short.returncode == 1 and "the test lacks steps 4-5" in short.stdout


def test_the_output_folder_keeps_all(repo: Path, tmp_path: Path) -> None:
    out = tmp_path / "the out"
    kept = _compare(repo, "old", ".", f"--output-folder={out}")
    assert kept.returncode == 0, kept.stdout + kept.stderr
    names = {path.name for path in out.iterdir()}
    assert names == {"baseline.log", "test.log", "losses.csv", "losses.json", "losses.png", "statistics.json"}
    assert (out / "losses.csv").read_text().splitlines()[4].startswith("4,6.0,6.0000003,2.9999999995311555e-07,0x1.8")
    assert json.loads((out / "losses.json").read_text())[3]["test_loss_hex"] == (6.0000003).hex()
    assert json.loads((out / "statistics.json").read_text())["largest_difference_step"] == 4
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert f"Results saved in {out}." in kept.stdout
    _compare(repo, ".", ".", f"--output-folder={out}", "--test-options=--fail=1")
    assert "failed as asked" in (out / "test.log").read_text()


def test_a_folder_with_other_files_is_not_emptied_for_a_run(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test/mine.txt").write_text("mine")
    result = _compare(repo, ".", ".", f"--job-dump-folder={tmp_path}")
    assert result.returncode == 1 and "choose another --job-dump-folder" in result.stdout
    assert (tmp_path / "test/mine.txt").read_text() == "mine"


def test_repositories_without_commits_or_with_few_of_them(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{repo}", "shallow")
    shallow = _compare(tmp_path / "shallow", "HEAD~1", ".")
    assert shallow.returncode == 2 and "git fetch --unshallow" in shallow.stdout
    assert _compare(tmp_path / "shallow", "HEAD", ".", "--assert-equal").returncode == 0
    git(tmp_path, "init", "-q", "unborn")
    for name in ("run_train.sh", "values.txt"):
        (tmp_path / "unborn" / name).write_bytes((repo / name).read_bytes())
    (tmp_path / "unborn/run_train.sh").chmod(0o755)
    unborn = _compare(tmp_path / "unborn", "HEAD", ".")
    assert unborn.returncode == 2 and "branches and tags: none yet" in unborn.stdout
    assert _compare(tmp_path / "unborn", ".", ".", "--assert-equal").returncode == 0


def test_a_revision_without_run_train_is_named(repo: Path) -> None:
    git(repo, "rm", "-q", "run_train.sh")
    git(repo, "commit", "-qm", "none")
    result = _compare(repo, "main", "old")
    assert result.returncode == 1 and "main has no run_train.sh" in result.stdout


def test_hooks_do_not_run_and_a_hooks_variables_do_not_lead_git_to_the_users_index(repo: Path) -> None:
    (repo / ".git/hooks").mkdir(exist_ok=True)
    (repo / ".git/hooks/post-checkout").write_text('#!/bin/sh\ntouch "$(git rev-parse --git-common-dir)/hook-ran"\n')
    (repo / ".git/hooks/post-checkout").chmod(0o755)
    index = (repo / ".git/index").read_bytes()
    environment = {"GIT_DIR": str(repo / ".git"), "GIT_INDEX_FILE": str(repo / ".git/index")}
    result = _compare(repo, "old", "old", "--assert-equal", **environment)
    assert result.returncode == 0, result.stdout
    assert (repo / ".git/index").read_bytes() == index
    assert not (repo / ".git/hook-ran").exists()


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("numbers", "sleep"),
    [
        ([signal.SIGINT], "1"),
        ([signal.SIGTERM], "1"),
        ([signal.SIGHUP], "1"),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT], "stubborn"),
    ],
)
def test_a_signal_leaves_nothing_behind(repo: Path, tmp_path: Path, numbers: list[signal.Signals], sleep: str) -> None:
    """Not even when the run ignores it, and more signals come while the first is answered."""
    before = _state(repo)
    dump = tmp_path / "dump"
    arguments = ["old", "main", f"--baseline-options=--sleep={sleep}", "--no-seed-checkpoint"]
    arguments += [f"--job-dump-folder={dump}"]
    environment = _environment(TMPDIR=str(tmp_path))
    process = subprocess.Popen(_command(*arguments), cwd=repo, env=environment, stdout=subprocess.PIPE, text=True)
    log = dump / "baseline/train.log"
    _wait_for(lambda: log.exists() and "sleeping" in log.read_text(), "the run starts")
    assert git(repo, "worktree", "list").count("\n") == 3
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + numbers[0]
    assert f"[LOSS_COMPARE] Stopped by {numbers[0].name}" in output
    assert _state(repo) == before
    assert not list(tmp_path.glob("loss_compare-*"))
    child = int(log.read_text().split("sleeping")[1])
    _wait_for(lambda: not _is_running(child), "the run's own child ends")
