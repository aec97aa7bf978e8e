"""The few small collectives of a training step."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def all_gather_rows(row: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return the rows of all ranks of `mesh`, in their order: [N] -> [ranks, N], on the CPU."""
    rows = row.new_empty(mesh.size() * row.numel())
    dist.all_gather_into_tensor(rows, row.contiguous(), group=mesh.get_group())
    return rows.view(mesh.size(), -1).cpu()


def all_reduce_sum(value: int, mesh: DeviceMesh) -> int:
    """Return the sum of an integer over the ranks of `mesh`."""
    total = torch.tensor(value, dtype=torch.int64, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return int(total)
