"""Documents, windows and chunks under context parallelism: the oracle's results, and the forward's bits."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed_tests.test_cp_methods import _bits, _steps
from tests.helpers.bits import why_bits_may_differ
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import T0, Case, Result, build_split_model, document_tensors, error, local_batch, oracle
from torchtitan.attention.masks import MaskKind
from torchtitan.attention.plan import whole_masks
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.distributed.collectives import count_traffic
from torchtitan.distributed.context_parallel import apply_cp, cp_rank_of, cp_shard, cp_unshard
from torchtitan.errors import TitanError
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.runner import SingleStageRunner

_FP32, _FP64, _BF16 = torch.float32, torch.float64, torch.bfloat16
_LOSS = {_FP32: 5e-7, _FP64: 1e-12}
_GRADIENT = {_FP32: 1e-6, _FP64: 1e-12}
_BALANCERS = ("none", "headtail", "per_document", "greedy")

_WINDOW = replace(T0, window=16)
_ALTERNATING = replace(T0, num_layers=3, window=16, full_attention_every=2)  # the last comes after a full one
_CHUNKS = replace(T0, chunk=24)
# Rows with splits of their own, documents of one token, and one that is cut by the row's beginning.
_DOCUMENTS = Case(method="gather", documents=((7, 30, 27), (1, 1, 62)))
_CROSSING = Case(method="gather", documents=((63, 1), (9, 55)), cut_before=21)
_MASKS = (
    _DOCUMENTS,
    _CROSSING,
    Case(method="gather", args=_WINDOW),
    _DOCUMENTS.on(args=_ALTERNATING),
    _CROSSING.on(args=_CHUNKS),
)


def _check(case: Case, result: Result, exact: Result) -> None:
    assert result.loss == pytest.approx(exact.loss, rel=_LOSS[case.dtype]), case
    assert error(result.token_losses, exact.token_losses) < _GRADIENT[case.dtype], case
    for name, gradient in exact.grads.items():
        assert error(result.grads[name], gradient) < _GRADIENT[case.dtype], (case, name)


def _exact(case: Case) -> Result:
    return oracle(Case(args=case.args, documents=case.documents, cut_before=case.cut_before, dtype=_FP64))


def _cases(cp: int) -> list[tuple[Case, Case]]:
    """Return (mask, case): every balancer in fp64, the default one in fp32 too, and every way to run gather."""
    options: list[dict[str, object]] = [{"dtype": _FP32, "load_balancer": "greedy" if cp > 1 else "none"}]
    if cp > 1:
        options += [{"load_balancer": balancer} for balancer in _BALANCERS]
        options += [{"ulysses": cp, "load_balancer": "none"}]
    if cp == 2:
        options += [{"gather_kv_heads": 1, "keep_gathered": True, "load_balancer": "greedy"}]
        options += [{"activation_checkpoint": mode, "load_balancer": "greedy"} for mode in ("full", "selective")]
    if cp == 4:
        options += [{"ulysses": 2, "load_balancer": balancer} for balancer in ("greedy", "headtail")]
    return [(mask, mask.on(cp=cp, **{"dtype": _FP64, **each})) for mask in _MASKS for each in options]


@pytest.mark.parametrize("cp", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_masks_are_those_of_the_oracle(cp: int) -> None:
    """Breaks with a mask that is dropped, a wrong piece, plan or order: all gradients are compared."""
    exact = {id(mask): _exact(mask) for mask in _MASKS}
    pairs = _cases(cp)
    for (mask, case), result in zip(pairs, run_ranks(cp, _steps, [case for _, case in pairs])[0], strict=True):
        _check(case, result, exact[id(mask)])


def test_each_mask_has_a_loss_of_its_own() -> None:
    """Breaks where a mask is dropped on both sides: none of these is plain causal, or another's."""
    losses = [_exact(mask).loss for mask in (*_MASKS, Case(), _DOCUMENTS.on(args=_WINDOW))]
    assert len({round(loss, 6) for loss in losses}) == len(losses)


def test_lengths_need_to_divide_by_the_ranks_alone() -> None:
    """S = 2 x 31 over 2 ranks, in documents of odd lengths: no balancer of blocks needs more."""
    case = Case(method="gather", seq_len=62, documents=((5, 57), (62,)), cp=2)
    exact = oracle(Case(seq_len=62, documents=case.documents, dtype=_FP64))
    cases = [case.on(load_balancer=balancer) for balancer in ("none", "per_document", "greedy")]
    for each, result in zip(cases, run_ranks(2, _steps, cases)[0], strict=True):
        _check(each, result, exact)


def test_torchs_balancer_of_blocks() -> None:
    """ptrr deals out blocks of 128 tokens."""
    case = Case(method="gather", batch_size=1, seq_len=512, documents=((300, 1, 211),), cp=2, load_balancer="ptrr")
    exact = oracle(case.on(cp=1, dtype=_FP64))
    _check(case, run_ranks(2, _steps, [case])[0][0], exact)


def test_plain_causal_attention_takes_any_order() -> None:
    """Balancers that go by masks are allowed for the plain causal one too, with gather."""
    exact = oracle(Case(dtype=_FP64))
    cases = [Case(method="gather", cp=4, load_balancer=balancer) for balancer in ("per_document", "greedy")]
    for case, result in zip(cases, run_ranks(4, _steps, cases)[0], strict=True):
        _check(case, result, exact)


