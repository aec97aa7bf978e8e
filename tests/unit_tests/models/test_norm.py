"""RMSNorm against torch's."""

import pytest
import torch

from torchtitan.models.common.norm import RMSNorm


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 48), (1, 48)])
def test_output_and_gradients_equal_torchs(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, generator=generator)
    values, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    results = []
    for module in (RMSNorm(48, 1e-3).to(dtype), torch.nn.RMSNorm(48, 1e-3).to(dtype)):
        with torch.no_grad():
            module.weight.copy_(weight)
        x = values.clone().requires_grad_()
        out = module(x)
        out.backward(grad)
        results.append((out, x.grad, module.weight.grad))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_gradient_is_the_derivative() -> None:
    norm = RMSNorm(6, 1e-5).double()
    assert torch.autograd.gradcheck(norm, torch.randn(4, 6, dtype=torch.float64, requires_grad=True))
