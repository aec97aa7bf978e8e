"""Cross-entropy as a sum over tokens, fused with the output projection. Letters: T tokens, D model, V vocabulary."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.batch import IGNORED_LABEL
from torchtitan.models.common.decoder import OutputHead
from torchtitan.tools.device import kernel_dtype


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of hidden @ weight.T, chunk by chunk; the gradients are made along with the loss.

    Logits exist for one chunk at a time and are never recomputed. Softmax, sum and gradients are at least fp32, and
    are rounded to the operands' dtype once, after they were scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int, needs_grad: bool
    ) -> torch.Tensor:
        operand = kernel_dtype(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        kernel_weight = weight.to(operand)
        grad_hidden = torch.empty(hidden.shape if needs_grad else (0,), dtype=wide, device=hidden.device)
        grad_weight = torch.zeros(weight.shape if needs_grad else (0,), dtype=wide, device=hidden.device)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.size(0), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk, chunk_labels = hidden[rows].to(operand), labels[rows]
            log_p = F.log_softmax((chunk @ kernel_weight.T).to(wide), dim=-1)  # [T, V]
            valid = chunk_labels != IGNORED_LABEL  # [T]
            cells = torch.arange(len(valid), device=valid.device), chunk_labels.masked_fill(~valid, 0)
            total -= log_p[cells].masked_fill(~valid, 0.0).sum(dtype=torch.float64)
            if needs_grad:
                grad_logits = log_p.exp_()  # p - onehot, in place; rows without a label are 0
                grad_logits[cells] -= 1.0
                grad_logits = grad_logits.mul_(valid.unsqueeze(-1)).to(operand)
                grad_hidden[rows] = grad_logits @ kernel_weight
                grad_weight += grad_logits.T @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grad.to(grad_hidden.dtype)
        return (grad_hidden * scale).to(hidden_dtype), (grad_weight * scale).to(weight_dtype), None, None, None


def _project(hidden: torch.Tensor, weight: torch.Tensor, *, labels: torch.Tensor, chunk_tokens: int) -> torch.Tensor:
    rows = hidden.flatten(0, -2)
    needs_grad = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(rows, weight, labels.flatten(), chunk_tokens or max(1, rows.size(0)), needs_grad)


class ChunkedCrossEntropy:
    """The loss; the caller divides its sum by the number of valid tokens of the whole step."""

    def __init__(self, chunk_tokens: int) -> None:
        """Make at most `chunk_tokens` rows of logits at a time; 0 makes all at once."""
        self.chunk_tokens = chunk_tokens

    def __call__(self, head: OutputHead, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the sum of the valid tokens' losses as an fp64 scalar: [B, S, D], int [B, S] -> []."""
        return head(hidden, partial(_project, labels=labels, chunk_tokens=self.chunk_tokens))
