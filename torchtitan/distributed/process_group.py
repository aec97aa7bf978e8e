"""Start and end of the process group, from torchrun's environment or alone."""

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_LOST_PEER_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


def world_size_from_env() -> int:
    """Return the number of ranks that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_from_env() -> int:
    """Return this process's global rank; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def ranks_per_node_from_env() -> int:
    """Return the number of ranks that the launcher started on this node; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def local_rank_from_env() -> int:
    """Return this process's rank on its node; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_process_group(device: torch.device, timeout_s: int) -> None:
    """Join the job: gloo for CPU tensors, nccl for CUDA's."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if world_size_from_env() == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)


def leave_process_group() -> None:
    """Leave the job, all ranks together: a rank that closed its connections early would abort one still receiving."""
    dist.barrier()
    dist.destroy_process_group()


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because another rank ended or hung, so that the cause is to be found there.

    gloo has no error class of its own: its text is all there is.
    """
    if isinstance(error, dist.DistNetworkError | dist.DistBackendError):
        return True
    return any(text in str(error) for text in _LOST_PEER_TEXTS)


def set_timeout(timeout_s: int, meshes: Iterable[DeviceMesh]) -> None:
    """Change the timeout of the world's collectives and of those of one-axis meshes, for the calls to come."""
    for group in [dist.group.WORLD, *(mesh.get_group() for mesh in meshes)]:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)
