"""The token embedding. Letters: D model, V vocabulary."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class _WideSumEmbedding(torch.autograd.Function):
    """A lookup whose gradient is summed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens)
        ctx.num_rows, ctx.dtype = weight.size(0), weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(ctx.num_rows, grad.size(-1), dtype=torch.float32, device=grad.device)
        total.index_add_(0, tokens.flatten(), grad.flatten(0, -2).float())
        return None, total.to(ctx.dtype)


class Embedding(nn.Embedding):
    """torch's module, with a right gradient in bf16 on a CPU.

    torch's CPU kernel adds the tokens of a row one by one in bf16, where a sum stops growing once it is 256 times a
    term: the gradient of a frequent token is 15 % off at 2,048 tokens. Its CUDA kernel sums in fp32.
    """

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight: int [..] -> [.., D]."""
        if self.weight.dtype == torch.bfloat16 and tokens.device.type == "cpu":
            return _WideSumEmbedding.apply(tokens, self.weight)
        return F.embedding(tokens, self.weight)
