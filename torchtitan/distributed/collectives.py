"""The few small collectives of a training step."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


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
