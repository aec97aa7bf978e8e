"""The front door of context parallelism: one sequence on the P ranks of the cp axis.

A cp mesh of one dim [P] runs the method over all its ranks. One of two dims [R, U] exchanges tokens for heads over the
second (Ulysses) and runs the method over the first; U = P is Ulysses alone.

Letters: S tokens of the whole sequence, P cp degree, n = S / P tokens per rank, R ranks of the method, U ranks of
Ulysses, B batch, H query heads, K key/value heads, E head dim.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.attention.masks import AttentionMasks, LayerMask, MaskKind
from torchtitan.attention.plan import plan_masks, whole_masks
from torchtitan.config.cp_method import LOAD_BALANCERS, MASK_BALANCERS, seq_len_factor
from torchtitan.distributed.cp import torch_private
from torchtitan.distributed.cp.balance import balanced_order, head_tail
from torchtitan.distributed.cp.gather import AUTO, GatherSettings, apply_gather
from torchtitan.distributed.cp.ring import apply_ring, compiled_ring_scope
from torchtitan.distributed.cp.ulysses import apply_ulysses_in, apply_ulysses_out
from torchtitan.distributed.plan import InnerAttention
from torchtitan.errors import TitanError, nearest

METHODS = ("ring", "gather")
ROTATE_METHODS = ("allgather", "alltoall")


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

    Masks that are not plain causal come with each call, as a fourth argument: the module's kind of
    `AttentionMasks.layers` as `cp_shard` returned them. The ring refuses them. `load_balancer` is that of `cp_shard`;
    with masks the order that they carry counts.

    Raises:
        TitanError: an unknown value, a length that cannot be cut, a balancer that the ring does not know, or no module
            at all (attention would then run on local tokens only, without an error).
    """
    _check_choice("method", method, METHODS)
    _check_choice("rotate_method", rotate_method, ROTATE_METHODS)
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    if gather_kv_heads != "auto" and (type(gather_kv_heads) is not int or gather_kv_heads < 0):
        raise TitanError(f"unknown gather_kv_heads {gather_kv_heads!r}; it is a number of heads, 0 for all, or 'auto'")
    method_mesh, ulysses_mesh = _split(cp_mesh)
    if method == "ring" and method_mesh.size() > 1 and load_balancer in MASK_BALANCERS:
        raise TitanError(f"method ring knows no load balancer {load_balancer}; use headtail or none, or method gather")
    check_seq_len(seq_len, cp_mesh.size(), load_balancer, ulysses_degree=_ulysses_degree(cp_mesh))
    modules = list(attention_modules)
    if not modules:
        raise TitanError("context parallelism found no attention module to hook: attention would see local tokens only")
    for module in modules:
        takes_masks = method != "ring" or method_mesh.size() == 1
        module.register_forward_pre_hook(_InputGuard(seq_len, cp_mesh.size(), takes_masks), with_kwargs=True)
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


@overload
def cp_shard(
    cp_mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    attention_masks: None = None,
    *,
    load_balancer: str = ...,
    seq_dim: int = ...,
) -> list[torch.Tensor]: ...
@overload
def cp_shard(
    cp_mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    attention_masks: AttentionMasks,
    *,
    load_balancer: str = ...,
    seq_dim: int = ...,
) -> tuple[list[torch.Tensor], AttentionMasks]: ...


