"""What a run reports: the console, metrics.jsonl, TensorBoard, Weights & Biases, and the launcher's progress bar."""

import json
import logging
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from torchtitan.config.sections import Metrics

logger = logging.getLogger(__name__)

_GIB = 1024**3
_PROGRESS_FILE = "TORCHTITAN_PROGRESS_FILE"


@dataclass(frozen=True)
class Row:
    """One line of metrics.jsonl. Rates are means over the steps since the last row, without time between steps."""

    step: int
    loss: float  # mean over the step's valid tokens
    loss_hex: str  # its exact value
    loss_max: float  # largest of the ranks' means
    grad_norm: float  # before clipping
    grad_norm_hex: str
    lr: float
    tokens_seen: int  # by all ranks since step 0, each token once
    tokens_per_second: float  # of the whole job
    tflops: float  # model FLOP/s per device, in 10^12; of attention, what the masks allow
    mfu: float | None  # of the device's peak, in percent; None: the peak is not known
    memory_gib: float  # largest so far: reserved by CUDA's allocator, or resident on a CPU
    data_share: float  # of the steps' time spent waiting for data
    attention_balance: float  # of the step's query-key pairs, the most of a rank over the mean
    kv_travelled: float | None  # of other ranks' keys and values, the share that travelled; None: no planned masks
    seconds_per_step: float


class _Writer(Protocol):
    """One of the optional reports."""

    def write(self, row: Row) -> None: ...
    def close(self) -> None: ...


class MetricsLogger:
    """Measures every step, reports every `log_freq`-th, the first and the last; only one rank writes."""

    def __init__(
        self,
        section: Metrics,
        dump_folder: Path,
        *,
        writes: bool,
        num_devices: int,
        peak_flops: float | None,
        device: torch.device,
        num_steps: int,
    ) -> None:
        self.log_freq = section.log_freq
        self.path = dump_folder / "metrics.jsonl"
        self.writes = writes
        self.num_devices = num_devices
        self.peak_flops = peak_flops
        self.device = device
        self.num_steps = num_steps
        self.progress_path = os.environ.get(_PROGRESS_FILE, "") if writes else ""
        self.writers = _build_writers(section, dump_folder) if writes else []
        self.step_start = self.waited = self.seconds = self.flops = 0.0
        self.tokens = self.steps = 0

    def truncate_after(self, step: int) -> None:
        """Drop the rows past `step`, and a line that a crash left unfinished."""
        if not self.writes:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        aside = self.path.with_suffix(".tmp")
        aside.write_text("".join(line + "\n" for line in lines if _step_of(line) <= step))
        os.replace(aside, self.path)

    def start_step(self) -> None:
        """Begin to count a step's time."""
        self.step_start = time.perf_counter()

    @contextmanager
    def data_loading(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        start = time.perf_counter()
        yield
        self.waited += time.perf_counter() - start

    def log(
        self,
        step: int,
        *,
        loss: float,
        loss_max: float,
        grad_norm: float,
        lr: float,
        tokens: int,
        tokens_seen: int,
        flops: float,
        attention_balance: float,
        kv_travelled: float | None,
        last: bool,
    ) -> None:
        """End a step of `tokens` tokens and `flops` model FLOPs over all ranks, and report if it is time."""
        self.seconds += time.perf_counter() - self.step_start
        self.tokens += tokens
        self.flops += flops
        self.steps += 1
        if self.progress_path:
            self._write_progress(step, loss)
        if step % self.log_freq and step != 1 and not last:
            return
        row = self._row(
            step=step,
            loss=loss,
            loss_hex=loss.hex(),
            loss_max=loss_max,
            grad_norm=grad_norm,
            grad_norm_hex=grad_norm.hex(),
            lr=lr,
            tokens_seen=tokens_seen,
            attention_balance=attention_balance,
            kv_travelled=kv_travelled,
        )
        self.waited = self.seconds = self.flops = 0.0
        self.tokens = self.steps = 0
        if self.writes:
            self._report(row)

    def close(self) -> None:
        """Flush the optional reports."""
        for writer in self.writers:
            writer.close()

    def _row(self, **of_step: Any) -> Row:
        flops = self.flops / self.seconds / self.num_devices
        return Row(
            **of_step,
            tokens_per_second=self.tokens / self.seconds,
            tflops=flops / 1e12,
            mfu=None if self.peak_flops is None else 100 * flops / self.peak_flops,
            memory_gib=_peak_memory(self.device) / _GIB,
            data_share=self.waited / self.seconds,
            seconds_per_step=self.seconds / self.steps,
        )

    def _report(self, row: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        for writer in self.writers:
            writer.write(row)
        mfu = "n/a" if row.mfu is None else f"{row.mfu:.2f}%"
        logger.info(
            "step: %2d  loss: %8.5f  grad_norm: %7.4f  memory: %5.2fGiB  tps: %s  tflops: %.2f  mfu: %s  data: %.1f%%",
            row.step,
            row.loss,
            row.grad_norm,
            row.memory_gib,
            f"{row.tokens_per_second / self.num_devices:,.0f}",
            row.tflops,
            mfu,
            100 * row.data_share,
        )

    def _write_progress(self, step: int, loss: float) -> None:
        """Tell the launcher, which has the terminal, how far the run is: replaced as a whole, never half-written."""
        state = {"step": step, "steps": self.num_steps, "loss": loss, "seconds_per_step": self.seconds / self.steps}
        aside = self.progress_path + ".tmp"
        Path(aside).write_text(json.dumps(state))
        os.replace(aside, self.progress_path)


class _TensorBoard:
    """Events under the tags that torchtitan's users have in their boards."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        for tag, value in tagged(row).items():
            self.writer.add_scalar(tag, value, row.step)
        self.writer.flush()  # a run that dies has shown all it logged

    def close(self) -> None:
        self.writer.close()


class _WandB:
    """A run of Weights & Biases; its project and entity come from WANDB_PROJECT and WANDB_ENTITY."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self.run = wandb.init(project=os.environ.get("WANDB_PROJECT", "torchtitan"), dir=str(folder))

    def write(self, row: Row) -> None:
        self.run.log(tagged(row), step=row.step)

    def close(self) -> None:
        self.run.finish()


def tagged(row: Row) -> dict[str, float]:
    """Return the row's numbers under the names of TensorBoard's tags; what is not known is left out."""
    tags = {
        "loss_metrics/global_avg_loss": row.loss,
        "loss_metrics/global_max_loss": row.loss_max,
        "grad_norm": row.grad_norm,
        "throughput(tps)": row.tokens_per_second,
        "tflops": row.tflops,
        "mfu(%)": row.mfu,
        "lr": row.lr,
        "n_tokens_seen": row.tokens_seen,
        "time_metrics/end_to_end(s)": row.seconds_per_step,
        "time_metrics/data_loading(%)": 100 * row.data_share,
        "memory/max_gib": row.memory_gib,
        "attention/balance": row.attention_balance,
        "attention/kv_travelled": row.kv_travelled,
    }
    return {tag: value for tag, value in tags.items() if value is not None}


def _build_writers(section: Metrics, dump_folder: Path) -> list[_Writer]:
    writers: list[_Writer] = []
    if section.enable_tensorboard:
        writers.append(_TensorBoard(dump_folder / section.save_tb_folder / time.strftime("%Y%m%d-%H%M%S")))
    if section.enable_wandb:
        writers.append(_WandB(dump_folder))
    return writers


def _step_of(line: str) -> float:
    """Return the step of a row; infinity for a line that a crash cut short."""
    try:
        row: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return float("inf")
    return row["step"]


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB but on macOS
