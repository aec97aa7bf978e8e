#!/usr/bin/env python3
"""Prove that a change keeps the losses: train twice, compare every step bit by bit.

    python3 scripts/loss_compare.py BASELINE TEST [--steps=100] [--assert-equal] ...
    python3 scripts/loss_compare.py TEST --import-result=FILE [--assert-equal] ...

BASELINE and TEST are git revisions, or "." for the working tree as it is now (tracked and not ignored files). Each side
has its own options, --baseline-X and --test-X. Both run in deterministic mode with one seed and start from one seed
checkpoint. The user's tree is never touched. Exit code: 0 equal (or nothing asserted), 1 different or failed, 2 misuse,
128 + N stopped by signal N.

Needs the standard library only; the runs use run_train.sh of their own tree and the environment of this one.
"""

# ruff: noqa: E402 - how this script imports its own parts has to be said before it does
import argparse
import contextlib
import math
import os
import shlex
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True  # nothing is written into the user's tree
sys.path.insert(0, str(Path(__file__).resolve().parent))  # python -I and -P leave it out

from loss_compare_lib.children import Stopped, StopSignals
from loss_compare_lib.console import CompareError, say
from loss_compare_lib.losses import (
    Closeness,
    Steps,
    differences,
    export_result,
    import_result,
    missing,
    read_metrics,
)
from loss_compare_lib.report import analysis, assert_equal, find_plotter, save
from loss_compare_lib.runs import Place, Runner, Side, find_python
from loss_compare_lib.trees import checkout, find_repository, resolve


def main(argv: list[str]) -> int:
    """Run the comparison; returns the exit code."""
    args = parse_args(argv)
    signals = StopSignals()
    signals.install()
    try:
        return compare(args, signals)
    except CompareError as error:
        say(f"ERROR: {error}")
        return error.exit_code
    except OSError as error:  # a disk that is full, a folder that cannot be written
        say(f"ERROR: {error}")
        return CompareError.exit_code
    except Stopped as stop:
        say(f"Stopped by {stop}; no worktree and no process is left")
        return stop.exit_code


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Return the command line's values; exits with 2 for a bad one."""
    parser = _parser()
    args = parser.parse_intermixed_args(argv)
    if len(args.revisions) not in ((1, 2) if args.import_result else (2,)):
        given = " ".join(args.revisions)
        parser.error(f"{given!r}: two revisions are needed, BASELINE and TEST, or only TEST with --import-result")
    args.baseline, args.test = ["", *args.revisions][-2:]
    for name in ("baseline", "test"):
        try:
            setattr(args, f"{name}_options", shlex.split(vars(args)[f"{name}_options"]))
        except ValueError as error:
            parser.error(f"--{name}-options: {error}")
    args.fields = [field.strip() for field in args.fields.split(",") if field.strip()]
    if not args.fields:
        parser.error("--fields names no field, so nothing would be compared")
    tolerances = [value for value in (args.rtol, args.atol) if value is not None]
    if tolerances and not args.assert_equal:
        parser.error("--rtol and --atol say how --assert-equal compares; add it")
    if not all(math.isfinite(value) and value >= 0 for value in tolerances):
        parser.error("--rtol and --atol must be 0 or more, and finite")
    return args