def cp_shard(
    cp_mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    attention_masks: AttentionMasks | None = None,
    *,
    load_balancer: str = "headtail",
    seq_dim: int = 1,
) -> list[torch.Tensor] | tuple[list[torch.Tensor], AttentionMasks]:
    """Return this rank's shard of every buffer: [.., S, ..] -> [.., n, ..], all cut alike, without communication.

    `headtail` cuts the sequence in 2R chunks and gives rank r of the method's R chunks r and 2R-1-r, so that causal
    attention is equal work on all ranks; `none` gives it one chunk of R. Ranks of Ulysses cut what their rank of the
    method has once more, in order. Dim 0 is the batch unless it is `seq_dim`.

    With masks, those come back too, with what this rank computes by them. They may have been planned for these ranks
    before (`plan_cp_masks`); else they are now. Other balancers than the two need masks: `per_document` is head-tail
    inside each document, `greedy` deals out blocks by what they cost, `ptrr` is torch's for block masks.

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
    if attention_masks is None:
        _check_masks_given(load_balancer, mesh)
        shards = torch_private.shard(mesh, buffers, dims, seq_len=seq_len, balanced=_is_balanced(load_balancer, mesh))
    else:
        if attention_masks.order is None:
            attention_masks = plan_cp_masks(attention_masks, cp_mesh, load_balancer=load_balancer)
        planned = attention_masks.planned_for
        if planned != (mesh.size(), mesh.get_local_rank()):
            raise TitanError(
                f"the masks were planned for rank {planned[1]} of {planned[0]}, this is rank {mesh.get_local_rank()} "
                f"of {mesh.size()}; give cp_shard those of whole sequences"
            )
        order = _order_of(attention_masks, seq_len)
        mine = order.unflatten(1, (mesh.size(), -1))[:, mesh.get_local_rank()]
        shards = [_taken(buffer, mine, dim) for buffer, dim in zip(buffers, dims, strict=True)]
    if ulysses_mesh is not None:
        degree, rank = ulysses_mesh.size(), ulysses_mesh.get_local_rank()
        shards = [shard.chunk(degree, dim)[rank].contiguous() for shard, dim in zip(shards, dims, strict=True)]
    return shards if attention_masks is None else (shards, attention_masks)


def plan_cp_masks(masks: AttentionMasks, cp_mesh: DeviceMesh, *, load_balancer: str) -> AttentionMasks:
    """Return masks of whole sequences with this rank's order, tables and work; arithmetic on the CPU only.

    Raises:
        TitanError: an unknown balancer, or a length that cannot be cut.
    """
    mesh = _split(cp_mesh)[0]
    seq_len = masks.document_starts.size(1)
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    check_seq_len(seq_len, cp_mesh.size(), load_balancer, ulysses_degree=_ulysses_degree(cp_mesh))
    return plan_masks(masks, cp_order(masks, mesh.size(), load_balancer), mesh.size(), mesh.get_local_rank())


@dataclass(frozen=True)
class MaskPlanner:
    """Adds its masks to a microbatch, planned for this rank; called where microbatches are made, ahead of the step."""

    layer_kinds: tuple[MaskKind, ...]
    degree: int  # ranks of the method; 1: each has whole sequences
    rank: int  # of these
    load_balancer: str

    def __call__(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        """Return the microbatch with `masks`, unless every layer is plain causal and lies head-tail or in order.

        Its tensors: positions int32 [B, S] and, where documents are apart, document_starts int32 [B, S].
        """
        starts, positions = microbatch.get("document_starts"), microbatch["positions"]
        if starts is None and self.degree > 1 and self.load_balancer in MASK_BALANCERS:
            starts = torch.zeros_like(positions)
        masks = whole_masks(starts, positions, self.layer_kinds)
        if masks is None:
            return microbatch
        if self.degree > 1:
            masks = plan_masks(masks, cp_order(masks, self.degree, self.load_balancer), self.degree, self.rank)
        return {**microbatch, "masks": masks}


def cp_order(masks: AttentionMasks, degree: int, load_balancer: str) -> np.ndarray:
    """Return the order in which `degree` ranks of a method hold the tokens: int64 [B, S], rank 0's first."""
    layers = [(sight, masks.layer_kinds.count(kind)) for kind, sight in masks.sights.items()]
    return balanced_order(load_balancer, masks.document_starts.numpy(), layers, degree)


def cp_unshard(
    cp_mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    attention_masks: AttentionMasks | None = None,
    *,
    load_balancer: str = "headtail",
    seq_dim: int = 1,
) -> list[torch.Tensor]:
    """Return the whole sequences of which `cp_shard` gave each rank a part, in order: [.., n, ..] -> [.., S, ..].

    `attention_masks` are those that `cp_shard` returned, if any. All-gathers over the cp axis; every rank must call it,
    and no gradient flows back.
    """
    _check_choice("load_balancer", load_balancer, LOAD_BALANCERS)
    mesh, ulysses_mesh = _split(cp_mesh)
    wholes = [buffer.detach() for buffer in buffers]
    if ulysses_mesh is not None:
        wholes = [_joined(ulysses_mesh, whole, seq_dim) for whole in wholes]
    wholes = [_joined(mesh, whole, seq_dim) for whole in wholes]
    if attention_masks is not None:
        return [_taken(whole, _order_of(attention_masks, whole.size(seq_dim)).argsort(1), seq_dim) for whole in wholes]
    _check_masks_given(load_balancer, mesh)
    if not _is_balanced(load_balancer, mesh):
        return wholes
    order = torch_private.head_tail_indices(wholes[0].size(seq_dim), mesh.size(), wholes[0].device, restore=True)
    return [whole.index_select(seq_dim, order) for whole in wholes]


