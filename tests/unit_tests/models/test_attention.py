"""The branches of attention by device; the one for CUDA runs here on the CPU's kernel, but for the last test."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tiny import DenseAttention, error
from torchtitan.models.common.attention import ScaledDotProductAttention


def _operands(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 2, 2)
    return [torch.randn(2, heads, 64, 64, generator=generator).to(device, dtype).requires_grad_() for heads in sizes]


def _errors(out: torch.Tensor, qkv: list[torch.Tensor]) -> list[float]:
    """Return how far the output and the gradients of its sum of squares are from dense attention in fp64."""
    out.double().square().sum().backward()
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in qkv]
    expected = DenseAttention()(*exact)
    expected.square().sum().backward()
    found = [out, *(tensor.grad for tensor in qkv)]
    return [error(a.cpu(), b) for a, b in zip(found, [expected, *(e.grad for e in exact)], strict=True)]


@pytest.mark.parametrize("on_cuda", [False, True])
def test_both_branches_are_attention(on_cuda: bool) -> None:
    module, qkv = ScaledDotProductAttention(), _operands(torch.float32)
    out = module._forward_cuda(*qkv) if on_cuda else module(*qkv)
    assert max(_errors(out, qkv)) < 2e-6


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 8), (torch.bfloat16, 2)])
def test_keys_are_repeated_only_for_the_kernel_without_groups(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int
) -> None:
    """Trap 20: on CUDA fp32 has one kernel that the ring knows, and it takes as many key as query heads."""
    seen = []
    original = F.scaled_dot_product_attention

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: bool) -> torch.Tensor:
        seen.append((k.size(1), v.size(1)))
        return original(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    ScaledDotProductAttention()._forward_cuda(*_operands(dtype))
    assert seen == [(heads, heads)]


class _AttentionOps(TorchDispatchMode):
    """Collects the names of attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "attention" in func._schema.name:
            self.names.add(func._schema.name.removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_takes_kernels_that_the_ring_knows() -> None:
    """Breaks when SDPA falls to math: under context parallelism that would attend to local tokens only."""
    for dtype, known, tolerance in (
        (torch.float32, {"efficient_attention"}, 1e-5),
        (torch.bfloat16, {"flash_attention", "cudnn_attention"}, 3e-2),
    ):
        qkv = _operands(dtype, "cuda")
        with _AttentionOps() as ops:
            out = ScaledDotProductAttention()(*qkv)
        assert ops.names and ops.names <= known
        assert max(_errors(out, qkv)) < tolerance
