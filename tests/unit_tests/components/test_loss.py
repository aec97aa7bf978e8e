"""The fused loss against torch's cross-entropy on explicit logits."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan.components.loss import ChunkedCrossEntropy, LossSum, _even_chunks, _exact_sum, mean_loss
from torchtitan.models.common.decoder import OutputHead

_TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def _inputs(dtype: torch.dtype) -> tuple[OutputHead, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    head = OutputHead(16, 31).to(dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(31, 16, generator=generator))
    hidden = torch.randn(2, 9, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 31, (2, 9), generator=generator)
    labels[0, 3] = labels[1, 8] = -100
    return head, hidden, labels


def _close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return float((actual.double() - expected.double()).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 4, 18, 100])
def test_sum_and_gradients_equal_torchs(dtype: torch.dtype, chunk_tokens: int) -> None:
    head, hidden, labels = _inputs(dtype)
    total = ChunkedCrossEntropy(chunk_tokens)(head, hidden, labels).total
    (total / 7).backward()
    assert total.dtype == torch.float64
    own = hidden.detach().clone().requires_grad_()
    weight = head.weight.detach().clone().requires_grad_()
    expected = F.cross_entropy(F.linear(own, weight).flatten(0, 1), labels.flatten(), reduction="sum")
    (expected / 7).backward()
    assert total.item() == pytest.approx(expected.item(), rel=_TOLERANCE[dtype])
    assert _close(hidden.grad, own.grad, _TOLERANCE[dtype])
    assert _close(head.weight.grad, weight.grad, _TOLERANCE[dtype])


def test_bf16_is_rounded_once_at_the_end() -> None:
    head, hidden, labels = _inputs(torch.bfloat16)
    total = ChunkedCrossEntropy(4)(head, hidden, labels).total
    (total / 7).backward()
    own = hidden.detach().double().requires_grad_()
    weight = head.weight.detach().double().requires_grad_()
    (F.cross_entropy(F.linear(own, weight).flatten(0, 1), labels.flatten(), reduction="sum") / 7).backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == torch.bfloat16
    assert _close(hidden.grad, own.grad, 2**-7)
    assert _close(head.weight.grad, weight.grad, 2**-7)


@pytest.mark.parametrize("chunk_tokens", [0, 4])
def test_no_label_gives_exact_zeros(chunk_tokens: int) -> None:
    head, hidden, labels = _inputs(torch.float32)
    total = ChunkedCrossEntropy(chunk_tokens)(head, hidden, labels.fill_(-100)).total
    total.backward()
    assert total.item() == 0.0
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_without_gradients_the_value_is_the_same() -> None:
    head, hidden, labels = _inputs(torch.float32)
    with torch.no_grad():
        value = ChunkedCrossEntropy(4)(head, hidden, labels).total
    assert not value.requires_grad
    assert value.item() == ChunkedCrossEntropy(4)(head, hidden, labels).total.item()


def test_full_logits_never_exist() -> None:
    """Breaks when a chunk is ignored: the largest tensor made would be [T, V]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.size(1) == 31:
                Largest.rows = max(Largest.rows, out.size(0))
            return out

    head, hidden, labels = _inputs(torch.float32)
    with Largest():
        ChunkedCrossEntropy(4)(head, hidden, labels).total.backward()
    assert Largest.rows < 18  # the transposed weight has 16; all tokens would be 18


def _rows(losses: list[float], cuts: list[int]) -> torch.Tensor:
    """Return the rows of ranks that hold the tokens between the cuts, by way of a head that gives these losses."""
    rows = []
    for part in torch.tensor(losses).tensor_split(cuts):
        units, inexact = _exact_sum(part)
        rows.append(LossSum(part.sum(dtype=torch.float64), units, inexact, part).row(len(part)))
    return torch.stack(rows)


@given(st.lists(st.floats(0, 2**20, width=32), min_size=1, max_size=30), st.data())
@settings(deadline=None)
def test_the_logged_mean_does_not_depend_on_how_tokens_are_spread(losses: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(losses))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(losses)), max_size=4)))
    mean = mean_loss(_rows(losses, []), len(losses))
    assert mean_loss(_rows(order, cuts), len(losses)) == mean
    assert mean == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12, abs=2**-33)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 3e7])
def test_a_loss_that_is_not_finite_or_huge_shows_in_the_mean(odd: float) -> None:
    mean = mean_loss(_rows([1.0, odd, 2.0], [1]), 3)
    assert math.isnan(mean) if math.isnan(odd) else mean == pytest.approx((3.0 + odd) / 3)


def test_chunks_are_even() -> None:
    """Breaks with a last chunk of a few rows, which kernels may round in another way."""
    assert [part.stop - part.start for part in _even_chunks(258, 256)] == [129, 129]
    assert [part.stop - part.start for part in _even_chunks(7, 3)] == [2, 2, 3]
    assert _even_chunks(5, 0) == [slice(0, 5)] and _even_chunks(0, 4) == []


def test_logits_exist_for_a_chunk_of_tokens_only() -> None:
    head = OutputHead(16, 64)
    hidden, labels = torch.randn(1, 1000, 16, requires_grad=True), torch.zeros(1, 1000, dtype=torch.long)
    with _Largest() as largest:
        ChunkedCrossEntropy("auto")(head, hidden, labels).total.backward()
    assert largest.numel == 250 * 64  # four chunks of at most 256 tokens


class _Largest(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out
