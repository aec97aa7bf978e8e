"""Where the tokens of a sequence lie on the cp ranks, and what is refused because it cannot be right."""

import math
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CPU, Case, DenseAttention, build_split_model, error, local_batch, make_batch
from torchtitan.attention.masks import PLAIN, AttentionMasks, MaskKind
from torchtitan.attention.plan import whole_masks
from torchtitan.batch import Batch, CPLayout
from torchtitan.config.job import JobConfig
from torchtitan.config.sections import Parallelism, Training
from torchtitan.config.validate import check
from torchtitan.distributed.context_parallel import (
    LOAD_BALANCERS,
    METHODS,
    ROTATE_METHODS,
    apply_cp,
    check_seq_len,
    cp_rank_of,
    cp_shard,
    cp_unshard,
    plan_cp_masks,
)
from torchtitan.distributed.parallel_dims import build_parallel_dims
from torchtitan.errors import TitanError
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer


def _placement() -> list[Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tokens = torch.arange(16)
    batch = tokens.expand(2, 16)
    wide = torch.arange(2 * 16 * 3).view(2, 16, 3)
    results = []
    for balancer in ("headtail", "none"):
        (one,) = cp_shard(mesh, [tokens], load_balancer=balancer, seq_dim=0)
        inputs, labels, positions = cp_shard(mesh, [batch, batch + 1, batch.int()], load_balancer=balancer)
        assert torch.equal(inputs[0], one) and torch.equal(labels, inputs + 1) and torch.equal(positions, inputs.int())
        (wide_part,) = cp_shard(mesh, [wide], load_balancer=balancer)
        assert torch.equal(wide_part, wide[:, one])
        (back,) = cp_unshard(mesh, [one], load_balancer=balancer, seq_dim=0)
        (batch_back, wide_back) = cp_unshard(mesh, [inputs, wide_part], load_balancer=balancer)
        assert torch.equal(back, tokens) and torch.equal(batch_back, batch) and torch.equal(wide_back, wide)
        results.append(one.tolist())
    return results


def test_layout_of_sixteen_tokens() -> None:
    """Case layout; labels are those of the case label shift: input i has label i + 1, shard edges included."""
    two = run_ranks(2, _placement)
    assert two[0] == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(8))]
    assert two[1] == [[4, 5, 6, 7, 8, 9, 10, 11], list(range(8, 16))]
    four = run_ranks(4, _placement)
    assert [rank[0] for rank in four] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


@dataclass(frozen=True)
class _Example:
    """A tensor to cut: [*before, S, *after]."""

    before: tuple[int, ...]
    chunks: int  # S / (2 x ranks)
    after: tuple[int, ...]
    dtype: torch.dtype
    balancer: str


