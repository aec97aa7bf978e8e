"""Exact values of runs: read, kept, and compared. NaN equals nothing, and a missing step is a difference."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .console import CompareError, UsageError

Steps = Mapping[int, Mapping[str, float]]  # step -> field -> exact value
LOSS = "loss"
_HEX = "_hex"


@dataclass(frozen=True)
class Closeness:
    """How far values may be apart; None and None: not one bit."""

    rtol: float | None = None
    atol: float | None = None

    def holds(self, baseline: float, test: float) -> bool:
        """Return whether two values count as equal."""
        if baseline.hex() == test.hex():
            return not math.isnan(baseline)
        if self.rtol is None and self.atol is None:
            return False
        return abs(test - baseline) <= (self.atol or 0.0) + (self.rtol or 0.0) * abs(baseline)  # false for NaN


def read_metrics(path: Path) -> Steps:
    """Return every field that a run wrote exactly, as FIELD_hex; nothing, if there is no file."""
    steps: dict[int, dict[str, float]] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            exact = {key.removesuffix(_HEX): float.fromhex(row[key]) for key in row if key.endswith(_HEX)}
            steps.setdefault(row["step"], {}).update(exact)  # a validation row has the step of a training row
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CompareError(f"{path}, line {number}: no row of metrics: {error!r}") from None
    return steps


def import_result(path: Path) -> Steps:
    """Return what `export_result` wrote."""
    try:
        stored = json.loads(path.read_text())
        return {int(step): {key: float.fromhex(value) for key, value in row.items()} for step, row in stored.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"--import-result={path}: not what --export-result writes: {error}") from None


def export_result(path: Path, steps: Steps) -> None:
    """Write exact values by step."""
    exact = {str(step): {key: value.hex() for key, value in row.items()} for step, row in steps.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(exact, indent=1) + "\n")


def values_of(steps: Steps, field: str) -> dict[int, float]:
    """Return one field's values by step, in order."""
    return {step: steps[step][field] for step in sorted(steps) if field in steps[step]}


def differences(baseline: Steps, test: Steps, fields: Sequence[str], closeness: Closeness) -> list[str]:
    """Return in words where values that both sides have are unequal: the first, then the largest of each field."""
    sides = {field: (values_of(baseline, field), values_of(test, field)) for field in fields}
    found = [
        (step, field, a[step], b[step])
        for field, (a, b) in sides.items()
        for step in a
        if step in b and not closeness.holds(a[step], b[step])
    ]
    problems = []
    if found:
        step, field, before, now = min(found, key=lambda item: (item[0], fields.index(item[1])))
        problems.append(f"First difference: step {step}, {field}: baseline {_exact(before)}, test {_exact(now)}")
    problems += [_largest(field, found) for field in fields if any(item[1] == field for item in found)]
    return problems


def missing(baseline: Steps, test: Steps, fields: Sequence[str], expected: Mapping[str, Iterable[int]]) -> list[str]:
    """Return in words which steps, and which fields of the steps, a side lacks; `expected` is by side."""
    sides = {"baseline": baseline, "test": test}
    logged = {name: values_of(steps, LOSS).keys() for name, steps in sides.items()}
    everywhere = logged["baseline"] | logged["test"]
    lacking = {name: sorted((everywhere | set(expected[name])) - logged[name]) for name in sides}
    problems = [f"Missing: the {name} lacks {_ranges(steps)}" for name, steps in lacking.items() if steps]
    if not any(logged.values()):
        problems.append("Missing: no side has a step, so nothing was compared")
    return [*problems, *(line for field in fields for line in _missing_field(field, sides))]


def _missing_field(field: str, sides: Mapping[str, Steps]) -> list[str]:
    common = sides["baseline"].keys() & sides["test"].keys()
    has = {name: {step for step in common if field in steps[step]} for name, steps in sides.items()}
    somewhere = has["baseline"] | has["test"]
    if common and not somewhere:
        return [f"Missing: no step has the field {field!r}"]
    absent = {name: sorted(somewhere - steps) for name, steps in has.items()}
    return [f"Missing: the {name} lacks {field} at {_ranges(steps)}" for name, steps in absent.items() if steps]


def _largest(field: str, found: Sequence[tuple[int, str, float, float]]) -> str:
    unequal = [(distance(a, b), step) for step, name, a, b in found if name == field]
    largest, step = max(unequal, key=lambda pair: (pair[0], -pair[1]))
    return f"Largest difference of {field}: {largest!r} at step {step}; steps that differ: {len(unequal)}"


def distance(baseline: float, test: float) -> float:
    """Return how far apart two values are; infinite where one is not a number."""
    if baseline == test:
        return 0.0
    return math.inf if math.isnan(test - baseline) else abs(test - baseline)


def _exact(value: float) -> str:
    return f"{value!r} ({value.hex()})"


def _ranges(steps: Sequence[int]) -> str:
    """Return such as "steps 3, 5-9"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"step{'s' * (len(steps) > 1)} {words}"


def loss_rows(baseline: Steps, test: Steps) -> list[dict[str, Any]]:
    """Return the losses of the steps that both sides have, with their exact values."""
    a, b = values_of(baseline, LOSS), values_of(test, LOSS)
    return [
        {
            "step": step,
            "baseline_loss": a[step],
            "test_loss": b[step],
            "difference": b[step] - a[step],
            "baseline_loss_hex": a[step].hex(),
            "test_loss_hex": b[step].hex(),
        }
        for step in a
        if step in b
    ]


def statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means and the largest difference; the rows are at least one."""
    largest = max(rows, key=lambda row: distance(row["baseline_loss"], row["test_loss"]))
    return {
        "steps": len(rows),
        "average_baseline_loss": sum(row["baseline_loss"] for row in rows) / len(rows),
        "average_test_loss": sum(row["test_loss"] for row in rows) / len(rows),
        "average_difference": sum(row["difference"] for row in rows) / len(rows),
        "largest_difference": abs(largest["difference"]),
        "largest_difference_step": largest["step"],
    }
