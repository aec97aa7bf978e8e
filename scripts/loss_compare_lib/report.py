"""The assertion, the analysis, and what is kept of it."""

import csv
import json
import math
import os
import subprocess
import sys
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .children import StopSignals, run_child
from .console import CompareError, say
from .losses import LOSS, Steps, loss_rows, statistics, values_of

_RULE = "=" * 42
_PLOT = """
import csv, sys, matplotlib
matplotlib.use("Agg")
from matplotlib import pyplot as plt
rows = list(csv.DictReader(open(sys.argv[1])))
steps = [int(row["step"]) for row in rows]
column = lambda name: [float(row[name]) for row in rows]
figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
top.plot(steps, column("baseline_loss"), label="baseline")
top.plot(steps, column("test_loss"), "--", label="test")
top.set_ylabel("loss")
top.legend()
bottom.plot(steps, column("difference"), color="black")
bottom.set_ylabel("test - baseline")
bottom.set_xlabel("step")
figure.tight_layout()
figure.savefig(sys.argv[2], dpi=120)
"""


def assert_equal(problems: Sequence[str], sides: Mapping[str, Steps], logs: Mapping[str, Path]) -> bool:
    """Print the assertion as people and scripts read it; returns whether it holds."""
    say()
    say("Asserting losses are equal...")
    for name, log in logs.items():
        say(f"{name.capitalize()} log: {log}")
    for name, steps in sides.items():
        say(f"Extracted {len(values_of(steps, LOSS))} steps from {name} log")
    equal = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(LossEquality(problems)).wasSuccessful()
    say("All losses are equal. Assertion passed!" if equal else "Losses differ. Assertion failed!")
    return equal


class LossEquality(unittest.TestCase):
    """Fails with the problems that were found; it is there for its lines, which people and scripts know."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("test_losses_equal")
        self.problems = problems

    def test_losses_equal(self) -> None:
        # No docstring: unittest would show it, and break the line in two.
        if self.problems:
            self.fail("\n".join(self.problems))


def analysis(baseline: Steps, test: Steps) -> None:
    """Print the losses step by step, and their statistics."""
    for line in (_RULE, "LOSS COMPARISON ANALYSIS", _RULE, "", "Step-by-step loss comparison:"):
        say(line)
    say("Step    Baseline Loss    Test Loss   Difference")
    say("----    -------------    ---------   ----------")
    rows = loss_rows(baseline, test)
    for row in rows:
        say(f"{row['step']:<8}{row['baseline_loss']:<17.4f}{row['test_loss']:<17.4f}{row['difference']:.6f}")
    say()
    if not rows:
        say("No step is common to both sides.")
        return
    numbers = statistics(rows)
    say("Summary statistics:")
    say(f"Average baseline loss:  {numbers['average_baseline_loss']}")
    say(f"Average test loss: {numbers['average_test_loss']}")
    say(f"Average difference:     {numbers['average_difference']:.6f}")
    say(f"Largest difference:     {numbers['largest_difference']:.6f} (step {numbers['largest_difference_step']})")


def find_plotter(pythons: Sequence[str]) -> str:
    """Return the first interpreter that has matplotlib; empty: none has, which is said now, before the runs."""
    for python in filter(None, pythons):
        probe = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('matplotlib') is None)"]
        try:
            if subprocess.run(probe, check=False).returncode == 0:
                return python
        except OSError:
            continue
    python = pythons[0] or sys.executable
    say(f"losses.png will not be drawn, for it needs matplotlib: {python} -m pip install matplotlib")
    return ""


def save(folder: Path, sides: Mapping[str, Steps], plotter: str, signals: StopSignals) -> None:
    """Keep losses (CSV and JSON), statistics and, with a plotter, a plot."""
    rows = loss_rows(sides["baseline"], sides["test"])
    _write_json(folder / "losses.json", [_strict(row) for row in rows])
    table = folder / "losses.csv"
    with table.open("w", newline="") as file:
        columns = ["step", "baseline_loss", "test_loss", "difference", "baseline_loss_hex", "test_loss_hex"]
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    _write_json(folder / "statistics.json", _strict(statistics(rows)) if rows else {"steps": 0})
    if rows and plotter:
        command = [plotter, "-c", _PLOT, table.name, "losses.png"]
        if run_child(command, signals, cwd=folder, environment=os.environ, output=subprocess.DEVNULL, errors=None):
            raise CompareError(f"losses.png could not be drawn (see above); all else is in {folder}")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n")


def _strict(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row as JSON may hold it: null for what is no finite number."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
