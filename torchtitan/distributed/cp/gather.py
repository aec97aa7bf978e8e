"""Method `gather`: all keys and values in sequence order, then each local query against its causal prefix.

A token's output does not depend on which rank computed it, nor on the degree: see `kernels` for what that takes.

Letters: P ranks, B batch, H query heads, K key/value heads, S tokens of the sequence, n = S / P of them here, E head
dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import library, nn

from torchtitan.distributed.collectives import PendingGather, reduce_scatter, start_all_gather
from torchtitan.distributed.cp import kernels
from torchtitan.distributed.cp.placement import Placement
from torchtitan.distributed.cp.torch_private import resolve_group
from torchtitan.distributed.plan import is_plain_causal
from torchtitan.errors import TitanError

AUTO = -1  # key/value heads per step: as many as make AUTO_BYTES once gathered, which caches hold
AUTO_BYTES = 16 * 2**20


@dataclass(frozen=True)
class GatherSettings:
    """What decides how one attention module gathers."""

    group: str  # name of the process group
    degree: int
    balanced: bool
    kv_heads_per_step: int  # key/value heads that travel at a time, while those before are computed; 0: all; or AUTO
    keep_gathered: bool  # keep the gathered keys and values for the backward instead of gathering again

    def arguments(self) -> tuple[str, int, bool, int, bool]:
        """Return the settings as arguments of the operators below."""
        return self.group, self.degree, self.balanced, self.kv_heads_per_step, self.keep_gathered


def apply_gather(module: nn.Module, settings: GatherSettings) -> None:
    """Make an inner attention module gather keys and values, in place; it takes and returns local [B, H, n, E].

    Raises:
        TitanError: the module's forward does not say that it is plain causal attention, which is all that gather does.
    """
    if not is_plain_causal(module):
        raise TitanError(
            f"method gather computes attention in place of {type(module).__name__}.forward, which is not marked as "
            "plain causal attention (default scale, nothing else done to q, k, v or the output): mark it by "
            "torchtitan.distributed.plan.plain_causal if it is, or use method ring"
        )

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return gather_attention(q, k, v, *settings.arguments())[0]

    module.forward = forward


@library.custom_op("torchtitan::gather_attention", mutates_args=())
def gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    group: str,
    degree: int,
    balanced: bool,
    kv_heads_per_step: int,
    keep_gathered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output [B, H, n, E], its log-sum-exp [B, H, n], and the gathered [2, B, K, S, E] (or [0])."""
    ranks, placement = _ranks(group, degree, balanced, k)
    spans = placement.spans(ranks.rank())
    operand = kernels.operand(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=_wide(q), device=q.device)
    kept = _kept(k, degree, keep_gathered)
    for kv_heads, gathered in _gathered(k, v, ranks, placement, kv_heads_per_step):
        if keep_gathered:
            kept[:, :, kv_heads] = gathered
        heads = _query_heads(q, k, kv_heads)
        keys, values = (kernels.operand(part) for part in gathered)
        for span in spans:
            rows = slice(span.local, span.local + span.length)
            part, part_lse = kernels.forward(operand[:, heads, rows], keys, values, span.start)
            out[:, heads, rows] = part
            lse[:, heads, rows] = part_lse
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
    group: str,
    degree: int,
    balanced: bool,
    kv_heads_per_step: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; those of k and v are summed over the ranks in fp32 (fp64 for fp64)."""
    ranks, placement = _ranks(group, degree, balanced, k)
    spans = placement.spans(ranks.rank())
    operands = [kernels.operand(tensor) for tensor in (grad, q, out)]
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    gathers = (
        _gathered(k, v, ranks, placement, kv_heads_per_step)
        if kept.numel() == 0
        else ((heads, kept[:, :, heads]) for heads in _steps(k, degree, kv_heads_per_step))
    )
    for kv_heads, gathered in gathers:
        heads = _query_heads(q, k, kv_heads)
        keys, values = (kernels.operand(part) for part in gathered)
        grad_kv = torch.zeros(gathered.shape, dtype=_wide(q), device=q.device)
        for span in spans:
            rows = slice(span.local, span.local + span.length)
            part_grad, part_q, part_out = (tensor[:, heads, rows].contiguous() for tensor in operands)
            part_lse = lse[:, heads, rows].contiguous()
            grad_q[:, heads, rows] = kernels.backward(
                part_grad, part_q, keys, values, part_out, part_lse, span.start, grad_kv
            )
        own = reduce_scatter(_by_rank(grad_kv, placement), ranks)  # [2, B, k, n, E]
        grad_k[:, kv_heads], grad_v[:, kv_heads] = own[0], own[1]
    return grad_q, grad_k, grad_v


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _kept(k: torch.Tensor, degree: int, keep_gathered: bool) -> torch.Tensor:
    shape = (2, k.size(0), k.size(1), k.size(2) * degree, k.size(3)) if keep_gathered else (0,)
    return torch.empty(shape, dtype=k.dtype, device=k.device)


def _ranks(group: str, degree: int, balanced: bool, k: torch.Tensor) -> tuple[dist.ProcessGroup, Placement]:
    return resolve_group(group), Placement(k.size(2) * degree, degree, balanced)


def _steps(k: torch.Tensor, degree: int, kv_heads_per_step: int) -> list[slice]:
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
    k: torch.Tensor, v: torch.Tensor, ranks: dist.ProcessGroup, placement: Placement, kv_heads_per_step: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (heads, keys and values [2, B, heads, S, E] in sequence order), the next heads already under way."""
    steps = _steps(k, placement.degree, kv_heads_per_step)
    pending = _start(k, v, steps[0], ranks)
    for heads, following in zip(steps, [*steps[1:], None], strict=True):
        parts = pending.wait()
        if following is not None:
            pending = _start(k, v, following, ranks)
        yield heads, _in_order(parts, placement)


def _start(k: torch.Tensor, v: torch.Tensor, heads: slice, ranks: dist.ProcessGroup) -> PendingGather:
    return start_all_gather(torch.stack([k[:, heads], v[:, heads]]), ranks)


def _in_order(parts: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return what the ranks hold in sequence order: [P, 2, B, k, n, E] -> [2, B, k, S, E]."""
    whole = parts.new_empty((*parts.shape[1:4], placement.seq_len, parts.size(5)))
    for rank, span in placement.copies():
        whole.narrow(3, span.start, span.length).copy_(parts[rank].narrow(3, span.local, span.length))
    return whole


def _by_rank(whole: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return what each rank holds of the sequence: [2, B, k, S, E] -> [P, 2, B, k, n, E]."""
    local_len = placement.seq_len // placement.degree
    parts = whole.new_empty((placement.degree, *whole.shape[:3], local_len, whole.size(4)))
    for rank, span in placement.copies():
        parts[rank].narrow(3, span.local, span.length).copy_(whole.narrow(3, span.start, span.length))
    return parts


@gather_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, degree, *_, keep_gathered = settings
    lse = torch.empty(q.shape[:3], dtype=_wide(q), device=q.device)
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), lse, _kept(k, degree, keep_gathered)


@gather_attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    return grad_q, grad_k, grad_v


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, ctx.group, ctx.degree, ctx.balanced, ctx.kv_heads_per_step, _ = inputs
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    grads = gather_attention_backward(
        grad, *ctx.saved_tensors, ctx.group, ctx.degree, ctx.balanced, ctx.kv_heads_per_step
    )
    return *grads, None, None, None, None, None


gather_attention.register_autograd(_backward, setup_context=_save)
GATHER_OP = torch.ops.torchtitan.gather_attention.default
