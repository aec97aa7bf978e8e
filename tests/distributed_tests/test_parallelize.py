"""What splitting a model does beside keeping its numbers: every option of `parallelize` acts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CPU, Case, build_model, build_split_model, local_batch
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.distributed.cp import torch_private
from torchtitan.distributed.determinism import set_determinism
from torchtitan.distributed.parallel_dims import build_parallel_dims
from torchtitan.distributed.process_group import is_lost_peer
from torchtitan.runner import SingleStageRunner


def _kernel_calls(cases: list[Case]) -> list[int]:
    """Count the forward calls of the attention kernel in one forward and backward."""
    calls = []
    original = torch_private._flash_forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[-1] += 1
        return original(*args, **kwargs)

    torch_private._flash_forward = counted
    for case in cases:
        calls.append(0)
        model, dims = build_split_model(case)
        SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(local_batch(case, dims), 128)
    return calls


def test_activation_checkpointing_recomputes_each_block_once() -> None:
    """Breaks when the option is ignored, which no comparison of gradients can see."""
    for kept, recomputed in run_ranks(2, _kernel_calls, [Case(cp=2), Case(cp=2, activation_checkpoint="full")]):
        assert kept > 0 and recomputed == 2 * kept


class _ReducedDtypes(TorchDispatchMode):
    """Collects the dtypes that reduce-scatters sum in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if "reduce_scatter" in func._schema.name:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def _precision(cases: list[Case]) -> list[tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype]]]:
    results = []
    for case in cases:
        model, dims = build_split_model(case)
        seen: set[torch.dtype] = set()
        model.layers["0"].register_forward_hook(lambda module, args, out, seen=seen: seen.add(out.dtype))
        with _ReducedDtypes() as reduced:
            SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(local_batch(case, dims), 128)
        results.append((seen, reduced.dtypes, {parameter.grad.dtype for parameter in model.parameters()}))
    return results


def test_blocks_compute_in_one_dtype_and_gradients_are_summed_in_another() -> None:
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    cases = [Case(dp=2, compute_dtype=bf16), Case(dp=2), Case(dp=2, dtype=fp64), Case(dp=2, dtype=bf16)]
    expected = [({bf16}, {fp32}, {fp32}), ({fp32},) * 3, ({fp64},) * 3, ({bf16},) * 3]
    for rank in run_ranks(2, _precision, cases):
        assert rank == expected


def _gathered_after_forward(case: Case) -> dict[str, bool]:
    model, dims = build_split_model(case)
    SingleStageRunner(model, ChunkedCrossEntropy(0)).forward(local_batch(case, dims))
    return {name: not isinstance(parameter, DTensor) for name, parameter in model.named_parameters()}


def test_blocks_free_what_they_gathered_and_the_head_keeps_it() -> None:
    """The head is used again first thing in the backward; blocks kept gathered would cost the memory of all layers."""
    for gathered in run_ranks(2, _gathered_after_forward, Case(dp=2)):
        assert gathered["output.weight"]
        assert not any(kept for name, kept in gathered.items() if name.startswith(("layers.", "tok_embeddings.")))


def _names(cases: list[Case]) -> list[list[str]]:
    return [[name for name, _ in build_split_model(case)[0].named_parameters()] for case in cases]


def test_splitting_keeps_the_names_of_parameters() -> None:
    """Breaks with wrappers that put their own name in between: every checkpoint would break."""
    expected = [name for name, _ in build_model(Case()).named_parameters()]
    for names in run_ranks(2, _names, [Case(dp=2), Case(cp=2), Case(cp=2, activation_checkpoint="full")])[0]:
        assert names == expected


def _axes() -> tuple[int, int, list[int], list[int], str]:
    dims = build_parallel_dims(CPU, dp_shard=2, cp=2)
    table = dims.table(global_batch_size=12, local_batch_size=2, seq_len=4096)
    return dims.dp_rank, dims.cp_rank, dims.cp_mesh.mesh.tolist(), dims.fsdp_mesh.mesh.tolist(), table


def test_ranks_of_a_cp_group_are_neighbours() -> None:
    """Breaks when the axes change places: cp traffic would leave the node first."""
    ranks = run_ranks(4, _axes)
    assert [rank[:2] for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank[2] for rank in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert all(rank[3] == [0, 1, 2, 3] for rank in ranks)
    assert ranks[0][4].splitlines() == [
        "  ranks            4 = dp_shard 2 x cp 2",
        "  global batch     12 sequences = 2 dp ranks x 2 x 3 microbatches",
        "  tokens per step  49,152 = 12 x seq_len 4,096",
        "  tokens per rank  4,096 of a microbatch (seq_len / cp = 2,048)",
        "  mesh cp          2 ranks: each sequence is cut over them",
        "  mesh fsdp        4 ranks: parameters are sharded over them",
    ]


def _after_a_peer_left() -> bool:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        return True
    with pytest.raises(RuntimeError) as caught:
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
    return is_lost_peer(caught.value) and not is_lost_peer(RuntimeError("shapes do not match"))


def test_a_lost_peer_is_told_from_a_bug() -> None:
    """Breaks when gloo words it otherwise: the peers of the rank that failed would then print tracebacks too."""
    assert all(run_ranks(2, _after_a_peer_left))


def _determinism() -> list[Any]:
    drawn = []
    for seed in (3, 3, 4):
        set_determinism(seed, deterministic=False)
        drawn.append(torch.rand(1).item())
    before = torch.are_deterministic_algorithms_enabled()
    set_determinism(3, deterministic=True)
    return [drawn[0] == drawn[1] != drawn[2], before, torch.are_deterministic_algorithms_enabled()]


def test_deterministic_mode_is_torchs() -> None:
    assert run_ranks(1, _determinism) == [[True, False, True]]
