"""What a model publishes about how it may be split: data, applied by `parallelize`."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from torchtitan.attention.masks import LayerMask


class InnerAttention(nn.Module):
    """Base of what context parallelism hooks: q, k, v [B, H, S, E] and a mask or None in, one output out.

    Without a mask it is causal, and calls torch's SDPA where the ring is to hook it.
    """

    # Whether forward picks the dtype of its kernel. Under context parallelism the method picks it, block by block, so
    # that K and V travel in their own dtype.
    chooses_kernel_dtype = True

    def prepare(self, mask: LayerMask, device: torch.device) -> Any:
        """Return the mask as this module's kernel takes it; called once for all layers of a kind, never compiled."""
        return mask


def standard_attention(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark an inner attention's forward: softmax(q k^T / sqrt(E)) v under the causal mask and nothing else.

    It takes q, k, v, and a prepared `LayerMask` or None. A method may then compute that in its place. One that
    overrides a marked forward is not marked.
    """
    forward.is_standard_attention = True  # type: ignore[attr-defined]
    return forward


def is_standard_attention(module: nn.Module) -> bool:
    """Return whether the forward that the module has now is marked so."""
    return getattr(module.forward, "is_standard_attention", False)


@dataclass(frozen=True)
class ParallelPlan:
    """Names of modules; `*` stands for one name, so `layers.*` is every block."""

    blocks: str  # units of activation checkpointing
    attention: str  # inner attention modules, [B, H, S, E] in and out, that context parallelism hooks
    fsdp_units: tuple[str, ...]  # each gathers its parameters at once; the rest belongs to the root
    kept_gathered: tuple[str, ...] = ()  # units that are used again right after the forward, so not resharded


def find_modules(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the modules that a plan's pattern names, in the model's order."""
    depth = pattern.count(".")
    return [
        (name, module)
        for name, module in model.named_modules()
        if name.count(".") == depth and fnmatchcase(name, pattern)
    ]
