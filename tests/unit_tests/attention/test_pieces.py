"""Attention piece by piece at lengths where kernels split keys: dense attention's results, and its work."""

import tracemalloc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tiny import DenseAttention, error
from tests.unit_tests.attention.test_plan import _keys
from tests.unit_tests.distributed.test_balance import _masks
from torchtitan.attention import pieces
from torchtitan.attention.masks import PLAIN, AttentionMasks, MaskKind
from torchtitan.attention.pieces import masked_attention, pieces_of
from torchtitan.attention.plan import plan_masks, whole_masks
from torchtitan.attention.work import count_attention_work
from torchtitan.distributed.context_parallel import cp_order

_KINDS = (PLAIN, MaskKind(window=16), MaskKind(window=700), MaskKind(chunk=600), MaskKind(window=300, chunk=1100))
_ROWS = ((600, 4, 696), (1, 1299))
_LENGTH = 1300


def _operands(dtype: torch.dtype, seq_len: int = _LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(2, heads, seq_len, 16, generator=generator, dtype=torch.float64).to(dtype) for heads in (2, 1, 1)
    ]


def _allowed(masks: AttentionMasks, kind: MaskKind) -> torch.Tensor:
    starts, positions = masks.document_starts, masks.positions
    distance = torch.arange(starts.size(1))[:, None] - torch.arange(starts.size(1))
    allowed = (distance >= 0) & (starts[:, :, None] == starts[:, None])
    if kind.window:
        allowed &= distance < kind.window
    if kind.chunk:
        allowed &= (positions // kind.chunk)[:, :, None] == (positions // kind.chunk)[:, None]
    return allowed.unsqueeze(1)


def _exact(masks: AttentionMasks, kind: MaskKind, weights: torch.Tensor) -> list[torch.Tensor]:
    exact = [tensor.requires_grad_() for tensor in _operands(torch.float64)]
    out = DenseAttention(_allowed(masks, kind))(*exact)
    (out * weights).sum().backward()
    return [out, *(tensor.grad for tensor in exact)]  # type: ignore[misc]


@pytest.mark.parametrize("kind", _KINDS)
def test_whole_sequences(kind: MaskKind) -> None:
    unplanned = _masks(_ROWS, [kind])
    masks = whole_masks(unplanned.document_starts, unplanned.positions, [kind])
    assert masks is not None
    weights = torch.randn(2, 2, _LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    exact = _exact(masks, kind, weights)
    for dtype, allowed in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        operands = [tensor.requires_grad_() for tensor in _operands(dtype)]
        out = masked_attention(*operands, masks.layers[kind])
        (out * weights).sum().backward()
        for actual, expected in zip([out, *(tensor.grad for tensor in operands)], exact, strict=True):
            assert error(actual, expected) < allowed  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", _KINDS)
def test_each_rank_has_the_bits_of_the_whole(kind: MaskKind) -> None:
    """Of four ranks, with a buffer of what each sees: kernels get other keys around, and other queries beside."""
    unplanned = _masks(_ROWS, [kind])
    masks = whole_masks(unplanned.document_starts, unplanned.positions, [kind])
    assert masks is not None
    q, k, v = _operands(torch.float32)
    whole = masked_attention(q, k, v, masks.layers[kind])
    for balancer in ("greedy", "per_document"):
        order = cp_order(unplanned, 4, balancer)
        plans = [plan_masks(unplanned, order, 4, rank) for rank in range(4)]
        for rank, plan in enumerate(plans):
            tokens = torch.from_numpy(order).view(2, 4, -1)[:, rank]
            keys = torch.from_numpy(_keys(plans, kind, rank))
            buffers = [_taken(tensor, keys) for tensor in (k, v)]
            out, _ = pieces.forward(_taken(q, tokens), *buffers, pieces_of(plan.layers[kind].pieces), kind.window)
            assert torch.equal(out, _taken(whole, tokens)), (balancer, rank)


def _taken(tensor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the tokens [B, N] of each row of [B, H, S, E]; -1: zeros."""
    padded = torch.cat([tensor, torch.zeros_like(tensor[:, :, :1])], dim=2)
    return torch.take_along_dim(padded, (tokens % padded.size(2))[:, None, :, None], dim=2)


@pytest.mark.parametrize("kind", _KINDS)
def test_kernels_do_the_work_that_is_planned(kind: MaskKind) -> None:
    """From the shapes at the kernels' calls: what the plan, the balancers and the FLOPs go by."""
    unplanned = _masks(_ROWS, [kind])
    plan = plan_masks(unplanned, cp_order(unplanned, 1, "none"), 1, 0)
    with torch.no_grad(), count_attention_work() as work:
        masked_attention(*_operands(torch.float32), plan.layers[kind])
    assert plan.work is not None
    assert work.pairs == 2 * int(plan.work.pairs) == 2 * int(_allowed(unplanned, kind).sum())


class _LargestStorage(TorchDispatchMode):
    """The bytes of the largest tensor that an operation returned; a view counts what it is a view of."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("kind", _KINDS)
def test_no_tensor_of_all_pairs_is_ever_made(kind: MaskKind) -> None:
    """Neither by the kernels' callers, forward and backward, nor by the plan: not even one bit for each pair."""
    seq_len = 8192
    unplanned = _masks([[seq_len], [5000, 3192]], [kind])
    tracemalloc.start()
    order = cp_order(unplanned, 2, "greedy")
    plan_masks(unplanned, order, 2, 1)
    planning = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert planning < seq_len * seq_len // 8
    masks = whole_masks(unplanned.document_starts, unplanned.positions, [kind])
    assert masks is not None
    q, k, v = (tensor[:, :1] for tensor in _operands(torch.float32, seq_len))
    runs = pieces_of(masks.layers[kind].pieces)
    with torch.no_grad(), _LargestStorage() as largest:
        out, lse = pieces.forward(q, k, v, runs, kind.window)
        pieces.backward(out, q, k, v, out, lse, runs, kind.window)
    assert 0 < largest.bytes < seq_len * seq_len // 8
