"""What a run reports, read back from where it was written."""

import json
import logging
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.ranks import run_ranks
from torchtitan.components.metrics import MetricsLogger
from torchtitan.config.sections import Metrics

_KEYS = {
    "step", "loss", "loss_hex", "loss_max", "grad_norm", "grad_norm_hex", "lr", "tokens_seen", "tokens_per_second",
    "tflops", "mfu", "memory_gib", "data_share", "attention_balance", "kv_travelled", "seconds_per_step",
}  # fmt: skip


def _logger(folder: Path, section: Metrics = Metrics(log_freq=1), **changes: Any) -> MetricsLogger:  # noqa: B008
    values: dict[str, Any] = {
        "writes": True, "num_devices": 2, "peak_flops": None, "device": torch.device("cpu"),
        "num_steps": 5,
    }  # fmt: skip
    return MetricsLogger(section, folder, **{**values, **changes})


def _log(metrics: MetricsLogger, step: int, **changes: Any) -> None:
    values: dict[str, Any] = {
        "loss": 0.1, "loss_max": 0.2, "grad_norm": 1 / 3, "lr": 1e-3, "tokens": 100, "tokens_seen": 100 * step,
        "flops": 1e8, "attention_balance": 1.25, "kv_travelled": 0.5, "last": False,
    }  # fmt: skip
    metrics.log(step, **{**values, **changes})


def _steps(metrics: MetricsLogger, count: int, seconds: float = 0.0, **changes: Any) -> None:
    for step in range(1, count + 1):
        metrics.start_step()
        time.sleep(seconds)
        _log(metrics, step, last=step == count, **changes)


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_holds_exact_values(tmp_path: Path) -> None:
    _steps(_logger(tmp_path), 1)
    (row,) = _rows(tmp_path)
    assert row.keys() == _KEYS
    assert float.fromhex(row["loss_hex"]) == 0.1 == row["loss"]
    assert float.fromhex(row["grad_norm_hex"]) == 1 / 3
    assert row["mfu"] is None
    assert (row["attention_balance"], row["kv_travelled"]) == (1.25, 0.5)


def test_a_row_of_masks_that_nobody_planned(tmp_path: Path) -> None:
    _steps(_logger(tmp_path), 1, kv_travelled=None)
    assert _rows(tmp_path)[0]["kv_travelled"] is None


def test_log_freq_and_the_first_and_last_step(tmp_path: Path) -> None:
    _steps(_logger(tmp_path, Metrics(log_freq=3)), 7)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 3, 6, 7]


def test_rates_are_of_the_steps_alone(tmp_path: Path) -> None:
    """Breaks when saving a checkpoint between steps slows the reported rate, or what skipped rows did is lost.

    The last row is of steps 2 and 3, whose masks allow unequal work.
    """
    metrics = _logger(tmp_path, Metrics(log_freq=4), peak_flops=1e9)
    for step in (1, 2, 3):
        metrics.start_step()
        with metrics.data_loading():
            time.sleep(0.02)
        time.sleep(0.02)
        _log(metrics, step, flops=step * 1e8, last=step == 3)
        time.sleep(0.2)
    first, last = _rows(tmp_path)
    assert (first["step"], last["step"]) == (1, 3)
    assert first["tflops"] == pytest.approx(1e8 / first["seconds_per_step"] / 2 / 1e12)
    assert 0.04 <= last["seconds_per_step"] < 0.15
    assert last["tokens_per_second"] == pytest.approx(100 / last["seconds_per_step"])
    assert last["tflops"] == pytest.approx((2e8 + 3e8) / (2 * last["seconds_per_step"]) / 2 / 1e12)
    assert last["mfu"] == pytest.approx(100 * last["tflops"] * 1e12 / 1e9)
    assert 0.2 < last["data_share"] < 0.8


def test_resume_drops_later_and_broken_rows(tmp_path: Path) -> None:
    _steps(_logger(tmp_path), 4)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 5, "lo')
    metrics = _logger(tmp_path)
    metrics.truncate_after(2)
    metrics.start_step()
    _log(metrics, 3, loss=0.7)
    assert [(row["step"], row["loss"]) for row in _rows(tmp_path)] == [(1, 0.1), (2, 0.1), (3, 0.7)]


def test_the_console_line_has_the_words_that_people_grep_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    caplog.set_level(logging.INFO, "torchtitan")
    _steps(_logger(tmp_path), 1, seconds=0.1)
    (record,) = caplog.records
    words = ("step:  1", "loss:  0.10000", "grad_norm:  0.3333", "memory:", "GiB", "tps: ", "tflops:", "mfu: n/a")
    assert all(word in record.getMessage() for word in words), record.getMessage()
    per_device = float(record.getMessage().split("tps: ")[1].split()[0].replace(",", ""))
    assert per_device == pytest.approx(_rows(tmp_path)[0]["tokens_per_second"] / 2, abs=1)


def test_only_one_rank_writes(tmp_path: Path) -> None:
    _steps(_logger(tmp_path / "other", Metrics(log_freq=1, enable_tensorboard=True), writes=False), 2)
    assert not (tmp_path / "other").exists()


def test_progress_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "progress.json"
    monkeypatch.setenv("TORCHTITAN_PROGRESS_FILE", str(path))
    _steps(_logger(tmp_path, Metrics(log_freq=10)), 3)
    state = json.loads(path.read_text())
    assert (state["step"], state["steps"], state["loss"]) == (3, 5, 0.1)
    assert state["seconds_per_step"] > 0


def _log_and_die(folder: str) -> None:
    _steps(_logger(Path(folder), Metrics(enable_tensorboard=True, save_tb_folder="boards", log_freq=1)), 2)
    os._exit(0)


def test_tensorboard_has_the_tags_of_peoples_boards_though_the_run_died(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(AssertionError, match="rank 0 died without an answer"):
        run_ranks(1, _log_and_die, str(tmp_path))
    (folder,) = (tmp_path / "boards").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    tags = {
        "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "grad_norm", "throughput(tps)", "tflops",
        "lr", "n_tokens_seen", "time_metrics/end_to_end(s)", "time_metrics/data_loading(%)", "memory/max_gib",
        "attention/balance", "attention/kv_travelled",
    }  # fmt: skip
    assert tags == set(events.Tags()["scalars"])  # no mfu(%): the peak is not known
    assert [len(events.Scalars(tag)) for tag in tags] == [2] * len(tags)
    assert [(event.step, event.value) for event in events.Scalars("n_tokens_seen")] == [(1, 100.0), (2, 200.0)]


class _FakeRun:
    """What wandb.init returns, as far as it is used."""

    def __init__(self, **given: Any) -> None:
        self.calls: list[Any] = [given]

    def log(self, values: dict[str, float], step: int) -> None:
        known = [tag for tag in ("mfu(%)", "attention/balance", "attention/kv_travelled") if tag in values]
        self.calls.append((step, values["loss_metrics/global_avg_loss"], known))

    def finish(self) -> None:
        self.calls.append("finished")


def test_wandb_gets_the_same_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is not among the dependencies: a stand-in shows what it is called with."""
    runs: list[_FakeRun] = []
    module = ModuleType("wandb")
    module.init = lambda **given: runs.append(_FakeRun(**given)) or runs[-1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    metrics = _logger(tmp_path, Metrics(log_freq=1, enable_wandb=True), peak_flops=1e9)
    _steps(metrics, 1, kv_travelled=None)  # is left out
    metrics.close()
    tags = ["mfu(%)", "attention/balance"]
    assert runs[0].calls == [{"project": "mine", "dir": str(tmp_path)}, (1, 0.1, tags), "finished"]
