"""scripts/benchmark_cp.py on a tiny problem: what it measures besides times is exact, or known."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_METHODS = ["ring", "ring-alltoall", "gather", "gather-whole", "gather-kept", "gather-strided", "ulysses"]


def _benchmark(*options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(_ROOT / "scripts/benchmark_cp.py"), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_every_method_sends_works_and_computes_what_it_should(tmp_path: Path) -> None:
    """Breaks with an uncounted collective, a wrong formula, a rank with more work than others, or a wrong result."""
    size = ["--seq-len=256", "--kv-heads=4", "--head-dim=16", "--dtypes=float32", "--rounds=2", "--repeats=1"]
    result = _benchmark(*size, f"--methods={','.join(_METHODS)}", f"--output-folder={tmp_path}")
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads((tmp_path / "benchmark_cp.json").read_text())
    single, *rows = written["rows"]
    assert (single["method"], [row["method"] for row in rows]) == ("one process", _METHODS)
    for row in rows:
        assert row["sent_forward_bytes"] == row["predicted_forward_bytes"], row["method"]
        assert row["sent_backward_bytes"] == row["predicted_backward_bytes"], row["method"]
        assert row["work_shares"] == [1.0, 1.0], row["method"]
        # Two orders of summation in fp32, relative to the largest value; a wrong mask or position errs by 0.1 and more.
        assert 0 <= row["output_error"] < 2e-6, row["method"]
        assert 0 <= row["gradient_error"] < 2e-6, row["method"]
        assert len(row["forward_rounds_s"]) == len(row["backward_rounds_s"]) == 2
        assert row["total_over_single"] == pytest.approx(row["total_s"] / single["total_s"])
        assert row["total_over_ring"] == pytest.approx(row["total_s"] / rows[0]["total_s"])
    # 1 remote rank, 128 tokens, K and V of 4 heads and head dim 16 in fp32; Ulysses: half of q, K, V and output.
    assert rows[0]["predicted_forward_bytes"] == [128 * 2 * 4 * 16 * 4] * 2
    assert rows[-1]["predicted_forward_bytes"] == [128 * (8 + 4) * 2 * 16 * 4 // 2] * 2
    assert (tmp_path / "benchmark_cp.png").read_bytes().startswith(b"\x89PNG")
    table = result.stdout.splitlines()
    assert all(any(line.split()[1:2] == [method] for line in table) for method in _METHODS)
    assert "!=" not in result.stdout


def test_a_bad_value_ends_in_one_line() -> None:
    result = _benchmark("--seq-len=1023")
    expected = "--seq-len=1023: 1023 is not a multiple of 4; ring cuts it in 4 equal chunks; use 1020 or 1024\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", expected)


def test_an_unknown_method_names_its_neighbour() -> None:
    result = _benchmark("--methods=gathr")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("--methods=gathr: unknown method with --degree=2; did you mean gather")
