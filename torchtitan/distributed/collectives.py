"""Collectives, with the bytes that they send to other ranks on record for whoever counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.distributed.cp.torch_private import resolve_group


@dataclass
class Traffic:
    """What one rank sent to others while it was counted."""

    bytes: int = 0
    calls: int = 0

    def add(self, num_bytes: int) -> None:
        """Count a collective that sends `num_bytes` to other ranks."""
        self.bytes += num_bytes
        self.calls += 1


_counting: list[Traffic] = []  # of the counts in progress: nothing but what is counted depends on it


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what context parallelism sends within: this module's collectives and torch's functional ones."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        with _FunctionalCollectives(traffic):
            yield traffic
    finally:
        _counting.remove(traffic)


class PendingRows:
    """An exchange of rows under way."""

    def __init__(self, received: torch.Tensor, work: Any, sent: torch.Tensor) -> None:
        self.received = received
        self.work = work
        self.sent = sent  # must live until the collective is done

    def wait(self) -> torch.Tensor:
        """Return the rows that came, those of rank 0 first."""
        self.work.wait()
        return self.received


def start_exchange_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> PendingRows:
    """Begin to send the first sent[0] rows to rank 0, the next sent[1] to rank 1, and so on; received: likewise.

    No rank sends rows to itself.
    """
    rows = rows.contiguous()
    _record(rows.nbytes)
    came = torch.empty((sum(received), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    return PendingRows(came, dist.all_to_all_single(came, rows, received, sent, group=group, async_op=True), rows)


def exchange_rows(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Do the same at once, and return the rows that came."""
    return start_exchange_rows(rows, sent, received, group).wait()


def all_to_all(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send part i to rank i; returns what the ranks sent here, in their order: [ranks, *shape] both."""
    parts = parts.contiguous()
    _record(parts.nbytes - parts[0].nbytes)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def all_gather_rows(row: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the rows of all ranks of `mesh`, in their order: [N] -> [ranks, N], on the CPU."""
    rows = [torch.empty_like(row) for _ in range(mesh.size())]
    dist.all_gather(rows, row.contiguous(), group=mesh.get_group())
    return torch.stack(rows).cpu()


def all_reduce_sum(value: int, mesh: DeviceMesh) -> int:
    """Return the sum of an integer over the ranks of `mesh`."""
    total = torch.tensor(value, dtype=torch.int64, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return int(total)


def _record(num_bytes: int) -> None:
    for traffic in _counting:
        traffic.add(num_bytes)


class _FunctionalCollectives(TorchDispatchMode):
    """Counts the collectives that torch's ring makes; FSDP's are of another kind and are not counted."""

    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the DTensor unwraps itself, and what it then calls comes here
        name = func._schema.name
        if name.startswith("_c10d_functional::"):
            self._count(name.removeprefix("_c10d_functional::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any) -> None:
        if name in ("all_gather_into_tensor", "all_gather_into_tensor_out"):
            self.traffic.add(args[0].nbytes * (args[1] - 1))
        elif name == "all_to_all_single":
            own = dist.get_rank(resolve_group(args[3]))
            sent = sum(count for rank, count in enumerate(args[2]) if rank != own)
            self.traffic.add(sent * args[0][0].nbytes)
        elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
            raise NotImplementedError(f"how much {name} sends is not known here")
