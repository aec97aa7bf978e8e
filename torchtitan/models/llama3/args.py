"""Llama 3's arguments and flavours. Source of the sizes: arXiv:2407.21783, table 3, and the released configurations."""

from dataclasses import dataclass, replace

from torchtitan.attention.masks import MaskKind, layer_kinds
from torchtitan.models.common.flops import decoder_flops
from torchtitan.models.common.rope import RoPEScaling


@dataclass(frozen=True)
class Llama3Args:
    """The shape of one Llama 3 model."""

    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    vocab_size: int = 128256  # 0: the tokenizer's
    head_dim: int = 0  # 0: dim / num_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: RoPEScaling | None = None
    tie_embeddings: bool = False
    context_length: int = 131072  # tokens
    window: int = 0  # tokens that a layer attends to; 0: no limit
    chunk: int = 0  # tokens of a chunk that attention does not leave; 0: none
    full_attention_every: int = 0  # every so many layers one has neither; 0: none

    @property
    def width_per_head(self) -> int:
        """Return the head dim E."""
        return self.head_dim or self.dim // self.num_heads

    def with_vocab_size(self, vocab_size: int) -> "Llama3Args":
        """Return the same model with another vocabulary."""
        return replace(self, vocab_size=vocab_size)

    def with_attention(self, *, window: int, chunk: int, full_attention_every: int) -> "Llama3Args":
        """Return the same model with other masks."""
        return replace(self, window=window, chunk=chunk, full_attention_every=full_attention_every)

    @property
    def layer_kinds(self) -> tuple[MaskKind, ...]:
        """Return how far the queries of each layer see back."""
        return layer_kinds(self.num_layers, MaskKind(self.window, self.chunk), self.full_attention_every)

    def flops(self, tokens: int, pairs: int) -> float:
        """Return model FLOPs of forward and backward, for query-key pairs summed over the layers."""
        attention = self.dim * self.width_per_head * 2 * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.dim * self.hidden_dim
        matrices = self.num_layers * (attention + feed_forward) + self.dim * self.vocab_size
        return decoder_flops(matrices, self.num_heads * self.width_per_head, tokens, pairs)


def _scaling(factor: float) -> RoPEScaling:
    return RoPEScaling(factor=factor)


FLAVORS = {
    "debugmodel": Llama3Args(dim=256, num_layers=6, num_heads=8, num_kv_heads=2, hidden_dim=512, vocab_size=0),
    "1B": Llama3Args(2048, 16, 32, 8, 8192, rope_scaling=_scaling(32.0), tie_embeddings=True),
    "3B": Llama3Args(3072, 28, 24, 8, 8192, rope_scaling=_scaling(32.0), tie_embeddings=True),
    "8B": Llama3Args(4096, 32, 32, 8, 14336, rope_scaling=_scaling(8.0)),
    "70B": Llama3Args(8192, 80, 64, 8, 28672, rope_scaling=_scaling(8.0)),
    "405B": Llama3Args(16384, 126, 128, 8, 53248, rope_scaling=_scaling(8.0)),
}
