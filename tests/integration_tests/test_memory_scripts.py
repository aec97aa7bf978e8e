"""The scripts about long sequences, at small sizes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPTS = Path(__file__).parents[2] / "scripts"


def _run(name: str, *options: str) -> str:
    command = [sys.executable, str(_SCRIPTS / name), *options]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=120
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def test_chunked_logits_spare_at_least_the_logits() -> None:
    lines = _run("estimate_memory.py", "--flavor=debugmodel", "--seq-len=8192", "--degree=2", "--chunks=0,256")
    whole, chunked = (float(line.split()[-3]) for line in lines.splitlines()[-2:])
    logits_gib = (4096 - 256) * 4096 * 4 / 2**30  # fp32, of the tokens that no longer exist at once
    assert whole - chunked > logits_gib


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads Linux's memory maps")
def test_a_long_sequence_has_the_same_loss_on_one_rank_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    losses = []
    for ranks in (1, 2):
        shown = _run("long_context.py", f"--ranks={ranks}", "--training.seq_len=4096")
        assert float(re.findall(r"together: ([0-9.]+) GiB", shown)[0]) > 0.1
        losses.append(re.findall(r"loss: +([0-9.]+)", shown))
    (one,), (two,) = losses
    assert float(one) == pytest.approx(float(two), abs=2e-3)  # bf16; equal where kernels keep bits
