"""Llama 3 on one device. Source: arXiv:2407.21783, section 3.2."""

from functools import partial

from torchtitan.attention.masks import MaskKind
from torchtitan.models.common.attention import Attention
from torchtitan.models.common.decoder import Decoder, TransformerBlock
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.rope import inverse_frequencies
from torchtitan.models.llama3.args import Llama3Args


def build_llama3(args: Llama3Args, attn_type: str = "sdpa") -> Decoder:
    """Return a Llama 3 with uninitialised weights, on the current default device."""
    frequencies = partial(inverse_frequencies, args.width_per_head, args.rope_theta, args.rope_scaling)
    blocks = [_block(args, attn_type, kind) for kind in args.layer_kinds]
    return Decoder(args.vocab_size, args.dim, args.norm_eps, blocks, frequencies, args.tie_embeddings)


def _block(args: Llama3Args, attn_type: str, kind: MaskKind) -> TransformerBlock:
    attention = Attention(args.dim, args.num_heads, args.num_kv_heads, args.width_per_head, attn_type, kind)
    return TransformerBlock(args.dim, args.norm_eps, attention, FeedForward(args.dim, args.hidden_dim))
