"""The pre-norm decoder that the model families share.

Letters: B batch, S sequence, D model, V vocabulary, E head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchtitan.models.common.attention import Attention
from torchtitan.models.common.embedding import Embedding
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.norm import RMSNorm
from torchtitan.models.common.rope import rotation

Project = Callable[[torch.Tensor, torch.Tensor], Any]


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, dim: int, norm_eps: float, attention: Attention, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dim, eps=norm_eps)
        self.attention = attention
        self.ffn_norm = RMSNorm(dim, eps=norm_eps)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
        """Return the block's output: [B, S, D] with rotations [B, 1, S, E/2] -> [B, S, D]."""
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.ffn_norm(x))


class OutputHead(Linear):
    """The output projection; called by the loss, so that no full logits need exist."""

    def forward(self, hidden: torch.Tensor, project: Project | None = None) -> Any:
        """Return the logits [B, S, V] of hidden [B, S, D], or what `project(hidden, weight)` makes of them."""
        return super().forward(hidden) if project is None else project(hidden, self.weight)


class Decoder(nn.Module):
    """Token embedding, blocks and final norm; the head is apart (see `OutputHead`)."""

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        norm_eps: float,
        blocks: list[TransformerBlock],
        frequencies: Callable[[torch.device], torch.Tensor],
        tie_embeddings: bool,
    ) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(vocab_size, dim)
        self.layers = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.output = OutputHead(dim, vocab_size)
        self.frequencies = frequencies
        if tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return hidden states: int [B, S], int [B, S] -> [B, S, D]."""
        x = self.tok_embeddings(tokens)
        turn = rotation(positions, self.frequencies(positions.device))
        for block in self.layers.values():
            x = block(x, turn)
        return self.norm(x)

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits [B, S, V], for tests and generation."""
        return self.output(self(tokens, positions))
