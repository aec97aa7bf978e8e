"""Method `gather`: the keys and values that this rank's queries see, in sequence order, then each query against them.

A token's output does not depend on which rank computed it, nor on the degree: see `attention.kernels` for what that
takes. Only what is seen travels, from the rank that holds it to each that sees it: a quarter of the remote tokens of
plain causal attention stays at home with head-tail balancing, and most of them do with documents or windows.

Letters: P ranks, B batch, H query heads, K key/value heads, S tokens of the sequence, n = S / P of them here, W keys
that are seen here, E head dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import library, nn

from torchtitan.attention import pieces
from torchtitan.attention.masks import LayerMask
from torchtitan.attention.pieces import pieces_of, wide
from torchtitan.attention.plan import KEY_SPLIT, plain_layer
from torchtitan.distributed.collectives import PendingRows, exchange_rows, start_exchange_rows
from torchtitan.distributed.cp.balance import head_tail
from torchtitan.distributed.cp.torch_private import resolve_group
from torchtitan.distributed.plan import is_standard_attention
from torchtitan.errors import TitanError

AUTO = -1  # key/value heads per step: as many as make AUTO_BYTES once gathered, which caches hold
AUTO_BYTES = 16 * 2**20


@dataclass(frozen=True)
class GatherSettings:
    """What decides how one attention module gathers."""

    group: str  # name of the process group
    degree: int
    balanced: bool  # where no mask says in which order the ranks hold the tokens: head-tail
    kv_heads_per_step: int  # key/value heads that travel at a time, while those before are computed; 0: all; or AUTO
    keep_gathered: bool  # keep the gathered keys and values for the backward instead of gathering again

    def arguments(self) -> tuple[str, int, bool, int, bool]:
        """Return the settings as arguments of the operators below."""
        return self.group, self.degree, self.balanced, self.kv_heads_per_step, self.keep_gathered


def apply_gather(module: nn.Module, settings: GatherSettings) -> None:
    """Make an inner attention module gather keys and values, in place; it takes and returns local [B, H, n, E].

    Raises:
        TitanError: the module's forward does not say that it is attention under a `LayerMask` and nothing else.
    """
    if not is_standard_attention(module):
        raise TitanError(
            f"method gather computes attention in place of {type(module).__name__}.forward, which is not marked as "
            "standard causal attention (default scale, nothing else done to q, k, v or the output): mark it by "
            "torchtitan.distributed.plan.standard_attention if it is, or use method ring"
        )

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: LayerMask | None = None) -> torch.Tensor:
        window, *tables = (0,) if mask is None else mask
        return gather_attention(q, k, v, tables, window, *settings.arguments())[0]

    module.forward = forward
    module.prepare = lambda mask, device: mask  # type: ignore[assignment]


@library.custom_op("torchtitan::gather_attention", mutates_args=())
def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: list[torch.Tensor],
    window: int,
    group: str,
    degree: int,
    balanced: bool,
    kv_heads_per_step: int,
    keep_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output [B, H, n, E], its log-sum-exp [B, H, n], and the gathered [2, B, K, W, E] (or [0]).

    `tables` are those of a `LayerMask`; none: plain causal attention of tokens that lie head-tail or in order.
    """
    ranks = resolve_group(group)
    mask = _layer_mask(tables, window, k, degree, balanced, ranks)
    runs = pieces_of(mask.pieces)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=wide(q), device=q.device)
    kept = torch.empty(_kept_shape(k, mask.take.size(1), keep_gathered), dtype=k.dtype, device=k.device)
    for kv_heads, (keys, values) in _gathered(k, v, mask, ranks, kv_heads_per_step):
        if keep_gathered:
            kept[0, :, kv_heads], kept[1, :, kv_heads] = keys, values
        heads = _query_heads(q, k, kv_heads)
        out[:, heads], lse[:, heads] = pieces.forward(q[:, heads], keys, values, runs, mask.window)
    return out, lse, kept


