"""No process-wide state decides a result: torch's flags are set for each call and put back, come what may."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Case, DenseAttention, Result, build_split_model, error, local_batch, oracle
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.distributed.context_parallel import apply_cp, cp_shard, cp_unshard
from torchtitan.distributed.cp import torch_private
from torchtitan.distributed.cp.torch_private import read_state
from torchtitan.models.common.attention import ScaledDotProductAttention


def _layout_guard(order: str) -> tuple[bool, Result, Result]:
    """Shard head-tail, shard plainly, forward, shard again, backward; two models with other settings take turns."""
    before = read_state()
    balanced, plain = Case(cp=2), Case(cp=2, load_balancer="none", rotate_method="alltoall")
    sides = []
    for case in (balanced, plain):
        model, dims = build_split_model(case)
        sides.append((case, model, dims, local_batch(case, dims)))
    totals = []
    for case, model, dims, batch in sides:
        hidden = model(batch.inputs, batch.positions)
        cp_shard(dims.cp_mesh, [torch.zeros(1, 8)], load_balancer="none" if case is balanced else "headtail")
        totals.append(ChunkedCrossEntropy(0)(model.output, hidden, batch.labels).total)
    if order == "together":
        (sum(totals) / 128).backward()
    else:
        for total in totals if order == "as they came" else reversed(totals):
            (total / 128).backward()
    results = []
    for (_, model, _, _), total in zip(sides, totals, strict=True):
        dist.all_reduce(total := total.detach())
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results.append(Result(float(total) / 128, torch.zeros(1), grads, {}, 0.0))
    return _same_state(before), results[0], results[1]


def _same_state(before: Any) -> bool:
    return all(a is b or a == b for a, b in zip(before, read_state(), strict=True))


def _orders(orders: list[str]) -> list[tuple[bool, Result, Result]]:
    return [_layout_guard(order) for order in orders]


def test_no_hidden_global_decides_a_result() -> None:
    """Case layout guard, trap 1: torch's flag is read when a kernel runs, forward and backward."""
    expected = oracle(Case(dtype=torch.float64))
    for rank in run_ranks(2, _orders, ["as they came", "last first", "together"]):
        for restored, *results in rank:
            assert restored
            for result in results:
                assert result.loss == pytest.approx(expected.loss, rel=5e-7)
                for name, gradient in expected.grads.items():
                    assert error(result.grads[name], gradient) < 1e-6, name


class _Attention:
    """One hooked attention module and its input, to be called in unusual ways."""

    def __init__(self, load_balancer: str = "headtail", *, module: ScaledDotProductAttention | None = None) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.load_balancer = load_balancer
        self.module = module or ScaledDotProductAttention()
        apply_cp([self.module], self.mesh, seq_len=32, load_balancer=load_balancer)
        generator = torch.Generator().manual_seed(0)
        self.whole = [torch.randn(1, heads, 32, 8, generator=generator) for heads in (4, 2, 2)]
        self.state = read_state()

    def local(self) -> list[torch.Tensor]:
        parts = cp_shard(self.mesh, self.whole, load_balancer=self.load_balancer, seq_dim=2)
        return [part.requires_grad_() for part in parts]

    def errors(self, out: torch.Tensor, qkv: list[torch.Tensor]) -> list[float]:
        """Return how far the output and the gradients of its sum of squares are from dense attention's."""
        found = [out, *(tensor.grad for tensor in qkv if tensor.grad is not None)]
        found = cp_unshard(self.mesh, found, load_balancer=self.load_balancer, seq_dim=2)
        exact = [tensor.clone().requires_grad_() for tensor in self.whole]
        expected = DenseAttention()(*exact)
        expected.square().sum().backward()
        wanted = [expected, *(e.grad for e, tensor in zip(exact, qkv, strict=True) if tensor.grad is not None)]
        return [error(a, b) for a, b in zip(found, wanted, strict=True)]


def _recomputed() -> list[float]:
    """Checkpoint attention alone: its recomputation stops within the module, as soon as it has what it needs."""
    attention = _Attention()
    qkv = attention.local()
    out = checkpoint(attention.module, *qkv, use_reentrant=False)
    out.square().sum().backward()
    return [float(not _same_state(attention.state)), *attention.errors(out, qkv)]


