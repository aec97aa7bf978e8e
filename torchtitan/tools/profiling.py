"""Traces of time (torch's profiler) and of CUDA memory (the allocator's history)."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.config.sections import Profiling

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 100_000  # kept by the allocator's history; about 100 bytes each


class Profiler:
    """Writes what the section asks for, every `profile_freq` steps, into a folder per step and a file per rank."""

    def __init__(self, section: Profiling, dump_folder: Path, device: torch.device) -> None:
        self.step_number = 0
        self.freq = section.profile_freq
        self.traces_folder = dump_folder / section.save_traces_folder
        self.snapshots_folder = dump_folder / section.save_memory_snapshot_folder
        self.records_memory = section.enable_memory_snapshot and device.type == "cuda"
        if section.enable_memory_snapshot and not self.records_memory:
            logger.warning("--profiling.enable_memory_snapshot has no effect on a CPU: it records CUDA's allocator")
        if self.records_memory:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self.profile = self._start_profile(device) if section.enable_profiling else None

    def _start_profile(self, device: torch.device) -> profile:
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
        warmup = 1 if self.freq > 1 else 0
        # The last step of every `freq` is recorded, after one step of warm-up where there is room for one.
        when = schedule(wait=self.freq - 1 - warmup, warmup=warmup, active=1)
        running = profile(activities=activities, schedule=when, on_trace_ready=self._write_trace)
        running.start()
        return running

    def step(self) -> None:
        """Count a step, and write what is due."""
        self.step_number += 1
        if self.profile is not None:
            self.profile.step()
        if self.records_memory and self.step_number % self.freq == 0:
            torch.cuda.memory._dump_snapshot(str(self._file(self.snapshots_folder, "snapshot.pickle")))

    def close(self) -> None:
        """Stop recording."""
        if self.profile is not None:
            self.profile.stop()
        if self.records_memory:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, finished: profile) -> None:
        path = self._file(self.traces_folder, "trace.json")
        finished.export_chrome_trace(str(path))
        logger.info("Profiler: wrote %s", path)

    def _file(self, folder: Path, name: str) -> Path:
        path = folder / f"iteration_{self.step_number}" / f"rank{dist.get_rank()}_{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path
