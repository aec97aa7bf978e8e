"""Cross-entropy as a sum over tokens, fused with the output projection. Letters: T tokens, D model, V vocabulary."""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan.batch import IGNORED_LABEL
from torchtitan.models.common.decoder import OutputHead
from torchtitan.tools.device import kernel_dtype

# Tokens of a chunk whose logits a CPU keeps in its cache; a GPU needs more of them to be busy.
_AUTO_CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}
UNITS_PER_LOSS = 2**32
_LARGEST_EXACT = 2.0**20  # of one token's loss, so that 2^11 tokens and more fit into int64; real ones are below 2^5


@dataclass(frozen=True)
class LossSum:
    """The summed loss of valid tokens, twice: as an ordinary sum, and as one whose bits no order can change."""

    total: torch.Tensor  # fp64 []; the backward starts here
    units: torch.Tensor  # int64 []: multiples of 1 / UNITS_PER_LOSS, each token's loss rounded to one
    inexact_tokens: torch.Tensor  # int64 []: tokens left out of `units`, as their loss is not finite or above 2^20
    token_losses: torch.Tensor  # fp32 at least [T], without a gradient; 0 where there is no label

    def row(self, *counts: torch.Tensor | int) -> torch.Tensor:
        """Return the sum and further counts as one int64 row, for a collective."""
        bits = self.total.detach().view(torch.int64)
        further = [torch.as_tensor(count, device=bits.device) for count in counts]
        return torch.stack([bits, self.units, self.inexact_tokens, *further])

    def __add__(self, other: "LossSum") -> "LossSum":
        """Return the sum over the tokens of both."""
        token_losses = torch.cat([self.token_losses, other.token_losses])
        inexact_tokens = self.inexact_tokens + other.inexact_tokens
        return LossSum(self.total + other.total, self.units + other.units, inexact_tokens, token_losses)


def mean_loss(rows: torch.Tensor, num_tokens: int) -> float:
    """Return the loss per token of the ranks' rows [ranks, 3 or more] (`LossSum.row`): exact, unless a token's is not.

    A sum of int64 and one division: the same bits however the tokens lie on ranks and microbatches.
    """
    if rows[:, 2].any():
        return float(rows[:, 0].contiguous().view(torch.float64).sum()) / num_tokens
    return int(rows[:, 1].sum()) / (UNITS_PER_LOSS * num_tokens)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of hidden @ weight.T, chunk by chunk; the gradients are made along with the loss.

    Logits exist for one chunk at a time and are never recomputed. Softmax, sum and gradients are at least fp32, and
    are rounded to the operands' dtype once, after they were scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_tokens: int, needs_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        operand = kernel_dtype(hidden)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        kernel_weight = weight.to(operand)
        grad_hidden = torch.empty(hidden.shape if needs_grad else (0,), dtype=wide, device=hidden.device)
        grad_weight = torch.zeros(weight.shape if needs_grad else (0,), dtype=wide, device=hidden.device)
        token_losses = torch.empty(hidden.size(0), dtype=wide, device=hidden.device)
        for rows in _even_chunks(hidden.size(0), chunk_tokens):
            chunk, chunk_labels = hidden[rows].to(operand), labels[rows]
            log_p = F.log_softmax((chunk @ kernel_weight.T).to(wide), dim=-1)  # [T, V]
            valid = chunk_labels != IGNORED_LABEL  # [T]
            cells = torch.arange(len(valid), device=valid.device), chunk_labels.masked_fill(~valid, 0)
            token_losses[rows] = (-log_p[cells]).masked_fill_(~valid, 0.0)
            if needs_grad:
                grad_logits = log_p.exp_()  # p - onehot, in place; rows without a label are 0
                grad_logits[cells] -= 1.0
                grad_logits = grad_logits.mul_(valid.unsqueeze(-1)).to(operand)
                grad_hidden[rows] = grad_logits @ kernel_weight
                grad_weight += grad_logits.T @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        units, inexact_tokens = _exact_sum(token_losses)
        ctx.mark_non_differentiable(units, inexact_tokens, token_losses)
        return token_losses.sum(dtype=torch.float64), units, inexact_tokens, token_losses

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grad.to(grad_hidden.dtype)
        return (grad_hidden * scale).to(hidden_dtype), (grad_weight * scale).to(weight_dtype), None, None, None


def _even_chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    """Cut rows in chunks of nearly equal size: a kernel may round a chunk of few rows in another way."""
    count = -(-num_rows // chunk_rows) if chunk_rows else 1
    edges = [num_rows * index // max(1, count) for index in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(edges) if end > start]


def _exact_sum(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = token_losses.abs() <= _LARGEST_EXACT  # false for NaN
    scaled = torch.where(exact, token_losses, 0.0).double() * UNITS_PER_LOSS
    return scaled.round().to(torch.int64).sum(), (~exact).sum()


def _project(
    hidden: torch.Tensor, weight: torch.Tensor, *, labels: torch.Tensor, chunk_tokens: int
) -> tuple[torch.Tensor, ...]:
    rows = hidden.flatten(0, -2)
    needs_grad = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    return _LinearCrossEntropy.apply(rows, weight, labels.flatten(), chunk_tokens, needs_grad)


class ChunkedCrossEntropy:
    """The loss; the caller divides its sum by the number of valid tokens of the whole step."""

    def __init__(self, chunk_tokens: int | str) -> None:
        """Make at most `chunk_tokens` rows of logits at a time; 0 makes all at once, "auto" what suits the device."""
        self.chunk_tokens = chunk_tokens

    def __call__(self, head: OutputHead, hidden: torch.Tensor, labels: torch.Tensor) -> LossSum:
        """Return the sum of the valid tokens' losses: [B, S, D], int [B, S] -> []."""
        chunk_tokens = self.chunk_tokens
        if isinstance(chunk_tokens, str):
            chunk_tokens = _AUTO_CHUNK_TOKENS[hidden.device.type]
        return LossSum(*head(hidden, partial(_project, labels=labels, chunk_tokens=chunk_tokens)))
