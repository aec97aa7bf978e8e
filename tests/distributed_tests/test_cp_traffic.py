"""Every option takes its own path: collectives, bytes and work are counted and compared with closed forms."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Case, build_split_model, local_batch
from torchtitan.distributed.context_parallel import apply_cp
from torchtitan.models.common.attention import ScaledDotProductAttention


def _counted(case: Case) -> dict[str, int]:
    model, dims = build_split_model(case)
    batch = local_batch(case, dims)
    model(batch.inputs, batch.positions)  # FSDP's own first-time calls
    counts = {}
    block = model.layers["0"].attention.inner_attention
    q, k, v = (torch.randn(1, heads, case.seq_len // case.cp, 8, requires_grad=True) for heads in (8, 2, 2))
    with CommDebugMode() as forward:
        out = block(q, k, v)
    with CommDebugMode() as backward:
        out.sum().backward()
    for phase, mode in (("forward", forward), ("backward", backward)):
        for op, count in mode.get_comm_counts().items():
            counts[f"{phase} {str(op).rpartition('.')[2]}"] = count
    return counts


def test_each_rotate_method_makes_its_own_collectives() -> None:
    """cp 4: one gather of K and V, or three hops; the gradients of K and V always travel by hops, one more to home."""
    gathered, rotated = (
        run_ranks(4, _counted, Case(cp=4, rotate_method=method))[0] for method in ("allgather", "alltoall")
    )
    assert gathered == {
        "forward all_gather_into_tensor": 1,
        "backward all_gather_into_tensor": 1,
        "backward all_to_all_single": 4,
    }
    assert rotated == {"forward all_to_all_single": 3, "backward all_to_all_single": 3 + 4}


class _Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the DTensor unwraps itself, and what it then calls comes here
        name = func._schema.name
        if name.startswith("_c10d_functional::all_gather"):
            self.bytes += args[0].nbytes * (dist.get_world_size() - 1)
        elif name.startswith("_c10d_functional::all_to_all"):
            rows = [count for rank, count in enumerate(args[2]) if rank != dist.get_rank()]
            self.bytes += sum(rows) * args[0][0].nbytes
        elif "c10d" in name and any(word in name for word in ("reduce", "broadcast", "scatter", "gather", "all")):
            raise AssertionError(f"the test does not know how much {name} sends")
        return func(*args, **(kwargs or {}))


def _sent(options: list[tuple[torch.dtype, str, str]]) -> list[tuple[int, int]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = []
    for dtype, rotate_method, load_balancer in options:
        module = ScaledDotProductAttention()
        apply_cp([module], mesh, seq_len=64, rotate_method=rotate_method, load_balancer=load_balancer)
        local = 64 // dist.get_world_size()
        qkv = [torch.randn(3, heads, local, 16).to(dtype).requires_grad_() for heads in (8, 2, 2)]
        with _Sent() as forward:
            out = module(*qkv)
        with _Sent() as backward:
            out.sum().backward()
        results.append((forward.bytes, backward.bytes))
    return results


@pytest.mark.parametrize("cp", [2, 4])
def test_keys_and_values_travel_ungrouped_in_their_own_dtype(cp: int) -> None:
    """Closed forms: (P-1) n 2 Hkv E b forward, the same and P n 2 Hkv E x 4 bytes of dK and dV backward.

    Breaks when K and V are expanded to all heads (4 times as much) or cast before they travel (twice).
    """
    dtypes = {torch.bfloat16: 4, torch.float32: 4, torch.float64: 8}  # and bytes of what gradients are summed in
    options = [
        (dtype, rotate, lb) for dtype in dtypes for rotate, lb in (("allgather", "headtail"), ("alltoall", "none"))
    ]
    elements = 3 * (64 // cp) * 2 * 2 * 16  # batch, tokens, K and V, heads, head dim
    for rank in run_ranks(cp, _sent, options):
        for (dtype, rotate, _), (forward, backward) in zip(options, rank, strict=True):
            key_values = (cp - 1) * elements * dtype.itemsize
            assert forward == key_values, (dtype, rotate)
            assert backward == key_values + cp * elements * dtypes[dtype], (dtype, rotate)


def _attended_rows(case: Case) -> int:
    """Count the query rows times key columns that this rank's kernels are called with."""
    from torchtitan.distributed.cp import torch_private

    pairs = []
    original = torch_private._flash_forward

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        causal = query.size(2) * (query.size(2) + 1) // 2
        pairs.append(causal if kwargs["is_causal"] else query.size(2) * key.size(2))
        return original(query, key, value, **kwargs)

    torch_private._flash_forward = counted
    model, dims = build_split_model(case)
    batch = local_batch(case, dims)
    model(batch.inputs, batch.positions)
    return sum(pairs) // len(model.layers)


def test_head_tail_gives_every_rank_equal_work() -> None:
    """Closed form: exactly 1 with head-tail, up to 2 - 1/P contiguous."""
    whole = 64 * 65 // 2
    balanced = run_ranks(4, _attended_rows, Case(cp=4))
    assert sum(balanced) == whole and len(set(balanced)) == 1
    contiguous = run_ranks(4, _attended_rows, Case(cp=4, load_balancer="none"))
    assert sum(contiguous) == whole
    assert contiguous == sorted(contiguous) and contiguous[-1] / (whole / 4) == pytest.approx(2 - 1 / 4, rel=0.02)
