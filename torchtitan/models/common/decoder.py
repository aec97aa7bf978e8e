"""The pre-norm decoder that the model families share.

Letters: B batch, S sequence, D model, V vocabulary, E head dim.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from torchtitan.attention.masks import PLAIN, AttentionMasks, MaskKind
from torchtitan.attention.plan import whole_masks
from torchtitan.errors import TitanError
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

    def forward(self, x: torch.Tensor, turn: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """Return the block's output: [B, S, D] with rotations [B, 1, S, E/2] -> [B, S, D]; no mask: plain causal."""
        x = x + self.attention(self.attention_norm(x), turn, mask)
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
        self.layer_kinds = tuple(block.attention.kind for block in blocks)
        if tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def get_attention_masks(
        self, document_starts: torch.Tensor | None, positions: torch.Tensor
    ) -> AttentionMasks | None:
        """Return what `forward` needs to attend as the model and the documents say; None: plain causal everywhere.

        `document_starts` int [B, S]: in its row, the first token of each token's document; None: a row is a document.
        `positions` int [B, S]: in the document. Both are of whole sequences.
        """
        return whole_masks(document_starts, positions, self.layer_kinds)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, masks: AttentionMasks | None = None
    ) -> torch.Tensor:
        """Return hidden states: int [B, S], int [B, S] -> [B, S, D].

        Raises:
            TitanError: some layers have a window or chunks, and there are no masks.
        """
        if masks is None and set(self.layer_kinds) != {PLAIN}:
            raise TitanError("the model has layers with a window or chunks: give it what get_attention_masks returns")
        x = self.tok_embeddings(tokens)
        turn = rotation(positions, self.frequencies(positions.device))
        prepared: dict[MaskKind, Any] = {}
        for block, kind in zip(self.layers.values(), self.layer_kinds, strict=True):
            if masks is not None and kind not in prepared:
                inner = cast(TransformerBlock, block).attention.inner_attention
                prepared[kind] = inner.prepare(masks.layers[kind], x.device)
            x = block(x, turn, prepared[kind]) if prepared else block(x, turn)
        return self.norm(x)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, masks: AttentionMasks | None = None
    ) -> torch.Tensor:
        """Return logits [B, S, V], for tests and generation."""
        return self.output(self(tokens, positions, masks))
