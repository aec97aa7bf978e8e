"""Garbage collection, stop signals, profiling and the device table."""

import gc
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from torchtitan.errors import ConfigError
from torchtitan.tools import device
from torchtitan.tools.gc import ScheduledGC
from torchtitan.tools.profiling import Profiler
from torchtitan.tools.stop import StopSignal


def test_garbage_is_collected_at_its_steps_only() -> None:
    collected = []
    gc.callbacks.append(hook := lambda phase, info: collected.append(info["generation"]) if phase == "stop" else None)
    try:
        schedule = ScheduledGC(3)
        assert not gc.isenabled()
        collected.clear()
        seen = []
        for step in range(1, 7):
            schedule.run(step)
            seen.append(len(collected))
        assert seen == [0, 0, 1, 1, 1, 2] and collected == [1, 1]
        schedule.close()
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(hook)
        gc.enable()


_STOPPING = """
import sys, time
from torchtitan.tools.stop import StopSignal
stop = StopSignal()
stop.install()
print("ready", flush=True)
while not stop:
    time.sleep(0.02)
print(stop.name, flush=True)
time.sleep(30)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish_and_a_later_one_an_order(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", _STOPPING], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == f"{number.name}\n"
        process.send_signal(number)  # at once: torchrun's copy of the terminal's signal
        time.sleep(0.3)
        assert process.poll() is None
        time.sleep(2)
        process.send_signal(number)
        assert process.wait(10) == -number


def test_no_signal_is_no_wish() -> None:
    assert not StopSignal()


def _profiled(folder: str, freq: int) -> None:
    profiler = Profiler(freq, Path(folder), None, torch.device("cpu"))
    for step in range(11, 16):  # of a resumed run
        torch.ones(4).sum()
        profiler.step(step)
    profiler.close()


@pytest.mark.parametrize("freq", [1, 2])
def test_a_trace_is_written_every_freq_steps(tmp_path: Path, freq: int) -> None:
    run_ranks(1, _profiled, str(tmp_path), freq)
    written = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json"))
    assert written == [f"iteration_{step}/rank0_trace.json" for step in range(10 + freq, 16, freq)]
    for path in written:  # the last one too: the end of the run does not write over it
        names = {event.get("name") for event in json.loads((tmp_path / path).read_text())["traceEvents"]}
        assert "aten::sum" in names, path


def test_a_memory_snapshot_on_a_cpu_is_said_to_have_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("torchtitan"), "propagate", True)
    profiler = Profiler(1, None, tmp_path, torch.device("cpu"))
    profiler.step(1)
    assert "enable_memory_snapshot has no effect on a CPU" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Unknown 9000", None)]
)
def test_peak_by_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device.peak_flops(torch.device("cuda", 0)) == peak
    assert device.peak_flops(torch.device("cpu")) is None


def test_more_processes_than_devices_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"more processes than the 2 CUDA devices .* use NGPU=2"):
        device.resolve_device()


_FAULTS = """
import resource, sys
import torch
from torchtitan.tools.device import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(3, 2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    given, kept = (
        int(subprocess.run([sys.executable, "-c", _FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("default", "keep")
    )
    assert given > 20 * 10 and kept < given / 10
