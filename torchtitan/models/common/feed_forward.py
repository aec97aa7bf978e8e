"""SwiGLU. Source: arXiv:2002.05202. Letters: D model, F hidden."""

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.common.linear import Linear


class FeedForward(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim)
        self.w3 = Linear(dim, hidden_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output: [..., D] -> [..., D]."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
