"""How much of attention this rank computes, from the shapes at the kernels' calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_KERNELS = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
# Where is_causal stands among the arguments of a kernel that torch's SDPA calls.
_CAUSAL_POSITION = {"_scaled_dot_product_efficient_attention": 6, "_scaled_dot_product_cudnn_attention": 6}


@dataclass
class AttentionWork:
    """Query-key pairs of forward calls, over all heads and sequences; a causal block counts its lower triangle."""

    pairs: int = 0


_counting: list[AttentionWork] = []  # of the counts in progress: nothing but what is counted depends on it


def record_pairs(batch_and_heads: int, queries: int, start: int, window: int) -> None:
    """Count queries that start at key `start` and attend to all up to their own, or the last `window` (0: all)."""
    for work in _counting:
        work.pairs += batch_and_heads * (_pairs(start + queries, window) - _pairs(start, window))


def _pairs(queries: int, window: int) -> int:
    """Return the pairs of the first `queries` queries."""
    within = min(queries, window) if window else queries
    return within * (within + 1) // 2 + (queries - within) * window


@contextmanager
def count_attention_work() -> Iterator[AttentionWork]:
    """Count the work of attention within, whatever the method."""
    work = AttentionWork()
    _counting.append(work)
    try:
        with _KernelCalls(work):
            yield work
    finally:
        _counting.remove(work)


class _KernelCalls(TorchDispatchMode):
    """Counts what torch's own ring and plain SDPA call; the gather's operator is opaque and records for itself."""

    def __init__(self, work: AttentionWork) -> None:
        super().__init__()
        self.work = work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the DTensor unwraps itself, and what it then calls comes here
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(_KERNELS) and not name.endswith("backward"):
            position = _CAUSAL_POSITION.get(name, 4)
            causal = (kwargs or {}).get("is_causal", args[position] if len(args) > position else False)
            (batch, heads, queries, _), keys = args[0].shape, args[1].size(2)
            pairs = queries * (queries + 1) // 2 if causal else queries * keys
            self.work.pairs += batch * heads * pairs
        return func(*args, **(kwargs or {}))
