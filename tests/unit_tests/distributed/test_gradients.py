"""Clipping by the norm of all gradients, on one rank; `test_context_parallel.py` compares the norm over many."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.ranks import run_ranks
from torchtitan.distributed.collectives import all_gather_rows, all_reduce_sum
from torchtitan.distributed.grad_norm import clip_gradients, grad_norm, local_gradients


def test_a_large_norm_is_scaled_to_the_limit() -> None:
    grads = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    clip_gradients(grads, norm=5.0, max_norm=1.0)
    assert torch.allclose(grads[0], torch.tensor([0.6, 0.0])) and torch.allclose(grads[1], torch.tensor([[0.8]]))


@pytest.mark.parametrize("max_norm", [5.0, 7.0])
def test_a_norm_within_the_limit_changes_no_bit(max_norm: float) -> None:
    """Breaks with the usual max_norm / (norm + 1e-6), which moves every gradient."""
    grads = [torch.tensor([3.0, 0.1]), torch.tensor([[4.0]])]
    before = [grad.clone() for grad in grads]
    clip_gradients(grads, norm=5.0, max_norm=max_norm)
    assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))


def test_zero_gradients_stay_zero() -> None:
    grads = [torch.zeros(3)]
    clip_gradients(grads, norm=0.0, max_norm=1.0)
    assert torch.equal(grads[0], torch.zeros(3))


def test_parameters_without_a_gradient_are_left_out() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[1].grad = torch.ones(2)
    (grad,) = local_gradients(parameters)
    grad.mul_(2)  # shares the memory, so that clipping acts
    assert torch.equal(parameters[1].grad, torch.full((2,), 2.0))


def _norms() -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    own = [torch.full((2,), float(rank + 1)), torch.empty(0, 4)]  # an uneven shard can be empty
    tiny = [torch.full((4,), 1e-25)]  # squares underflow in fp32
    # Sums whose order fp32 would show: one large square, many small ones.
    mixed = [torch.tensor([1e4])] + [torch.tensor([0.5]) for _ in range(64)]
    return [
        grad_norm(own, mesh),
        grad_norm(tiny, mesh),
        grad_norm(mixed, mesh),
        grad_norm([], mesh),
        float(all_reduce_sum(2**40 + rank, mesh)),
        *all_gather_rows(torch.tensor([rank, -rank]), mesh).flatten().tolist(),
    ]


def test_norms_and_sums_over_the_ranks() -> None:
    """Breaks with squares in fp32, without the sum over ranks, or when an empty shard has no norm."""
    for values in run_ranks(2, _norms):
        assert values[0] == pytest.approx((2 * 1 + 2 * 4) ** 0.5, rel=1e-15)
        assert values[1] == pytest.approx(8**0.5 * 1e-25, rel=1e-6)
        assert values[2] == pytest.approx((2 * (1e8 + 64 * 0.25)) ** 0.5, rel=1e-15)
        assert values[3] == 0.0
        assert values[4:] == [2.0**41 + 1, 0, 0, 1, -1]