def _what_is_sent(cases: list[Case]) -> list[tuple[int, int]]:
    """Return the bytes sent in a step, and by the plan: with the gradients of what came."""
    results = []
    for case in cases:
        model, dims = build_split_model(case)
        batch = local_batch(case, dims)
        with count_traffic() as traffic:
            SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(batch, 128)
        assert batch.masks is not None and batch.masks.work is not None
        sent = received = 0
        for kind in case.args.layer_kinds:
            counts = batch.masks.layers[kind].counts.sum(1).tolist()
            sent, received = sent + counts[0], received + counts[1]
        per_token = 2 * case.args.num_kv_heads * case.args.width_per_head * 4
        assert received == int(batch.masks.work.needed[dims.cp_rank])
        results.append((traffic.bytes, per_token * (2 * sent + received)))
    return results


def test_bytes_sent_are_those_of_the_plan() -> None:
    """Keys and values go to those that see them, forward and backward, and their gradients come back."""
    cases = [
        mask.on(cp=4, load_balancer=balancer, gather_kv_heads=heads)
        for mask in _MASKS
        for balancer in ("none", "greedy")
        for heads in (0, 1)
    ]
    for rank in run_ranks(4, _what_is_sent, cases):
        for case, (sent, planned) in zip(cases, rank, strict=True):
            assert sent == planned, case


def _cut_axes() -> tuple[list[int], list[int], bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    starts, positions = document_tensors(_CROSSING)
    masks = whole_masks(starts, positions, [MaskKind()])
    assert masks is not None
    axes = torch.stack([positions, positions + 1000, positions + 2000], dim=1)  # [B, A, S]
    (flat,), planned = cp_shard(mesh, [positions], masks, load_balancer="greedy")
    (three,), _ = cp_shard(mesh, [axes], masks, load_balancer="greedy", seq_dim=2)
    same = torch.equal(three, torch.stack([flat, flat + 1000, flat + 2000], 1))
    (whole,) = cp_unshard(mesh, [three], planned, load_balancer="greedy", seq_dim=2)
    assert torch.equal(whole, axes)
    return list(three.shape), flat[0].tolist(), same


def test_positions_are_cut_on_the_sequence_dim() -> None:
    """Positions of several axes [B, A, S] are permuted as tokens are, row by row, and come back whole."""
    ranks = run_ranks(2, _cut_axes)
    assert all(shape == [2, 3, 32] and same for shape, _, same in ranks)
    assert sorted(ranks[0][1] + ranks[1][1]) == sorted([*range(21, 84), 0])


def _misplaced() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = ScaledDotProductAttention()
    apply_cp([module], mesh, seq_len=8, method="gather")
    one, three = (
        whole_masks(torch.zeros(rows, 8, dtype=torch.int32), torch.arange(8).expand(rows, -1), [MaskKind(window=2)])
        for rows in (1, 3)
    )
    assert one is not None and three is not None
    kind, buffer = MaskKind(window=2), torch.zeros(1, 8)
    _, planned = cp_shard(mesh, [buffer], one, load_balancer="none")
    other = replace(planned, planned_for=(2, 1 - dist.get_rank()))
    qkv = [torch.zeros(3, 2, 4, 8) for _ in range(3)]
    messages = []
    for call in (
        lambda: cp_shard(mesh, [buffer], three, load_balancer="none"),
        lambda: cp_shard(mesh, [buffer], other, load_balancer="none"),
        lambda: module(*qkv, three.layers[kind]),
        lambda: module(*qkv, planned.layers[kind]),
        lambda: ScaledDotProductAttention()(*(torch.zeros(3, 2, 8, 8) for _ in range(3)), one.layers[kind]),
        lambda: cp_unshard(mesh, [buffer], load_balancer="greedy"),
        lambda: cp_rank_of(3, 8, mesh, load_balancer="greedy"),
        lambda: cp_rank_of(3, 8, mesh, planned, load_balancer="none", row=1),
    ):
        with pytest.raises(TitanError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_masks_of_other_rows_or_ranks_are_refused() -> None:
    """Breaks where a mask that does not fit leaves memory as it was found, or another rank's tables are used."""
    expected = [
        "of 3 sequences, a buffer of 1",
        "planned for rank",
        "not planned for 2 ranks",
        "the mask is of 1 sequences of 4 local tokens, the queries of 3 sequences",
        "the mask is of 1 sequences of 8 local tokens, the queries of 3 sequences",
        "give those too",
        "give those too",
        "row 1 is not among the 1",
    ]
    for messages in run_ranks(2, _misplaced):
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


@pytest.mark.parametrize("cp", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_forward_has_the_same_bits_for_every_degree_and_balancer(cp: int) -> None:
    """The promise of gather holds under masks: the bits of one process, in fp32 and bf16."""
    broken = run_ranks(1, why_bits_may_differ)[0]
    if broken:
        pytest.skip(broken)
    lengths = ((700, 4, 832), (1, 511, 1024))
    single = [
        Case(args=args, seq_len=1536, documents=lengths, compute_dtype=dtype)
        for args, dtype in product((T0, replace(T0, window=200, full_attention_every=2)), (_FP32, _BF16))
    ]
    expected = run_ranks(1, _bits, single)[0]
    for options in (
        {"load_balancer": "greedy"},
        {"load_balancer": "per_document", "gather_kv_heads": 1},
        {"load_balancer": "headtail"},
        {"ulysses": cp},
    ):
        cases = [case.on(cp=cp, method="gather", **options) for case in single]
        for rank in run_ranks(cp, _bits, cases):
            for case, found, wanted in zip(cases, rank, expected, strict=True):
                assert torch.equal(found[0], wanted[0]), case
                assert torch.equal(found[1], wanted[1]), case
                assert found[2] == wanted[2], case