def _validated_between() -> list[float]:
    """Run other models without gradients between a forward and its backward."""
    attention, other = _Attention(), _Attention("none")
    qkv = attention.local()
    out = attention.module(*qkv)
    for grad_mode in (torch.no_grad, torch.inference_mode):
        with grad_mode():
            parts = cp_shard(other.mesh, other.whole, load_balancer="none", seq_dim=2)
            (value,) = cp_unshard(other.mesh, [other.module(*parts)], load_balancer="none", seq_dim=2)
        assert error(value, DenseAttention()(*other.whole)) < 1e-6
    out.square().sum().backward()
    return [float(not _same_state(attention.state)), *attention.errors(out, qkv)]


def _only_keys_learn() -> list[float]:
    attention = _Attention()
    qkv = attention.local()
    qkv[0].requires_grad_(False)
    qkv[2].requires_grad_(False)
    out = attention.module(*qkv)
    out.square().sum().backward()
    return [float(not _same_state(attention.state)), *attention.errors(out, qkv)]


def _twice_through_one_graph() -> list[float]:
    attention = _Attention()
    qkv = attention.local()
    out = attention.module(*qkv)
    for _ in range(2):
        for tensor in qkv:
            tensor.grad = None
        out.square().sum().backward(retain_graph=True)
    return [float(not _same_state(attention.state)), *attention.errors(out, qkv)]


def _after_failures() -> list[float]:
    """Fail in the kernel, forward then backward, and go on: the same module, and one of another layout."""
    failing = _Attention("none")
    kernels = torch_private._flash_forward, torch_private._flash_backward

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    torch_private._flash_forward = fail
    with pytest.raises(ZeroDivisionError):
        failing.module(*failing.local())
    after_forward = _same_state(failing.state)
    torch_private._flash_forward, torch_private._flash_backward = kernels[0], fail
    out = failing.module(*failing.local())
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    after_backward = _same_state(failing.state)
    torch_private._flash_backward = kernels[1]
    errors = [float(not after_forward), float(not after_backward)]
    for attention in (failing, _Attention()):
        qkv = attention.local()
        out = attention.module(*qkv)
        out.square().sum().backward()
        errors += [float(not _same_state(failing.state)), *attention.errors(out, qkv)]
    return errors


def _by_the_branch_for_cuda() -> list[float]:
    """Keys and values are repeated there before the kernel, which under context parallelism acts on DTensors."""
    module = ScaledDotProductAttention()
    module.forward = module._forward_cuda
    attention = _Attention(module=module)
    qkv = attention.local()
    out = attention.module(*qkv)
    out.square().sum().backward()
    return [float(not _same_state(attention.state)), *attention.errors(out, qkv)]


def _unusual_calls() -> dict[str, list[float]]:
    calls = (
        _recomputed,
        _validated_between,
        _only_keys_learn,
        _twice_through_one_graph,
        _after_failures,
        _by_the_branch_for_cuda,
    )
    return {call.__name__: call() for call in calls}


def test_attention_is_right_however_it_is_called() -> None:
    """Breaks when state leaks from a call that is cut short, repeated, or interrupted by another layout's."""
    for rank in run_ranks(2, _unusual_calls):
        for name, errors in rank.items():
            assert max(errors) < 2e-6, (name, errors)


class _Failing(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def _state_after_failure() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    module = _Failing()
    apply_cp([module], mesh, seq_len=8, load_balancer="none")
    before = read_state()
    qkv = [torch.zeros(1, 1, 4, 4) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        module(*qkv)
    return _same_state(before)


def test_state_is_restored_when_attention_fails() -> None:
    assert all(run_ranks(2, _state_after_failure))


def _strided(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for contiguous in (True, False):
        module = ScaledDotProductAttention()
        apply_cp([module], mesh, seq_len=32)
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        qkv = [torch.randn(1, 16, heads, 8, generator=generator).transpose(1, 2) for heads in (4, 2, 2)]
        qkv = [(tensor.contiguous() if contiguous else tensor).requires_grad_() for tensor in qkv]
        out = module(*qkv)
        out.square().sum().backward()
        results.append(torch.cat([out.detach().flatten(), *(tensor.grad.flatten() for tensor in qkv)]))
    return results[0], results[1]


def test_strided_keys_and_values_give_the_same_bits() -> None:
    """Trap 11: non-contiguous K and V gave wrong losses in torch's ring."""
    for contiguous, strided in run_ranks(2, _strided, 3):
        assert torch.equal(contiguous, strided)
