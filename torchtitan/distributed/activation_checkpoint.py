"""Recompute a block's activations in the backward instead of keeping them."""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_full_activation_checkpoint(blocks: Iterable[nn.Module]) -> None:
    """Keep only the inputs of each block, in place.

    The forward is wrapped instead of the module, so that parameter names stay those of the checkpoints.
    """
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
