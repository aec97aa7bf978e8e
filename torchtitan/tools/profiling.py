"""Traces of time (torch's profiler) and of CUDA memory (the allocator's history)."""

import logging
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 100_000  # kept by the allocator's history; about 100 bytes each


class Profiler:
    """Writes traces and memory snapshots every `freq` steps, into a folder per step and a file per rank.

    A folder that is None is for what is not wanted.
    """

    def __init__(
        self, freq: int, traces_folder: Path | None, snapshots_folder: Path | None, device: torch.device
    ) -> None:
        self.step_number = 0  # of the training, so that a resumed run does not write over the traces of the first
        self.closing = False
        self.freq = freq
        self.snapshots_folder = snapshots_folder if device.type == "cuda" else None
        if snapshots_folder is not None and self.snapshots_folder is None:
            logger.warning("--profiling.enable_memory_snapshot has no effect on a CPU: it records CUDA's allocator")
        if self.snapshots_folder is not None:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self.profile = None if traces_folder is None else self._start_profile(device, traces_folder)

    def _start_profile(self, device: torch.device, folder: Path) -> profile:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        warmup = 1 if self.freq > 1 else 0
        # The last step of every `freq` is recorded, after one step of warm-up where there is room for one.
        when = schedule(wait=self.freq - 1 - warmup, warmup=warmup, active=1)
        running = profile(activities=activities, schedule=when, on_trace_ready=partial(self._write_trace, folder))
        running.start()
        return running

    def step(self, number: int) -> None:
        """Take note that step `number` is done, and write what is due."""
        self.step_number = number
        if self.profile is not None:
            self.profile.step()
        if self.snapshots_folder is not None and self.step_number % self.freq == 0:
            torch.cuda.memory._dump_snapshot(str(self._file(self.snapshots_folder, "snapshot.pickle")))

    def close(self) -> None:
        """Stop recording."""
        self.closing = True
        if self.profile is not None:
            self.profile.stop()
        if self.snapshots_folder is not None:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, folder: Path, finished: profile) -> None:
        if self.closing:  # torch hands over what it has since the last step, which is no step
            return
        path = self._file(folder, "trace.json")
        finished.export_chrome_trace(str(path))
        logger.info("Profiler: wrote %s", path)

    def _file(self, folder: Path, name: str) -> Path:
        path = folder / f"iteration_{self.step_number}" / f"rank{dist.get_rank()}_{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
