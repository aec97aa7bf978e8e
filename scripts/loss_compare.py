#!/usr/bin/env python3
"""Prove that a change keeps the losses: train twice, compare every step bit by bit.

    python3 scripts/loss_compare.py BASELINE TEST [--steps=100] [--assert-equal] ...

BASELINE and TEST are git revisions, or "." for the working tree as it is now (tracked and not ignored files). Each side
has its own options, --baseline-X and --test-X. Both run in deterministic mode with one seed and start from one seed
checkpoint. The user's tree is never touched. Exit code: 0 equal (or no assertion), 1 different or failed, 2 misuse.

Needs the standard library only; the runs use run_train.sh of their own tree and the environment of this one.
"""

import argparse
import contextlib
import csv
import difflib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

_SEED = 42
_STOP_WAIT_S = 60
_TAIL_LINES = 40
_RULE = "=" * 42
_Steps = dict[int, dict[str, float]]  # step -> field -> exact value

_PLOT = """
import json, sys
try:
    import matplotlib
except ImportError:
    sys.exit("the plot needs matplotlib: pip install matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot as plt
rows = json.load(open(sys.argv[1]))
steps = [row["step"] for row in rows]
figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
top.plot(steps, [row["baseline_loss"] for row in rows], label="baseline")
top.plot(steps, [row["test_loss"] for row in rows], "--", label="test")
top.set_ylabel("loss")
top.legend()
bottom.plot(steps, [row["difference"] for row in rows], color="black")
bottom.set_ylabel("test - baseline")
bottom.set_xlabel("step")
figure.tight_layout()
figure.savefig(sys.argv[2], dpi=120)
"""


class CompareError(Exception):
    """The comparison cannot be made; shown in one line."""


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    name: str  # baseline or test
    revision: str
    config: str
    options: list[str]
    train_file: str
    ngpus: int


def say(text: str = "") -> None:
    """Print a line for people and for scripts that look for the prefix."""
    print(f"[LOSS_COMPARE] {text}".rstrip(), flush=True)


