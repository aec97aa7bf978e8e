"""The cast path of Linear: the same numbers as a plain bf16 product, by fp32 kernels."""

import pytest
import torch
import torch.nn.functional as F

from torchtitan.models.common import attention, linear
from torchtitan.models.common.linear import Linear
from torchtitan.tools.device import kernel_dtype


def _operands() -> tuple[Linear, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layer = Linear(64, 48).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(48, 64, generator=generator))
    x = torch.randn(2, 10, 64, generator=generator).bfloat16().requires_grad_()
    return layer, x, torch.randn(2, 10, 48, generator=generator).bfloat16()


def test_cast_products_are_the_exact_ones_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "kernel_dtype", lambda tensor: torch.float32)
    layer, x, grad = _operands()
    out = layer(x)
    out.backward(grad)
    exact_x, exact_w = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    exact = F.linear(exact_x, exact_w)
    exact.backward(grad.double())
    for actual, expected in ((out, exact), (x.grad, exact_x.grad), (layer.weight.grad, exact_w.grad)):
        assert actual.dtype == torch.bfloat16
        # One rounding to bf16 is at most 2^-8 of the value itself; cancellation in fp32 adds next to nothing.
        assert bool(((actual.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all())


def test_wide_dtypes_are_never_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float64):
        assert kernel_dtype(torch.zeros(1, dtype=dtype)) == dtype


def test_a_cpu_with_bf16_kernels_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.tools import device

    for native, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(device, "cpu_has_bf16_kernels", lambda native=native: native)
        assert kernel_dtype(torch.zeros(1, dtype=torch.bfloat16)) == expected


def test_attention_by_either_kernel_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 32, 16, generator=generator).bfloat16() for heads in (4, 2, 2))
    outs = []
    for dtype in (torch.float32, torch.bfloat16):
        monkeypatch.setattr(attention, "kernel_dtype", lambda tensor, dtype=dtype: dtype)
        outs.append(attention.ScaledDotProductAttention()(q, k, v))
    assert outs[0].dtype == outs[1].dtype == torch.bfloat16
    assert float((outs[0].float() - outs[1].float()).abs().max()) < 2e-2
