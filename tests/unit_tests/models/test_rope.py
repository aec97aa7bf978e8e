"""Rotary frequencies and rotations, at the sizes and positions of the real models."""

import math

import pytest
import torch

from tests.helpers.transformers_llama import rope_parameters
from torchtitan.models.common.rope import RoPEScaling, inverse_frequencies, rotate, rotation
from torchtitan.models.llama3.args import FLAVORS

_CPU = torch.device("cpu")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_frequencies_of_every_flavor_equal_transformers(flavor: str) -> None:
    """Llama 3.1's factor 8 and 3.2's factor 32, over the original 8,192 positions."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    args = FLAVORS[flavor]
    config = LlamaConfig(
        hidden_size=args.dim,
        num_attention_heads=args.num_heads,
        head_dim=args.width_per_head,
        max_position_embeddings=args.context_length,
        rope_parameters=rope_parameters(args),
    )
    ours = inverse_frequencies(args.width_per_head, args.rope_theta, args.rope_scaling, _CPU)
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0.0)


def test_scaling_stretches_the_long_waves_and_keeps_the_short() -> None:
    plain = inverse_frequencies(128, 500000.0, None, _CPU)
    scaled = inverse_frequencies(128, 500000.0, RoPEScaling(factor=8.0), _CPU)
    turns = 8192 * plain / (2 * math.pi)  # of each pair in the original context
    assert torch.equal(scaled[turns > 4.0], plain[turns > 4.0])
    assert torch.allclose(scaled[turns < 1.0], plain[turns < 1.0] / 8, rtol=1e-6, atol=0.0)
    between = (turns > 1.0) & (turns < 4.0)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotation_by_the_definition_up_to_the_last_position(dtype: torch.dtype) -> None:
    """Breaks when angles are computed in bf16: position 131,071 would be 256 off."""
    frequencies = inverse_frequencies(8, 500000.0, None, _CPU)
    positions = torch.tensor([[0, 1, 8191, 131071]], dtype=torch.int32)
    x = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual = rotate(x, rotation(positions, frequencies))
    angles = positions[0, :, None].double() * frequencies.double()  # [S, E/2]
    cos, sin = angles.cos(), angles.sin()
    even, odd = x.double()[..., 0::2], x.double()[..., 1::2]
    expected = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    assert actual.dtype == dtype
    # fp32 angles of 1.3e5 are exact to 2^-7 at worst; bf16 rounds the result once more.
    assert float((actual.double() - expected).abs().max()) < (0.04 if dtype == torch.bfloat16 else 0.02)
    near = slice(0, 2)
    if dtype != torch.bfloat16:
        assert float((actual.double() - expected)[:, :, near].abs().max()) < 1e-6


def test_rotations_keep_lengths_and_follow_each_rows_own_positions() -> None:
    frequencies = inverse_frequencies(8, 10000.0, None, _CPU)
    x = torch.randn(1, 3, 5, 8, generator=torch.Generator().manual_seed(0)).expand(2, -1, -1, -1)
    positions = torch.stack([torch.arange(5), torch.arange(5) + 7]).int()
    turned = rotate(x, rotation(positions, frequencies))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-6)
    alone = rotate(x[1:], rotation(positions[1:], frequencies))
    assert torch.equal(turned[1:], alone) and not torch.allclose(turned[0], turned[1])
