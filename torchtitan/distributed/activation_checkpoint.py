"""Recompute activations in the backward instead of keeping them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from torchtitan.attention.pieces import PIECEWISE_OP
from torchtitan.distributed.cp.gather import GATHER_OP
from torchtitan.distributed.cp.ulysses import EXCHANGE_OP

_aten = torch.ops.aten
# What mode "op" keeps: attention, which costs most to compute again, and what would have to travel again.
_KEPT_OPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    PIECEWISE_OP,
    GATHER_OP,
    EXCHANGE_OP,
}
_MATRIX_PRODUCTS = {_aten.mm.default, _aten.linear.default}


def apply_activation_checkpoint(blocks: Sequence[nn.Module], mode: str, selective_option: str) -> int:
    """Checkpoint blocks in place, as `mode` says; returns how many.

    `full` keeps a block's inputs only. `selective` keeps, with option "op", attention and every second matrix product
    of each block; with a number N it is full for every N-th block. The forward is wrapped instead of the module, so
    that parameter names stay those of the checkpoints.
    """
    if mode == "none":
        return 0
    if mode == "selective" and selective_option == "op":
        contexts: Callable[[], Any] | None = _selective_contexts
        chosen = list(blocks)
    else:
        contexts, every = None, 1 if mode == "full" else int(selective_option)
        chosen = [block for index, block in enumerate(blocks) if index % every == 0]
    for block in chosen:
        block.forward = _checkpointed(block.forward, contexts)
    return len(chosen)


def _checkpointed(forward: Callable[..., Any], contexts: Callable[[], Any] | None) -> Callable[..., Any]:
    extra: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}

    def checkpointed_forward(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **extra)

    return checkpointed_forward


def _selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, {True: 0, False: 0}))


def _policy(products: dict[bool, int], ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if func in _MATRIX_PRODUCTS:
        products[ctx.is_recompute] += 1  # of the forward and of its repetition, which are in the same order
        keep = products[ctx.is_recompute] % 2 == 1
    else:
        keep = func in _KEPT_OPS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
