"""The front door of context parallelism: one sequence on the P ranks of the cp axis.

Letters: S tokens of the whole sequence, P cp degree, n = S / P tokens per rank, B batch, H heads, E head dim.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.cp import torch_private
from torchtitan.distributed.cp.ring import apply_ring
from torchtitan.distributed.plan import InnerAttention
from torchtitan.errors import TitanError, nearest

METHODS = ("ring",)
ROTATE_METHODS = ("allgather", "alltoall")
LOAD_BALANCERS = ("headtail", "none")


def apply_cp(
    attention_modules: Iterable[nn.Module],
    cp_mesh: DeviceMesh,
    *,
    seq_len: int,
    method: str = "ring",
    rotate_method: str = "allgather",
    load_balancer: str = "headtail",
) -> None:
    """Make inner attention modules attend over the whole sequence of which each rank holds n tokens, in place.

    Each module takes local q, k, v [B, H, n, E] and returns the local output. K and V travel with their own number of
    heads. `seq_len` is S: a module that is fed anything but S / P tokens refuses to run.

    Raises:
        TitanError: an unknown value, a length that cannot be cut, or no module at all (attention would then run on
            local tokens only, without an error).
    """
    _check_choice("method", method, METHODS)
    _check_choice("rotate_method", rotate_method, ROTATE_METHODS)
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    check_seq_len(seq_len, cp_mesh.size(), load_balancer)
    modules = list(attention_modules)
    if not modules:
        raise TitanError("context parallelism found no attention module to hook: attention would see local tokens only")
    for module in modules:
        if isinstance(module, InnerAttention):
            module.chooses_kernel_dtype = False
        module.register_forward_pre_hook(_LengthGuard(seq_len // cp_mesh.size(), seq_len, cp_mesh.size()))
        apply_ring(module, cp_mesh, rotate_method=rotate_method, balanced=_is_balanced(load_balancer, cp_mesh))


def cp_shard(
    cp_mesh: DeviceMesh, buffers: Sequence[torch.Tensor], *, load_balancer: str = "headtail", seq_dim: int = 1
) -> list[torch.Tensor]:
    """Return this rank's shard of every buffer: [.., S, ..] -> [.., n, ..], all cut alike, without communication.

    `headtail` cuts the sequence in 2P chunks and gives rank r chunks r and 2P-1-r, so that causal attention is equal
    work on all ranks; `none` gives rank r the tokens r*n .. (r+1)*n - 1. Dim 0 is the batch unless it is `seq_dim`.

    Raises:
        TitanError: buffers of different length, a length that cannot be cut, or an unknown balancer.
    """
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    lengths = {buffer.size(seq_dim) for buffer in buffers}
    if len(lengths) != 1:
        raise TitanError(f"buffers that are cut together need one length; dim {seq_dim} has {sorted(lengths)}")
    seq_len = lengths.pop()
    check_seq_len(seq_len, cp_mesh.size(), load_balancer)
    dims = [seq_dim % buffer.ndim for buffer in buffers]
    return torch_private.shard(cp_mesh, buffers, dims, seq_len=seq_len, balanced=_is_balanced(load_balancer, cp_mesh))


def cp_unshard(
    cp_mesh: DeviceMesh, buffers: Sequence[torch.Tensor], *, load_balancer: str = "headtail", seq_dim: int = 1
) -> list[torch.Tensor]:
    """Return the whole sequences of which `cp_shard` gave each rank a part, in order: [.., n, ..] -> [.., S, ..].

    All-gathers over the cp axis; every rank must call it, and no gradient flows back.
    """
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    return [_unshard(cp_mesh, buffer.detach(), load_balancer, seq_dim) for buffer in buffers]


def check_seq_len(seq_len: int, degree: int, load_balancer: str) -> None:
    """Raise a TitanError unless a sequence of `seq_len` tokens can be cut over `degree` ranks."""
    factor = 2 * degree if load_balancer == "headtail" and degree > 1 else degree
    if seq_len % factor or seq_len < 1:
        below = seq_len // factor * factor
        choices = f"{below} or {below + factor}" if below else f"{factor}"
        raise TitanError(
            f"a sequence of {seq_len} tokens cannot be cut over {degree} cp ranks with load balancer {load_balancer}; "
            f"it must be a multiple of {factor}, such as {choices}"
        )


class _LengthGuard:
    """Refuses local tokens that are not one rank's part of the sequence, whole sequences included."""

    def __init__(self, local_seq_len: int, seq_len: int, degree: int) -> None:
        self.local_seq_len = local_seq_len
        self.seq_len = seq_len
        self.degree = degree

    def __call__(self, module: nn.Module, qkv: tuple[torch.Tensor, ...]) -> None:
        for name, tensor in zip(("query", "key", "value"), qkv, strict=True):
            if tensor.size(2) != self.local_seq_len:
                raise TitanError(
                    f"attention under context parallelism got a {name} of {tensor.size(2)} tokens, expected "
                    f"{self.local_seq_len} ({self.seq_len} over {self.degree} cp ranks); cut the batch once by cp_shard"
                )


def _unshard(cp_mesh: DeviceMesh, buffer: torch.Tensor, load_balancer: str, seq_dim: int) -> torch.Tensor:
    parts = [torch.empty_like(buffer, memory_format=torch.contiguous_format) for _ in range(cp_mesh.size())]
    dist.all_gather(parts, buffer.contiguous(), group=cp_mesh.get_group())
    whole = torch.cat(parts, dim=seq_dim)
    if not _is_balanced(load_balancer, cp_mesh):
        return whole
    order = torch_private.head_tail_indices(whole.size(seq_dim), cp_mesh.size(), whole.device, restore=True)
    return whole.index_select(seq_dim, order)


def _is_balanced(load_balancer: str, cp_mesh: DeviceMesh) -> bool:
    """Return whether sequences are cut head-tail; one rank holds them as they are, odd lengths too."""
    return load_balancer == "headtail" and cp_mesh.size() > 1


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TitanError(f"unknown {name} {value!r}{nearest(value, known)}; allowed: {', '.join(known)}")