def _round_trips(examples: list[_Example]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    size, rank = dist.get_world_size(), dist.get_rank()
    for example in examples:
        shape = (*example.before, example.chunks * 2 * size, *example.after)
        x = torch.arange(math.prod(shape)).view(shape).to(example.dtype)
        dim = len(example.before)
        (part,) = cp_shard(mesh, [x], load_balancer=example.balancer, seq_dim=dim)
        halves = x.chunk(2 * size, dim)
        own = (rank, 2 * size - 1 - rank) if example.balancer == "headtail" else (2 * rank, 2 * rank + 1)
        assert torch.equal(part, torch.cat([halves[index] for index in own], dim)), example
        (back,) = cp_unshard(mesh, [part], load_balancer=example.balancer, seq_dim=dim - x.ndim)
        assert back.dtype == x.dtype and torch.equal(back, x), example


def test_unshard_undoes_shard_at_any_size() -> None:
    """Each rank holds the chunks of the definition, and the whole comes back, whatever the shape and dtype."""
    examples: list[_Example] = []
    sizes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    dtypes = st.sampled_from([torch.int64, torch.int32, torch.float64, torch.bfloat16, torch.bool])

    @given(st.builds(_Example, sizes, st.integers(1, 9), sizes, dtypes, st.sampled_from(["headtail", "none"])))
    @settings(max_examples=60, deadline=None, database=None)
    def collect(example: _Example) -> None:
        examples.append(example)

    collect()
    for world_size in (1, 2, 3):
        run_ranks(world_size, _round_trips, examples)


@dataclass(frozen=True)
class _Masked:
    """Documents to cut, of rows that differ."""

    lengths: tuple[int, ...]  # of the first row's documents, on top of a common unit; the second row has them reversed
    unit: int
    window: int
    balancer: str
    ulysses: int


def _masked_round_trips(examples: list[_Masked]) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for example in examples:
        mesh = build_parallel_dims(CPU, dp_shard=1, cp=size, ulysses=example.ulysses).cp_mesh
        rows = [[length * example.unit for length in each] for each in (example.lengths, example.lengths[::-1])]
        starts = torch.tensor([[sum(row[:i]) for i in range(len(row)) for _ in range(row[i])] for row in rows])
        seq_len = starts.size(1)
        tokens = torch.arange(2 * seq_len).view(2, seq_len)
        positions = torch.arange(seq_len) - starts
        masks = whole_masks(starts.int(), positions.int(), [PLAIN, MaskKind(window=example.window)])
        assert masks is not None
        wide = torch.stack([tokens, tokens], dim=-1)
        (own, own_wide), planned = cp_shard(mesh, [tokens, wide], masks, load_balancer=example.balancer)
        assert own.shape == (2, seq_len // size) and torch.equal(own_wide, torch.stack([own, own], dim=-1)), example
        # What was planned ahead, where microbatches are made, is not planned again.
        ahead = plan_cp_masks(masks, mesh, load_balancer=example.balancer)
        (again,), kept = cp_shard(mesh, [tokens], ahead, load_balancer=example.balancer)
        assert kept is ahead and torch.equal(again, own), example
        back, back_wide = cp_unshard(mesh, [own, own_wide], planned, load_balancer=example.balancer)
        assert torch.equal(back, tokens) and torch.equal(back_wide, wide), example
        for row in range(2):
            for token in (own[row] - row * seq_len).tolist():
                found = cp_rank_of(token, seq_len, mesh, planned, load_balancer=example.balancer, row=row)
                assert found == rank, (example, row, token)


def test_unshard_undoes_shard_of_documents() -> None:
    """Every balancer, with and without Ulysses, on all ranks or some: all tokens of each row are shared out.

    Each rank knows whose a token is without asking. ptrr needs whole blocks, so its documents are longer.
    """
    documents = ((3, 1, 12), (1, 1, 1, 13), (16,), (7, 9))
    for world_size, ulysses in ((1, (1,)), (2, (1, 2)), (4, (1, 2, 4))):
        examples = [
            _Masked(lengths, unit * (8 * world_size if balancer == "ptrr" else 1), 5, balancer, degree)
            for lengths, unit, degree, balancer in product(documents, (1, 3), ulysses, LOAD_BALANCERS)
        ]
        run_ranks(world_size, _masked_round_trips, examples)


class _Bare(Trainer):
    """As much of a trainer as reshapes a batch."""

    def __init__(self, cp: int, load_balancer: str) -> None:
        self.dims = build_parallel_dims(CPU, dp_shard=1, cp=cp)
        self.parts = SimpleNamespace(device=CPU)  # type: ignore[assignment]
        self.options = SimpleNamespace(load_balancer=load_balancer, check_same_data=False)  # type: ignore[assignment]
        self.first_step, self.step = True, 0


def _shifted() -> list[tuple[list[int], list[int], list[int]]]:
    tokens = torch.arange(100, 109)[None]
    positions = torch.arange(8, dtype=torch.int32)[None]
    microbatch = {"input": tokens[:, :-1], "labels": tokens[:, 1:], "positions": positions}
    batches = [_Bare(2, balancer).post_dataloading_process(microbatch) for balancer in ("headtail", "none")]
    assert all(batch.cp_layout and batch.cp_layout.local_seq_len == 4 for batch in batches)
    return [(batch.inputs[0].tolist(), batch.labels[0].tolist(), batch.positions[0].tolist()) for batch in batches]


def test_labels_are_the_next_tokens_at_the_edges_of_shards_too() -> None:
    """Case label shift: breaks when labels are shifted after the cut, or cut by another balancer than the inputs."""
    for own, rank in zip(
        ([[0, 1, 6, 7], [0, 1, 2, 3]], [[2, 3, 4, 5], [4, 5, 6, 7]]), run_ranks(2, _shifted), strict=True
    ):
        for expected, (inputs, labels, positions) in zip(own, rank, strict=True):
            assert positions == expected
            assert inputs == [100 + position for position in expected]
            assert labels == [101 + position for position in expected]


def _degree_one() -> float:
    mesh = init_device_mesh("cpu", (1,))
    whole = [torch.randn(1, heads, 63, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2)]
    qkv = cp_shard(mesh, whole, seq_dim=2)
    assert all(torch.equal(part, tensor) for part, tensor in zip(qkv, whole, strict=True))
    module = ScaledDotProductAttention()
    apply_cp([module], mesh, seq_len=63)
    (out,) = cp_unshard(mesh, [module(*qkv)], seq_dim=2)
    return error(out, DenseAttention()(*whole))


def _ulysses_alone(balancers: list[str]) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = build_parallel_dims(CPU, dp_shard=1, cp=size, ulysses=size).cp_mesh
    tokens = torch.arange(6 * size)[None]
    for balancer in balancers:
        (own,) = cp_shard(mesh, [tokens], load_balancer=balancer)
        assert torch.equal(own, tokens.chunk(size, 1)[rank]), balancer
        assert torch.equal(cp_unshard(mesh, [own], load_balancer=balancer)[0], tokens), balancer
        assert all(cp_rank_of(int(token), 6 * size, mesh, load_balancer=balancer) == rank for token in own[0])


def test_ulysses_on_all_ranks_cuts_in_order_whatever_the_balancer() -> None:
    """Each rank attends over whole sequences there, so that nothing is to balance, masks or none."""
    run_ranks(2, _ulysses_alone, LOAD_BALANCERS)


def test_one_rank_takes_any_length() -> None:
    """An odd length cannot be cut head-tail, but one rank cuts nothing."""
    assert run_ranks(1, _degree_one)[0] < 1e-6


@pytest.mark.parametrize(
    ("option", "known"),
    [("method", (*METHODS, "auto")), ("rotate_method", ROTATE_METHODS), ("load_balancer", ("auto", *LOAD_BALANCERS))],
)
def test_options_and_front_door_know_the_same_values(option: str, known: tuple[str, ...]) -> None:
    """Breaks when one of the two lists gets a value that the other does not know."""
    values = get_args(get_type_hints(Parallelism)[f"context_parallel_{option}"])
    assert sorted(values) == sorted(known)


_BLOCKS = st.integers(1, 30).map(lambda count: 64 * count)  # some of them whole blocks of ptrr, for some ranks


@given(st.integers(1, 70) | _BLOCKS, st.integers(1, 4), st.integers(1, 4), st.sampled_from(LOAD_BALANCERS))
@settings(deadline=None, database=None)
def test_validation_and_front_door_accept_the_same_lengths(
    seq_len: int, rounds: int, ulysses: int, balancer: str
) -> None:
    """Breaks when a length passes validation and fails once everything is allocated."""
    cp = rounds * ulysses
    config = JobConfig(
        training=Training(seq_len=seq_len),
        parallelism=Parallelism(
            context_parallel_degree=cp,
            context_parallel_ulysses_degree=ulysses,
            context_parallel_method="gather",  # takes every balancer
            context_parallel_load_balancer=balancer,
        ),
    )
    model = SimpleNamespace(context_length=2048, num_heads=12, num_kv_heads=2, layer_kinds=(PLAIN,))
    refusals = []
    for call in (
        lambda: check(config, world_size=cp, ranks_per_node=cp, device_type="cpu", model=model),
        lambda: check_seq_len(seq_len, cp, balancer, ulysses_degree=ulysses),
    ):
        try:
            call()
            refusals.append(False)
        except TitanError as caught:
            assert str(seq_len) in str(caught)
            refusals.append(True)
    # Each of the method's ranks has two chunks with head-tail, whole blocks with ptrr; each rank has as many tokens.
    unit = {"headtail": 2, "ptrr": 128}.get(balancer, 1)
    fits = seq_len % cp == 0 and (rounds == 1 or seq_len % (unit * rounds) == 0)
    assert refusals == [not fits, not fits]


def _two_documents(seq_len: int) -> AttentionMasks:
    starts = torch.zeros(1, seq_len, dtype=torch.int32)
    starts[:, 5:] = 5
    masks = whole_masks(starts, torch.arange(seq_len, dtype=torch.int32)[None] - starts, [PLAIN])
    assert masks is not None
    return masks


def _qkv(seq_len: int) -> list[torch.Tensor]:
    return [torch.randn(1, heads, seq_len, 8) for heads in (4, 2, 2)]


def _message(call: Any) -> str:
    try:
        call()
    except TitanError as caught:
        return str(caught)
    return "nothing was raised"


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    module, ring = ScaledDotProductAttention(), ScaledDotProductAttention()
    apply_cp([ring], mesh, seq_len=64)
    x = torch.zeros(1, 62)
    masks, short = _two_documents(62), _two_documents(32)
    case = Case(cp=2)
    model, dims = build_split_model(case)
    cut = local_batch(case, dims)
    whole = make_batch(case)
    half = Batch(*(tensor[:, :16] for tensor in (whole.inputs, whole.labels, whole.positions)))
    return [
        _message(lambda: apply_cp([module], mesh, seq_len=64, method="rings")),
        _message(lambda: apply_cp([module], mesh, seq_len=64, rotate_method="all2all")),
        _message(lambda: apply_cp([module], mesh, seq_len=64, load_balancer="tail")),
        _message(lambda: apply_cp([module], mesh, seq_len=64, load_balancer="greedy")),
        _message(lambda: apply_cp([], mesh, seq_len=64)),
        _message(lambda: cp_shard(mesh, [x], load_balancer="greedy")),
        _message(lambda: cp_shard(mesh, [x], masks, load_balancer="headtail")),
        _message(lambda: cp_shard(mesh, [x], plan_cp_masks(short, mesh, load_balancer="none"), load_balancer="none")),
        _message(lambda: cp_shard(mesh, [x[0]], masks, load_balancer="none", seq_dim=0)),
        _message(lambda: ring(*_qkv(32), masks.layers[PLAIN])),
        _message(lambda: cp_shard(mesh, [x])),
        _message(lambda: cp_shard(mesh, [torch.zeros(1, 63)], load_balancer="none")),
        _message(lambda: cp_shard(mesh, [torch.zeros(1, 4), torch.zeros(1, 8)])),
        _message(lambda: cut.cut(CPLayout(2, "headtail", 32), [cut.inputs, cut.labels, cut.positions])),
        _message(lambda: model(whole.inputs, whole.positions)),
        _message(lambda: model(half.inputs, half.positions)),
        _message(lambda: whole.cut(CPLayout(2, "headtail", 64), [half.inputs, half.labels, half.positions])),
    ]


def test_what_cannot_be_right_is_refused_with_its_numbers() -> None:
    messages = run_ranks(2, _refusals)[0]
    for message, part in zip(
        messages,
        [
            "unknown method 'rings'; did you mean ring?; allowed: ring",
            "unknown rotate_method 'all2all'; did you mean alltoall, allgather?; allowed: allgather, alltoall",
            "unknown load_balancer 'tail'; did you mean headtail?; allowed: headtail, none",
            "method ring knows no load balancer greedy; use headtail or none, or method gather",
            "found no attention module",
            "load balancer greedy orders tokens by their masks; give those too",
            "cut over 2 cp ranks with load balancer headtail; it must be a multiple of 4, such as 60 or 64",
            "the masks are planned for 32 tokens, the buffers have 62",
            "masks order the tokens of each row of a batch: the sequence dim cannot be 0",
            "method ring knows the plain causal mask only, and got another; use method gather",
            "cut over 2 cp ranks with load balancer headtail; it must be a multiple of 4, such as 60 or 64",
            "63 tokens cannot be cut over 2 cp ranks with load balancer none; it must be a multiple of 2",
            "need one length; dim 1 has [4, 8]",
            "its local length is 32, cutting it again over 2 would leave 16",
            "got a query of 64 tokens, expected 32 (64 over 2 cp ranks)",
            "got a query of 16 tokens, expected 32",
            "inputs has local length 16, the cp layout 32",
        ],
        strict=True,
    ):
        assert part in message