@library.custom_op("torchtitan::gather_attention_backward", mutates_args=())
def gather_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor,
    tables: list[torch.Tensor],
    window: int,
    group: str,
    degree: int,
    balanced: bool,
    kv_heads_per_step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; those of k and v are summed over the ranks in fp32 (fp64 for fp64)."""
    ranks = resolve_group(group)
    mask = _layer_mask(tables, window, k, degree, balanced, ranks)
    runs = pieces_of(mask.pieces)
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    gathers = (
        _gathered(k, v, mask, ranks, kv_heads_per_step)
        if kept.numel() == 0
        else ((heads, kept[:, :, heads]) for heads in _steps(k, degree, kv_heads_per_step))
    )
    for kv_heads, (keys, values) in gathers:
        heads = _query_heads(q, k, kv_heads)
        grad_q[:, heads], grad_kv = pieces.backward(
            grad[:, heads], q[:, heads], keys, values, out[:, heads], lse[:, heads], runs, mask.window
        )
        grad_k[:, kv_heads], grad_v[:, kv_heads] = _returned(grad_kv, mask, ranks)
    return grad_q, grad_k, grad_v


def _layer_mask(
    tables: list[torch.Tensor], window: int, k: torch.Tensor, degree: int, balanced: bool, ranks: dist.ProcessGroup
) -> LayerMask:
    if tables:
        mask = LayerMask(window, *tables)
        if mask.counts.ndim != 2 or mask.counts.size(1) != degree:
            raise TitanError(
                f"the mask is not planned for {degree} ranks: give what cp_shard or plan_cp_masks returned"
            )
        return mask
    return _plain_mask(k.size(0), k.size(2) * degree, degree, balanced, ranks.rank(), k.device)


@lru_cache(maxsize=16)
def _plain_mask(batch: int, seq_len: int, degree: int, balanced: bool, rank: int, device: torch.device) -> LayerMask:
    order = head_tail(seq_len, degree if balanced else 1)
    return plain_layer(order, batch, degree, rank).to(device)


def _kept_shape(k: torch.Tensor, width: int, keep_gathered: bool) -> tuple[int, ...]:
    return (2, k.size(0), k.size(1), width, k.size(3)) if keep_gathered else (0,)


def _steps(k: torch.Tensor, degree: int, kv_heads_per_step: int) -> list[slice]:
    """Return the key/value heads of each step; the same on all ranks, so not by what this one sees."""
    num_kv_heads = k.size(1)
    step = kv_heads_per_step or num_kv_heads
    if kv_heads_per_step == AUTO:
        step = max(1, AUTO_BYTES // (2 * degree * k[:, 0].nbytes))
    return [slice(first, min(first + step, num_kv_heads)) for first in range(0, num_kv_heads, step)]


def _query_heads(q: torch.Tensor, k: torch.Tensor, kv_heads: slice) -> slice:
    """Return the query heads that share some key/value heads."""
    group = q.size(1) // k.size(1)
    return slice(kv_heads.start * group, kv_heads.stop * group)


def _gathered(
    k: torch.Tensor, v: torch.Tensor, mask: LayerMask, ranks: dist.ProcessGroup, kv_heads_per_step: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (heads, keys and values [2, B, heads, W, E] in sequence order), the next heads already under way."""
    steps = _steps(k, ranks.size(), kv_heads_per_step)
    own, pending = _start(k, v, steps[0], mask, ranks)
    for heads, following in zip(steps, [*steps[1:], None], strict=True):
        present, received = own, pending.wait()
        if following is not None:
            own, pending = _start(k, v, following, mask, ranks)
        gathered = _in_order(present, received, mask)
        del present, received  # not to be held while these heads are computed
        yield heads, gathered


def _in_order(own: torch.Tensor, received: torch.Tensor, mask: LayerMask) -> torch.Tensor:
    """Return this rank's buffer of keys and values: [2, B, heads, W, E], from rows [tokens, 2, heads, E]."""
    rows = torch.cat([own, received, own.new_zeros(1, *own.shape[1:])])  # the last is where nothing lies
    return rows[mask.take].permute(2, 0, 3, 1, 4).contiguous()


def _start(
    k: torch.Tensor, v: torch.Tensor, heads: slice, mask: LayerMask, ranks: dist.ProcessGroup
) -> tuple[torch.Tensor, PendingRows]:
    """Return this rank's rows [B n, 2, heads, E], one per token, and those of others that are under way."""
    own = torch.stack([k[:, heads], v[:, heads]]).permute(1, 3, 0, 2, 4).flatten(0, 1).contiguous()
    sent, received = mask.counts.tolist()
    return own, start_exchange_rows(own[mask.send], sent, received, ranks)


def _returned(grad_kv: torch.Tensor, mask: LayerMask, ranks: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over ranks of the gradients of this rank's keys and values: [2, B, k, W, E] -> [2, B, k, n, E].

    The sum is in the order of the ranks.
    """
    batch = grad_kv.size(1)
    rows = grad_kv.permute(1, 3, 0, 2, 4).flatten(0, 1)[mask.slots]  # of local and received tokens
    sent, received = mask.counts.tolist()
    own, others = rows.split([rows.size(0) - sum(received), sum(received)])
    back = exchange_rows(others, received, sent, ranks).split(sent)
    total = torch.zeros_like(own)
    for rank, (part, tokens) in enumerate(zip(back, mask.send.split(sent), strict=True)):
        if rank == ranks.rank():
            total += own
        else:
            total.index_add_(0, tokens, part)
    return total.unflatten(0, (batch, -1)).permute(2, 0, 3, 1, 4)


@gather_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: list[torch.Tensor], window: int, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group, degree, balanced, _, keep_gathered = settings
    lse = torch.empty(q.shape[:3], dtype=wide(q), device=q.device)
    width = tables[1].size(1) if tables else _plain_width(k.size(2), degree, balanced, resolve_group(group).rank())
    kept = torch.empty(_kept_shape(k, width, keep_gathered), dtype=k.dtype, device=k.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse, kept


def _plain_width(local_len: int, degree: int, balanced: bool, rank: int) -> int:
    """Return the keys in a rank's buffer under the plain causal mask: up to its last token, in whole splits."""
    end = (2 * degree - rank) * (local_len // 2) if balanced else (rank + 1) * local_len
    return min(local_len * degree, math.ceil(end / KEY_SPLIT) * KEY_SPLIT)


@gather_attention_backward.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, tables, ctx.window, *settings, _ = inputs
    ctx.settings = settings
    ctx.save_for_backward(q, k, v, *output, *tables)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    q, k, v, out, lse, kept, *tables = ctx.saved_tensors  # read once: a checkpoint makes them anew
    grads = gather_attention_backward(grad, q, k, v, out, lse, kept, tables, ctx.window, *ctx.settings)
    return *grads, [None] * len(tables), None, None, None, None, None, None


gather_attention.register_autograd(_backward, setup_context=_save)
GATHER_OP = torch.ops.torchtitan.gather_attention.default
