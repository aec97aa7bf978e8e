"""torch.compile, block by block."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.decorators import mark_unbacked

from torchtitan.attention.masks import LayerMask
from torchtitan.distributed.context_parallel import cp_compile_scope


def apply_compile(blocks: Iterable[nn.Module], backend: str) -> None:
    """Compile the forward of each block in place; blocks of the same shape share one graph.

    The forward is compiled instead of the module, so that names stay, and what FSDP does around it is not traced.
    """
    # By default a graph is taken for right without a look at a module's hooks: a block with context parallelism and one
    # without, of the same shapes, would run the same graph, and one of them would be wrong.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    for block in blocks:
        compiled = torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)
        block.forward = _within_scope(block, compiled)


def _within_scope(block: nn.Module, compiled: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, *args: Any) -> torch.Tensor:
        for mask in args:
            if isinstance(mask, LayerMask):
                _let_lengths_vary(mask)
        with cp_compile_scope(block, x.dtype):
            return compiled(x, *args)

    return forward


def _let_lengths_vary(mask: LayerMask) -> None:
    """Have one graph serve every batch: how long the tables are depends on its documents."""
    for name, dim in (("pieces", 0), ("take", 1), ("slots", 0), ("send", 0)):
        table = getattr(mask, name)
        if table.ndim > dim:
            mark_unbacked(table, dim)
