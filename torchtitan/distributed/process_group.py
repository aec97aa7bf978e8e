"""Start and end of the process group, from torchrun's environment or alone."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def world_size_from_env() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_env() -> int:
    """Return this process's global rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def init_process_group(device: torch.device, timeout_s: int) -> None:
    """Join the job: gloo for CPU tensors, nccl for CUDA's."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size_from_env() == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def set_timeout(timeout_s: int, groups: list[dist.ProcessGroup]) -> None:
    """Shorten the timeout of collectives once the first step, which compiles and allocates, is over."""
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