def cp_rank_of(
    token: int,
    seq_len: int,
    cp_mesh: DeviceMesh,
    attention_masks: AttentionMasks | None = None,
    *,
    load_balancer: str = "headtail",
    row: int = 0,
) -> int:
    """Return the rank within the cp group that `cp_shard` gives a token of sequence `row` to; without communication."""
    check_seq_len(seq_len, cp_mesh.size(), load_balancer, ulysses_degree=_ulysses_degree(cp_mesh))
    if not 0 <= token < seq_len:
        raise TitanError(f"token {token} is not in a sequence of {seq_len}")
    mesh = _split(cp_mesh)[0]
    if attention_masks is not None:
        orders = _order_of(attention_masks, seq_len)
        if not 0 <= row < orders.size(0):
            raise TitanError(f"row {row} is not among the {orders.size(0)} of the masks")
        order = orders[row].numpy()
    else:
        _check_masks_given(load_balancer, mesh)
        order = head_tail(seq_len, mesh.size() if _is_balanced(load_balancer, mesh) else 1)
    # Ranks of Ulysses cut in order what their rank of the method has.
    return int((order == token).argmax()) // (seq_len // cp_mesh.size())


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


class _InputGuard:
    """Refuses local tokens that are not one rank's part of the sequence, and masks that the method does not know."""

    def __init__(self, seq_len: int, degree: int, takes_masks: bool) -> None:
        self.local_seq_len = seq_len // degree
        self.seq_len = seq_len
        self.degree = degree
        self.takes_masks = takes_masks

    def __call__(
        self, module: nn.Module, inputs: tuple[torch.Tensor | LayerMask | None, ...], named: dict[str, Any]
    ) -> None:
        if not 3 <= len(inputs) <= 4 or named:
            raise TitanError(
                f"attention under context parallelism takes q, k, v and a mask by position; it got {len(inputs)} so"
                + (f", and {', '.join(named)} by name" if named else "")
            )
        if len(inputs) == 4 and inputs[3] is not None and not self.takes_masks:
            raise TitanError("method ring knows the plain causal mask only, and got another; use method gather")
        for name, tensor in zip(("query", "key", "value"), inputs[:3], strict=True):
            assert isinstance(tensor, torch.Tensor)
            if tensor.size(2) != self.local_seq_len:
                raise TitanError(
                    f"attention under context parallelism got a {name} of {tensor.size(2)} tokens, expected "
                    f"{self.local_seq_len} ({self.seq_len} over {self.degree} cp ranks); cut the batch once by cp_shard"
                )


def _check_masks_given(load_balancer: str, mesh: DeviceMesh) -> None:
    """Refuse to guess an order that the masks decide; one rank of the method holds the sequence's own."""
    if load_balancer in MASK_BALANCERS and mesh.size() > 1:
        raise TitanError(f"load balancer {load_balancer} orders tokens by their masks; give those too")


def _order_of(masks: AttentionMasks, seq_len: int) -> torch.Tensor:
    if masks.order is None or masks.order.size(1) != seq_len:
        planned = "none" if masks.order is None else masks.order.size(1)
        raise TitanError(f"the masks are planned for {planned} tokens, the buffers have {seq_len}")
    return masks.order


def _taken(buffer: torch.Tensor, tokens: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the tokens int64 [B, n] of each row of a buffer whose dim 0 is the batch."""
    if dim == 0:
        raise TitanError("masks order the tokens of each row of a batch: the sequence dim cannot be 0")
    if buffer.size(0) != tokens.size(0):
        raise TitanError(f"the masks are of {tokens.size(0)} sequences, a buffer of {buffer.size(0)}")
    shape = [1] * buffer.ndim
    shape[0], shape[dim] = tokens.shape
    return torch.take_along_dim(buffer, tokens.to(buffer.device).view(shape), dim)


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