def _parser() -> argparse.ArgumentParser:
    usage, _, description = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        usage="loss_compare.py BASELINE TEST [options]",
        description=f"{usage}\n\n{description}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("revisions", nargs="+", metavar="REVISION", help='git revision, or "." for the working tree')
    for side in ("baseline", "test"):
        option = parser.add_argument
        option(f"--{side}-config", default=os.environ.get("CONFIG_FILE", ""), help="TOML file; default: CONFIG_FILE")
        option(f"--{side}-options", default="", help="options of the run, in one string")
        option(f"--{side}-train-file", default=os.environ.get("TRAIN_FILE", ""), help="program; default: TRAIN_FILE")
        option(
            f"--{side}-ngpus", type=_positive, default=os.environ.get("NGPU", "8"), help="processes; default: NGPU, 8"
        )
    parser.add_argument("--steps", type=_positive, help="steps of each run; default: 100, or those of --import-result")
    parser.add_argument("--assert-equal", action="store_true", help="exit with 1 unless every step is bitwise equal")
    parser.add_argument("--fields", default="loss,grad_norm", help="comma-separated fields that are compared")
    parser.add_argument("--rtol", type=float, help="assert closeness instead: relative to the baseline")
    parser.add_argument("--atol", type=float, help="assert closeness instead: absolute")
    parser.add_argument("--no-seed-checkpoint", action="store_true", help="let each side draw its own initial weights")
    parser.add_argument("--job-dump-folder", default="", help="where the runs write; default: a temporary folder")
    parser.add_argument("--output-folder", default="", help="keep logs, losses (CSV, JSON), statistics and a plot here")
    parser.add_argument("--export-result", default="", help="write the test side's exact values here, unless it fails")
    parser.add_argument("--import-result", default="", help="compare with the values of such a file, not with a run")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def compare(args: argparse.Namespace, signals: StopSignals) -> int:
    """Run what is to be run, report, and keep what was asked for; returns the exit code."""
    repo = find_repository(Path.cwd())
    stored = import_result(Path(args.import_result)) if args.import_result else {}
    args.steps = args.steps or len(stored) or 100
    sides = [_side(args, name) for name in (["test"] if args.import_result else ["baseline", "test"])]
    commits = {side.revision: resolve(repo, side.revision) for side in sides}
    output = Path(args.output_folder).absolute() if args.output_folder else None
    if output:
        output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="loss_compare-"))).resolve()
        places = {}
        for commit in sorted(set(commits.values())):  # the working tree first: as it was at the start
            tree = stack.enter_context(checkout(repo, commit, work / f"tree-{commit[:12].strip('.') or 'working'}"))
            places[commit] = _place(repo, tree)
        python = find_python(repo, signals)
        plotter = find_plotter([python, sys.executable]) if output else ""
        dump = Path(args.job_dump_folder).absolute() if args.job_dump_folder else work / "outputs"
        runner = Runner(python, dump, output, signals)
        results, logs = run_sides(args, runner, sides, {side.name: places[commits[side.revision]] for side in sides})
        if args.import_result:
            results, logs = {"baseline": stored, **results}, {"baseline": Path(args.import_result), **logs}
        code = report(args, results, logs)
        if output:
            save(output, results, plotter, signals)
    if args.export_result:
        _export(args.export_result, results["test"], code)
    return code


def _side(args: argparse.Namespace, name: str) -> Side:
    values = vars(args)
    names = ("", "_config", "_options", "_train_file", "_ngpus")
    return Side(name, *(values[f"{name}{suffix}"] for suffix in names))


def _place(repo: Path, tree: Path) -> Place:
    """Return where a side runs: below its own tree, so that nothing of the user's folder is imported in its stead."""
    folder = tree / Path.cwd().resolve().relative_to(repo.resolve())
    return Place(tree, folder if folder.is_dir() else tree)


def run_sides(
    args: argparse.Namespace, runner: Runner, sides: list[Side], places: dict[str, Place]
) -> tuple[dict[str, Steps], dict[str, Path]]:
    """Return each side's exact values and log."""
    first = sides[0]
    start = [] if args.no_seed_checkpoint else runner.seed_checkpoint(first, places[first.name])
    logs = {side.name: runner.train(side, places[side.name], args.steps, start) for side in sides}
    return {side.name: read_metrics(runner.metrics(side)) for side in sides}, logs


def report(args: argparse.Namespace, results: dict[str, Steps], logs: dict[str, Path]) -> int:
    """Print the assertion, if asked for, the analysis and what differs; returns the exit code."""
    baseline, test = results["baseline"], results["test"]
    lacking = missing(baseline, test, args.fields, {name: _expected(args, name) for name in results})
    problems = [*differences(baseline, test, args.fields, Closeness(args.rtol, args.atol)), *lacking]
    failed = bool(lacking)  # there is no comparison without both sides' steps
    if args.assert_equal:
        failed = not assert_equal(problems, results, logs)
    analysis(baseline, test)
    if problems:
        say()
        say("\n".join(problems))
    say()
    folder = args.output_folder
    saved = f"Results saved in {folder}" if folder else "No results saved (no output folder specified)"
    say(f"Loss comparison complete. {saved}.")
    return int(failed)


def _expected(args: argparse.Namespace, name: str) -> range:
    """Return the steps that a side must have logged, unless its own options say how many it makes."""
    stored = name == "baseline" and args.import_result
    own = any(word.replace("-", "_").startswith("__training.steps") for word in vars(args)[f"{name}_options"])
    return range(0) if stored or own else range(1, args.steps + 1)


def _export(path: str, steps: Steps, code: int) -> None:
    if code:
        say(f"Nothing exported to {path}: the comparison failed")
        return
    export_result(Path(path), steps)
    say(f"Exported the test side's values to {path}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
