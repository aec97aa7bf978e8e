"""The front door of context parallelism: one sequence on the P ranks of the cp axis.

A cp mesh of one dim [P] runs the method over all its ranks. One of two dims [R, U] exchanges tokens for heads over the
second (Ulysses) and runs the method over the first; U = P is Ulysses alone.

Letters: S tokens of the whole sequence, P cp degree, n = S / P tokens per rank, R ranks of the method, U ranks of
Ulysses, B batch, H query heads, K key/value heads, E head dim.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.cp_method import seq_len_factor
from torchtitan.distributed.cp import torch_private
from torchtitan.distributed.cp.gather import AUTO, GatherSettings, apply_gather
from torchtitan.distributed.cp.placement import Placement
from torchtitan.distributed.cp.ring import apply_ring, compiled_ring_scope
from torchtitan.distributed.cp.ulysses import apply_ulysses_in, apply_ulysses_out
from torchtitan.distributed.plan import InnerAttention
from torchtitan.errors import TitanError, nearest

METHODS = ("ring", "gather")
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
    gather_kv_heads: int | str = "auto",
    keep_gathered: bool = False,
) -> None:
    """Make inner attention modules attend over the whole sequence of which each rank holds n tokens, in place.

    Each module takes local q [B, H, n, E], k and v [B, K, n, E] and returns the local output. K and V travel with their
    own number of heads; Ulysses repeats them where they are fewer than its ranks. `seq_len` is S: a module that is fed
    anything but S / P tokens refuses to run. `rotate_method` is the ring's. Of `gather`, `gather_kv_heads` is how many
    key/value heads travel at a time (0: all; "auto": as fit 16 MiB), and `keep_gathered` keeps what was gathered for
    the backward.

    Raises:
        TitanError: an unknown value, a length that cannot be cut, or no module at all (attention would then run on
            local tokens only, without an error).
    """
    _check_choice("method", method, METHODS)
    _check_choice("rotate_method", rotate_method, ROTATE_METHODS)
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    if gather_kv_heads != "auto" and (not isinstance(gather_kv_heads, int) or gather_kv_heads < 0):
        raise TitanError(f"unknown gather_kv_heads {gather_kv_heads!r}; it is a number of heads, 0 for all, or 'auto'")
    method_mesh, ulysses_mesh = _split(cp_mesh)
    check_seq_len(seq_len, cp_mesh.size(), load_balancer, ulysses_degree=_ulysses_degree(cp_mesh))
    modules = list(attention_modules)
    if not modules:
        raise TitanError("context parallelism found no attention module to hook: attention would see local tokens only")
    for module in modules:
        module.register_forward_pre_hook(_LengthGuard(seq_len // cp_mesh.size(), seq_len, cp_mesh.size()))
        if ulysses_mesh is not None:
            apply_ulysses_in(module, ulysses_mesh)
        if method_mesh.size() > 1 and method == "ring":
            if isinstance(module, InnerAttention):
                module.chooses_kernel_dtype = False
            balanced = _is_balanced(load_balancer, method_mesh)
            apply_ring(module, method_mesh, rotate_method=rotate_method, balanced=balanced)
        elif method_mesh.size() > 1:
            group, degree = method_mesh.get_group().group_name, method_mesh.size()
            per_step = gather_kv_heads if isinstance(gather_kv_heads, int) else AUTO
            balanced = _is_balanced(load_balancer, method_mesh)
            apply_gather(module, GatherSettings(group, degree, balanced, per_step, keep_gathered))
        if ulysses_mesh is not None:
            apply_ulysses_out(module, ulysses_mesh)


def cp_compile_scope(block: nn.Module, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return the context in which a compiled block that holds hooked attention must be called, in any number of calls.

    `dtype` is that of the block's activations.
    """
    return compiled_ring_scope(block, dtype)


def cp_shard(
    cp_mesh: DeviceMesh, buffers: Sequence[torch.Tensor], *, load_balancer: str = "headtail", seq_dim: int = 1
) -> list[torch.Tensor]:
    """Return this rank's shard of every buffer: [.., S, ..] -> [.., n, ..], all cut alike, without communication.

    `headtail` cuts the sequence in 2R chunks and gives rank r of the method's R chunks r and 2R-1-r, so that causal
    attention is equal work on all ranks; `none` gives it one chunk of R. Ranks of Ulysses cut what their rank of the
    method has once more, in order. Dim 0 is the batch unless it is `seq_dim`.

    Raises:
        TitanError: buffers of different length, a length that cannot be cut, or an unknown balancer.
    """
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    lengths = {buffer.size(seq_dim) for buffer in buffers}
    if len(lengths) != 1:
        raise TitanError(f"buffers that are cut together need one length; dim {seq_dim} has {sorted(lengths)}")
    seq_len = lengths.pop()
    check_seq_len(seq_len, cp_mesh.size(), load_balancer, ulysses_degree=_ulysses_degree(cp_mesh))
    dims = [seq_dim % buffer.ndim for buffer in buffers]
    mesh, ulysses_mesh = _split(cp_mesh)
    shards = torch_private.shard(mesh, buffers, dims, seq_len=seq_len, balanced=_is_balanced(load_balancer, mesh))
    if ulysses_mesh is None:
        return shards
    degree, rank = ulysses_mesh.size(), ulysses_mesh.get_local_rank()
    return [shard.chunk(degree, dim)[rank].contiguous() for shard, dim in zip(shards, dims, strict=True)]


