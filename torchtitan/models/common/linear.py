"""A linear layer whose matrix products use the kernels that are fast on the machine."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.tools.device import kernel_dtype


class _CastLinear(torch.autograd.Function):
    """x @ w.T with operands and results in their own dtype, the product in `dtype`; saves the operands uncast."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = dtype
        return F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = grad.to(ctx.dtype).flatten(0, -2)  # [T, out]
        grad_x = (rows @ weight.to(ctx.dtype)).view(x.shape).to(x.dtype)
        grad_weight = (rows.T @ x.to(ctx.dtype).flatten(0, -2)).to(weight.dtype)
        return grad_x, grad_weight, None


class Linear(nn.Linear):
    """nn.Linear without a bias; the same numbers, by faster kernels where bf16 has none (see `kernel_dtype`)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T. Shapes: [..., in_features] -> [..., out_features]."""
        dtype = kernel_dtype(x)
        if dtype == x.dtype:
            return F.linear(x, self.weight)
        return _CastLinear.apply(x, self.weight, dtype)
