"""What loss_compare calls equal."""

import json
import math
import sys
from pathlib import Path

import pytest

from scripts.loss_compare_lib.console import CompareError, UsageError
from scripts.loss_compare_lib.losses import (
    Closeness,
    Steps,
    differences,
    export_result,
    import_result,
    loss_rows,
    missing,
    read_metrics,
    statistics,
)
from scripts.loss_compare_lib.report import find_plotter

_EXACT = Closeness()


def _losses(*values: float) -> Steps:
    return {step: {"loss": value} for step, value in enumerate(values, 1)}


@pytest.mark.parametrize(
    ("closeness", "baseline", "test", "equal"),
    [
        (_EXACT, 1.0, 1.0, True),
        (_EXACT, 1.0, math.nextafter(1.0, 2.0), False),
        (_EXACT, 0.0, -0.0, False),  # other bits
        (_EXACT, math.inf, math.inf, True),
        (_EXACT, math.nan, math.nan, False),
        (Closeness(rtol=0.1), 10.0, 11.0, True),
        (Closeness(rtol=0.1), 10.0, 11.1, False),
        (Closeness(rtol=0.1), 10.0, 9.0, True),
        (Closeness(atol=0.5), 10.0, 10.5, True),
        (Closeness(atol=0.5), 10.0, 10.6, False),
        (Closeness(rtol=0.01, atol=0.5), 10.0, 10.6, True),
        (Closeness(rtol=0.1), math.nan, math.nan, False),
        (Closeness(rtol=0.1), math.inf, math.inf, True),
        (Closeness(rtol=0.1, atol=9.0), 1.0, math.inf, False),
        (Closeness(atol=0.0), 0.0, -0.0, True),
    ],
)
def test_closeness(closeness: Closeness, baseline: float, test: float, equal: bool) -> None:
    assert closeness.holds(baseline, test) is equal


def test_the_first_difference_is_of_the_first_step_and_then_of_the_first_field() -> None:
    baseline = {1: {"loss": 1.0, "grad_norm": 1.0}, 2: {"loss": 2.0, "grad_norm": 2.0}}
    test = {1: {"loss": 1.0, "grad_norm": 1.5}, 2: {"loss": 5.0, "grad_norm": 2.25}}
    lines = differences(baseline, test, ["loss", "grad_norm"], _EXACT)
    assert lines == [
        "First difference: step 1, grad_norm: baseline 1.0 (0x1.0000000000000p+0), test 1.5 (0x1.8000000000000p+0)",
        "Largest difference of loss: 3.0 at step 2; steps that differ: 1",
        "Largest difference of grad_norm: 0.5 at step 1; steps that differ: 2",
    ]
    assert differences(baseline, test, ["grad_norm", "loss"], _EXACT)[0] == lines[0]
    assert differences(baseline, baseline, ["loss", "grad_norm"], _EXACT) == []


def test_steps_are_in_order_of_their_numbers() -> None:
    shuffled = {10: {"loss": 1.0}, 9: {"loss": 1.0}}
    assert [row["step"] for row in loss_rows(shuffled, shuffled)] == [9, 10]
    assert "step 9, loss" in differences(shuffled, {9: {"loss": 2.0}, 10: {"loss": 2.0}}, ["loss"], _EXACT)[0]


def test_nan_is_the_largest_difference() -> None:
    lines = differences(_losses(1.0, math.nan, 3.0), _losses(2.0, math.nan, 3.0), ["loss"], _EXACT)
    assert lines[1] == "Largest difference of loss: inf at step 2; steps that differ: 2"
    assert statistics(loss_rows(_losses(1.0, math.nan), _losses(2.0, math.nan)))["largest_difference_step"] == 2


def test_missing_steps_and_fields_are_named() -> None:
    nothing = {"baseline": range(0), "test": range(0)}
    assert missing(_losses(1, 2), _losses(1, 2), ["loss"], nothing) == []
    assert missing(_losses(*range(6)), _losses(1), ["loss"], nothing) == ["Missing: the test lacks steps 2-6"]
    gaps = {1: {"loss": 1.0}, 4: {"loss": 1.0}, 6: {"loss": 1.0}}
    lines = missing(gaps, gaps, ["loss"], {"baseline": range(1, 7), "test": range(0)})
    assert lines == ["Missing: the baseline lacks steps 2-3, 5"]
    assert missing({}, {}, ["loss"], nothing) == ["Missing: no side has a step, so nothing was compared"]
    assert missing(_losses(1), {1: {"loss": 1.0, "grad_norm": 2.0}}, ["grad_norm"], nothing) == [
        "Missing: the baseline lacks grad_norm at step 1"
    ]
    assert missing(_losses(1), _losses(1), ["norm"], nothing) == ["Missing: no step has the field 'norm'"]


def test_rows_of_one_step_are_joined_and_only_exact_values_are_read(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 9.99, "loss_hex": (0.1).hex(), "lr": 1.0},
        {"step": 1, "validation_loss": 2.0, "validation_loss_hex": (2.0).hex()},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(path) == {1: {"loss": 0.1, "validation_loss": 2.0}}
    assert read_metrics(tmp_path / "absent.jsonl") == {}


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss_hex": "0x1p0"}', '{"step": 1, "loss_hex": "high"}', "3"])
def test_a_broken_row_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(CompareError, match=r"metrics\.jsonl, line 1: no row of metrics"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_exported_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    steps = {1: {"loss": 0.1 + 0.2, "grad_norm": 5e-324}, 12: {"loss": math.inf, "grad_norm": -0.0}}
    export_result(tmp_path / "new/result.json", steps)
    assert repr(import_result(tmp_path / "new/result.json")) == repr(steps)


@pytest.mark.parametrize("text", ["", "[]", "{}x", '{"1": 2}', '{"1": {"loss": 2}}', '{"one": {"loss": "0x1p0"}}'])
def test_another_file_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(UsageError, match="not what --export-result writes"):
        import_result(tmp_path / "r.json")


def test_a_missing_matplotlib_is_said_before_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    assert find_plotter([str(bare), "/no/such/python"]) == ""
    assert f"{bare} -m pip install matplotlib" in capsys.readouterr().out
    assert find_plotter(["", str(bare), sys.executable]) == sys.executable