def cp_unshard(
    cp_mesh: DeviceMesh, buffers: Sequence[torch.Tensor], *, load_balancer: str = "headtail", seq_dim: int = 1
) -> list[torch.Tensor]:
    """Return the whole sequences of which `cp_shard` gave each rank a part, in order: [.., n, ..] -> [.., S, ..].

    All-gathers over the cp axis; every rank must call it, and no gradient flows back.
    """
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    mesh, ulysses_mesh = _split(cp_mesh)
    wholes = [buffer.detach() for buffer in buffers]
    if ulysses_mesh is not None:
        wholes = [_joined(ulysses_mesh, whole, seq_dim) for whole in wholes]
    return [_unshard(mesh, whole, load_balancer, seq_dim) for whole in wholes]


def cp_rank_of(token: int, seq_len: int, cp_mesh: DeviceMesh, *, load_balancer: str = "headtail") -> int:
    """Return the rank within the cp group that `cp_shard` gives a token of a sequence to; without communication."""
    mesh, ulysses_degree = _split(cp_mesh)[0], _ulysses_degree(cp_mesh)
    check_seq_len(seq_len, cp_mesh.size(), load_balancer, ulysses_degree=ulysses_degree)
    if not 0 <= token < seq_len:
        raise TitanError(f"token {token} is not in a sequence of {seq_len}")
    placement = Placement(seq_len, mesh.size(), _is_balanced(load_balancer, mesh))
    rank, span = next(
        (rank, span) for rank, span in placement.copies() if span.start <= token < span.start + span.length
    )
    local = span.local + token - span.start
    return rank * ulysses_degree + local // (seq_len // cp_mesh.size())


def check_seq_len(seq_len: int, degree: int, load_balancer: str, *, ulysses_degree: int = 1) -> None:
    """Raise a TitanError unless a sequence of `seq_len` tokens can be cut over `degree` ranks."""
    factor = seq_len_factor(degree, load_balancer, ulysses_degree=ulysses_degree)
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
        if len(qkv) != 3:
            raise TitanError(f"attention under context parallelism takes q, k, v by position; it got {len(qkv)} so")
        for name, tensor in zip(("query", "key", "value"), qkv, strict=True):
            if tensor.size(2) != self.local_seq_len:
                raise TitanError(
                    f"attention under context parallelism got a {name} of {tensor.size(2)} tokens, expected "
                    f"{self.local_seq_len} ({self.seq_len} over {self.degree} cp ranks); cut the batch once by cp_shard"
                )


def _unshard(cp_mesh: DeviceMesh, buffer: torch.Tensor, load_balancer: str, seq_dim: int) -> torch.Tensor:
    whole = _joined(cp_mesh, buffer, seq_dim)
    if not _is_balanced(load_balancer, cp_mesh):
        return whole
    order = torch_private.head_tail_indices(whole.size(seq_dim), cp_mesh.size(), whole.device, restore=True)
    return whole.index_select(seq_dim, order)


def _joined(mesh: DeviceMesh, buffer: torch.Tensor, seq_dim: int) -> torch.Tensor:
    parts = [torch.empty_like(buffer, memory_format=torch.contiguous_format) for _ in range(mesh.size())]
    dist.all_gather(parts, buffer.contiguous(), group=mesh.get_group())
    return torch.cat(parts, dim=seq_dim)


def _split(cp_mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the meshes of the method and of Ulysses."""
    if cp_mesh.ndim == 1:
        return cp_mesh, None
    names = cp_mesh.mesh_dim_names
    if cp_mesh.ndim != 2 or names is None:
        raise TitanError(f"a cp mesh has one dim, or two that are named (method, Ulysses); this one is {cp_mesh}")
    return cp_mesh[names[0]], cp_mesh[names[1]]


def _ulysses_degree(cp_mesh: DeviceMesh) -> int:
    return cp_mesh.size(1) if cp_mesh.ndim == 2 else 1


def _is_balanced(load_balancer: str, cp_mesh: DeviceMesh) -> bool:
    """Return whether sequences are cut head-tail; one rank holds them as they are, odd lengths too."""
    return load_balancer == "headtail" and cp_mesh.size() > 1


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TitanError(f"unknown {name} {value!r}{nearest(value, known)}; allowed: {', '.join(known)}")
