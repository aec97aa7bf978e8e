"""The norm of all gradients, whatever the axes they are sharded over."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients that exist, as plain tensors sharing their memory."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


def grad_norm(grads: list[torch.Tensor], mesh: DeviceMesh) -> float:
    """Return the 2-norm of gradients of which each rank of `mesh` holds its own shards; equal bits on all ranks.

    Squares are summed in fp64, so the layout moves the result by less than fp32 can show.
    """
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2 for grad in grads if grad.numel()]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return float(total.sqrt())


def clip_gradients(grads: list[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients in place so that their norm is at most `max_norm`; a smaller one changes nothing."""
    if norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