def main(argv: list[str]) -> int:
    """Run the comparison; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    args = parse_args(argv)
    try:
        return compare(args)
    except CompareError as error:
        say(f"ERROR: {error}")
        return 1
    except KeyboardInterrupt as stop:
        say(f"Stopped by {stop}; no worktree and no process is left")
        return 130


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Return the command line's values; exits with 2 for a bad one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", help='git revision, or "." for the working tree; not run with --import-result')
    parser.add_argument("test", help='git revision, or "."')
    default_ngpus = int(os.environ.get("NGPU", "8"))
    for side in ("baseline", "test"):
        parser.add_argument(f"--{side}-config", default="", help="TOML file; default: run_train.sh's")
        parser.add_argument(f"--{side}-options", default="", help="options of the run, in one string; they win")
        parser.add_argument(f"--{side}-train-file", default="", help="module or .py file; default: torchtitan.train")
        parser.add_argument(f"--{side}-ngpus", type=int, default=default_ngpus, help="processes; default: NGPU, else 8")
    parser.add_argument("--steps", type=int, default=100, help="steps of each run")
    parser.add_argument("--assert-equal", action="store_true", help="exit with 1 unless every step is bitwise equal")
    parser.add_argument("--fields", default="loss,grad_norm", help="comma-separated fields that are asserted")
    parser.add_argument("--rtol", type=float, help="assert closeness instead: relative tolerance")
    parser.add_argument("--atol", type=float, help="assert closeness instead: absolute tolerance")
    parser.add_argument("--no-seed-checkpoint", action="store_true", help="let each side draw its own initial weights")
    parser.add_argument("--job-dump-folder", default="", help="where the runs write; default: a temporary folder")
    parser.add_argument("--output-folder", default="", help="keep logs, losses (CSV, JSON), statistics and a plot here")
    parser.add_argument("--export-result", default="", help="write the test side's exact values to this JSON file")
    parser.add_argument("--import-result", default="", help="take the baseline's values from such a file")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps={args.steps}: at least one step is needed to compare")
    if min(args.baseline_ngpus, args.test_ngpus) < 1:
        parser.error("--baseline-ngpus and --test-ngpus must be 1 or more")
    if (args.rtol is not None or args.atol is not None) and not args.assert_equal:
        parser.error("--rtol and --atol say how --assert-equal compares; add it")
    return args


def compare(args: argparse.Namespace) -> int:
    """Run what is to be run, report, and assert."""
    repo = Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))
    baseline, test = (_side(args, name) for name in ("baseline", "test"))
    sides = [test] if args.import_result else [baseline, test]
    for side in sides:
        check_revision(repo, side.revision)
    fields = [field.strip() for field in args.fields.split(",") if field.strip()]
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loss_compare-")))
        trees = {side.name: stack.enter_context(checkout(repo, side, work)) for side in sides}
        dump = Path(args.job_dump_folder).resolve() if args.job_dump_folder else work / "outputs"
        python = find_python(repo)
        seed = [] if args.no_seed_checkpoint else seed_checkpoint(sides[0], trees[sides[0].name], dump, python)
        logs = {side.name: train(side, trees[side.name], dump, python, args.steps, seed) for side in sides}
        results = {side.name: read_metrics(dump / side.name / "metrics.jsonl") for side in sides}
        if args.import_result:
            results["baseline"] = import_result(Path(args.import_result))
            logs["baseline"] = Path(args.import_result)
        code = report(args, fields, results, logs)
        if args.export_result:
            export_result(Path(args.export_result), results["test"])
            say(f"Exported the test side's values to {args.export_result}")
        save_output(args.output_folder, results, logs, python)
    return code


def _side(args: argparse.Namespace, name: str) -> Side:
    values = vars(args)
    options = shlex.split(values[f"{name}_options"])
    train_file, ngpus = values[f"{name}_train_file"], values[f"{name}_ngpus"]
    return Side(name, values[name], values[f"{name}_config"], options, train_file, ngpus)


def git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command."""
    result = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise CompareError(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.rstrip("\n")


def check_revision(repo: Path, revision: str) -> None:
    """Raise a CompareError that names similar revisions, if there is none of this name."""
    if revision == ".":
        return
    try:
        git(repo, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    except CompareError:
        names = git(repo, "for-each-ref", "--format=%(refname:short)").split()
        near = ", ".join(difflib.get_close_matches(revision, names)) or "none of a similar name"
        raise CompareError(f"{revision!r} is no revision of {repo}; branches and tags: {near}") from None


@contextlib.contextmanager
def checkout(repo: Path, side: Side, work: Path) -> Iterator[Path]:
    """Have the side's code in a folder of its own: a worktree of a revision, or a copy of the working tree."""
    tree = work / side.name
    if side.revision == ".":
        copy_working_tree(repo, tree)
        yield tree
        return
    git(repo, "worktree", "add", "--detach", str(tree), side.revision)
    try:
        yield tree
    finally:
        git(repo, "worktree", "remove", "--force", str(tree))


def copy_working_tree(repo: Path, tree: Path) -> None:
    """Copy the tracked and the not ignored files, as they are now."""
    listed = git(repo, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for name in filter(None, listed):
        source, target = repo / name, tree / name
        if source.is_symlink() or source.is_file():  # not a file that was deleted, nor a submodule
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def find_python(repo: Path) -> str:
    """Return the interpreter that this tree's run_train.sh would use; both sides run in that environment."""
    script = repo / "scripts/environment.sh"
    command = ["bash", "-c", 'source "$0"; use_environment train; printf %s "$PYTHON"', str(script)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise CompareError("no environment to train in (see above)")
    return result.stdout


def seed_checkpoint(side: Side, tree: Path, dump: Path, python: str) -> list[str]:
    """Make the initial weights once, in one process; returns the options that start a run from them."""
    say("Creating the seed checkpoint...")
    one = ["--parallelism.data_parallel_shard_degree=1", "--parallelism.context_parallel_degree=1"]
    options = [*side.options, *one, "--training.global_batch_size=-1"]
    options += ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"]
    run(
        Side("seed", side.revision, side.config, options, side.train_file, 1),
        tree,
        dump,
        python,
        ["--training.steps=1"],
    )
    path = dump / "seed/checkpoint/step-0"
    return ["--checkpoint.enable", "--checkpoint.load_only", f"--checkpoint.initial_load_path={path}"]


def train(side: Side, tree: Path, dump: Path, python: str, steps: int, seed: list[str]) -> Path:
    """Run one side; returns the path of its log."""
    say(f"Running the {side.name}: {side.revision}, {side.ngpus} processes, {steps} steps...")
    return run(side, tree, dump, python, [f"--training.steps={steps}", *seed])


def run(side: Side, tree: Path, dump: Path, python: str, options: list[str]) -> Path:
    """Run run_train.sh of the side's tree to its end; raises CompareError with the end of its log if it fails."""
    folder = dump / side.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "train.log"
    settings = {"NGPU": str(side.ngpus), "PYTHON": python, "CONFIG_FILE": side.config, "TRAIN_FILE": side.train_file}
    unset = {name for name, value in settings.items() if not value}
    environment = {name: value for name, value in (os.environ | settings).items() if name not in unset}
    command = [str(tree / "run_train.sh"), "--debug.deterministic", f"--debug.seed={_SEED}", "--metrics.log_freq=1"]
    command += [f"--job.dump_folder={folder}", *options, *side.options]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, start_new_session=True)
        try:
            code = process.wait()
        finally:
            stop(process)
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        raise CompareError(f"the {side.name} run ended with exit code {code}; the end of its log:\n{tail}")
    return log


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Have the process and what it started end: asked first, killed when that takes too long."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WAIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_metrics(path: Path) -> _Steps:
    """Return the exact values of every step that a run logged."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    exact = ((row, [key for key in row if key.endswith("_hex")]) for row in rows)
    return {
        row["step"]: {key.removesuffix("_hex"): float.fromhex(row[key]) for key in keys} for row, keys in exact if keys
    }


def import_result(path: Path) -> _Steps:
    """Return what `export_result` wrote."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CompareError(f"--import-result={path}: {error}") from None
    return {int(step): {key: float.fromhex(value) for key, value in row.items()} for step, row in stored.items()}


def export_result(path: Path, steps: _Steps) -> None:
    """Write exact values by step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    exact = {str(step): {key: value.hex() for key, value in row.items()} for step, row in steps.items()}
    path.write_text(json.dumps(exact, indent=1) + "\n")


def report(args: argparse.Namespace, fields: list[str], results: dict[str, _Steps], logs: dict[str, Path]) -> int:
    """Print the assertion, if asked for, and the analysis; returns the exit code."""
    baseline, test = results["baseline"], results["test"]
    code = 0
    if args.assert_equal:
        say()
        say("Asserting losses are equal...")
        for name in ("baseline", "test"):
            say(f"{name.capitalize()} log: {logs[name]}")
        for name in ("baseline", "test"):
            say(f"Extracted {len(results[name])} steps from {name} log")
        problems = differences(baseline, test, fields, args.rtol, args.atol)
        code = 0 if _unittest(problems) else 1
        say("All losses are equal. Assertion passed!" if code == 0 else "Losses differ. Assertion failed!")
        for line in problems:
            say(line)
    if not baseline or not test:
        raise CompareError("a side logged no step, so there is nothing to compare")
    _analysis(baseline, test)
    say()
    kept = (
        f"Results saved in {args.output_folder}"
        if args.output_folder
        else "No results saved (no output folder specified)"
    )
    say(f"Loss comparison complete. {kept}.")
    return code


def differences(baseline: _Steps, test: _Steps, fields: list[str], rtol: float | None, atol: float | None) -> list[str]:
    """Return what is unequal, in words: nothing for equal runs. NaN equals nothing; a missing step is a difference."""
    problems = []
    if not baseline or not test:
        problems.append("a side has no step")
    for name, have, other in (("baseline", baseline, test), ("test", test, baseline)):
        if missing := sorted(other.keys() - have.keys()):
            problems.append(f"the {name} lacks steps {', '.join(map(str, missing))}")
    common = sorted(baseline.keys() & test.keys())
    absent = [f for f in fields if any(f not in steps[step] for steps in (baseline, test) for step in common)]
    problems += [f"field {field!r} was not logged by both sides" for field in absent]
    triples = [(step, field) for step in common for field in fields if field not in absent]
    unequal = [pair for pair in triples if not _equal(baseline[pair[0]][pair[1]], test[pair[0]][pair[1]], rtol, atol)]
    if unequal:
        step, field = unequal[0]
        a, b = baseline[step][field], test[step][field]
        problems.append(f"First difference: step {step}, {field}: baseline {a!r} ({a.hex()}), test {b!r} ({b.hex()})")
        step, field = max(unequal, key=lambda pair: _distance(baseline[pair[0]][pair[1]], test[pair[0]][pair[1]]))
        largest = _distance(baseline[step][field], test[step][field])
        problems.append(f"Largest difference: {largest!r} at step {step}, {field}; {len(unequal)} values differ")
    return problems


def _equal(a: float, b: float, rtol: float | None, atol: float | None) -> bool:
    if rtol is None and atol is None:
        return a == b
    return abs(a - b) <= (atol or 0.0) + (rtol or 0.0) * abs(a)  # false for NaN


def _distance(a: float, b: float) -> float:
    return math.inf if math.isnan(a - b) else abs(a - b)


def _unittest(problems: list[str]) -> bool:
    class LossEquality(unittest.TestCase):
        def test_losses_equal(self) -> None:
            self.assertEqual(problems, [])

    suite = unittest.defaultTestLoader.loadTestsFromTestCase(LossEquality)
    return unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite).wasSuccessful()


def _analysis(baseline: _Steps, test: _Steps) -> None:
    rows = loss_rows(baseline, test)
    for line in (_RULE, "LOSS COMPARISON ANALYSIS", _RULE, "", "Step-by-step loss comparison:"):
        say(line)
    say("Step    Baseline Loss    Test Loss   Difference")
    say("----    -------------    ---------   ----------")
    for row in rows:
        say(f"{row['step']:<8}{row['baseline_loss']:<17.4f}{row['test_loss']:<17.4f}{row['difference']:.6f}")
    if not rows:
        return
    numbers = statistics(rows)
    say()
    say("Summary statistics:")
    say(f"Average baseline loss:  {numbers['average_baseline_loss']}")
    say(f"Average test loss: {numbers['average_test_loss']}")
    say(f"Average difference:     {numbers['average_difference']:.6f}")
    say(f"Largest difference:     {numbers['largest_difference']:.6f} (step {numbers['largest_difference_step']:.0f})")


def loss_rows(baseline: _Steps, test: _Steps) -> list[dict[str, float]]:
    """Return the losses of the steps that both sides have."""
    common = sorted(baseline.keys() & test.keys())
    pairs = ((step, baseline[step]["loss"], test[step]["loss"]) for step in common)
    return [{"step": step, "baseline_loss": a, "test_loss": b, "difference": b - a} for step, a, b in pairs]


def statistics(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return means and the largest difference."""
    largest = max(rows, key=lambda row: _distance(row["baseline_loss"], row["test_loss"]))
    return {
        "average_baseline_loss": sum(row["baseline_loss"] for row in rows) / len(rows),
        "average_test_loss": sum(row["test_loss"] for row in rows) / len(rows),
        "average_difference": sum(row["difference"] for row in rows) / len(rows),
        "largest_difference": abs(largest["difference"]),
        "largest_difference_step": largest["step"],
    }


def save_output(folder: str, results: dict[str, _Steps], logs: dict[str, Path], python: str) -> None:
    """Keep logs, losses, statistics and a plot, if a folder was given."""
    if not folder:
        return
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, log in logs.items():
        shutil.copy(log, target / f"{name}{log.suffix}")
    rows = loss_rows(results["baseline"], results["test"])
    (target / "losses.json").write_text(json.dumps(rows, indent=1) + "\n")
    with (target / "losses.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "baseline_loss", "test_loss", "difference"])
        writer.writeheader()
        writer.writerows(rows)
    if rows:
        (target / "statistics.json").write_text(json.dumps(statistics(rows), indent=1) + "\n")
        plot = [python, "-c", _PLOT, str(target / "losses.json"), str(target / "losses.png")]
        if subprocess.run(plot, check=False).returncode:
            raise CompareError(f"losses.png could not be drawn (see above); all else is in {target}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
