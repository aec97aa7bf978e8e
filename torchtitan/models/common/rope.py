"""Rotary position embedding by explicit positions.

Angles are computed from the positions in each forward, once for all layers: there is no table, so nothing has to be
sharded and nothing limits the length. Source: arXiv:2104.09864, section 3.4; the frequency scaling is that of
Llama 3.1 (arXiv:2407.21783, section 3.2 and its released configuration).
Letters: B batch, S sequence, H heads, E head dim.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RoPEScaling:
    """Llama 3.1's scaling: wavelengths above `original_context_length / low_freq_factor` are stretched by `factor`."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


def inverse_frequencies(head_dim: int, theta: float, scaling: RoPEScaling | None, device: torch.device) -> torch.Tensor:
    """Return the angle per position of each pair of dims: fp32 [E/2], radians."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    return frequencies if scaling is None else _scale(frequencies, scaling)


def _scale(frequencies: torch.Tensor, scaling: RoPEScaling) -> torch.Tensor:
    turns = scaling.original_context_length * frequencies / (2 * math.pi)  # in the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: stretched, 1: as it was, between: a blend
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Return the unit rotations exp(i * position * frequency): int [B, S], fp32 [E/2] -> complex64 [B, 1, S, E/2]."""
    angles = positions.unsqueeze(-1).float() * frequencies  # [B, S, E/2]
    return torch.polar(torch.ones_like(angles), angles).unsqueeze(1)


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of dims: [B, H, S, E] by complex [B, 1, S, E/2], computed in fp32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))  # [B, H, S, E/2]
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
