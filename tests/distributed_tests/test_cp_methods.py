"""The methods beside the ring: the oracle's results, and the forward's bits for every degree."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from tests.helpers.bits import why_bits_may_differ
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import T0, Case, Result, build_split_model, error, full, local_batch, make_batch, oracle
from tests.helpers.tiny import split_step as run_step
from torchtitan.attention import kernels
from torchtitan.batch import IGNORED_LABEL
from torchtitan.components.loss import ChunkedCrossEntropy, mean_loss
from torchtitan.distributed.collectives import all_gather_rows, count_traffic
from torchtitan.distributed.context_parallel import apply_cp, cp_rank_of, cp_unshard
from torchtitan.distributed.cp.gather import gather_attention
from torchtitan.errors import TitanError
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.runner import SingleStageRunner

_FP32, _FP64, _BF16 = torch.float32, torch.float64, torch.bfloat16
_LOSS = {_FP32: 5e-7, _FP64: 1e-12}
_GRADIENT = {_FP32: 1e-6, _FP64: 1e-12}
_GATHER = Case(method="gather")


def _steps(cases: list[Case]) -> list[Result]:
    return [run_step(case) for case in cases]


def _options(cp: int) -> list[Case]:
    """Return every method that `cp` ranks allow, balanced or not."""
    cases = [
        _GATHER,
        _GATHER.on(gather_kv_heads=1),
        _GATHER.on(keep_gathered=True, gather_kv_heads=1),
        _GATHER.on(activation_checkpoint="full"),
        Case(ulysses=cp),
    ]
    cases += [Case(ulysses=u, method=method) for u in (2, 4) if u < cp for method in ("ring", "gather")]
    return [case.on(cp=cp, load_balancer=balancer) for case in cases for balancer in ("headtail", "none")]


@pytest.mark.parametrize("cp", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_parity_of_every_method_at_step_one(cp: int) -> None:
    """Breaks with a wrong placement, mask, exchange or reduction: all gradients are compared."""
    exact = oracle(Case(dtype=_FP64))
    cases = [case.on(dtype=dtype) for case, dtype in product(_options(cp), (_FP32, _FP64))]
    for case, result in zip(cases, run_ranks(cp, _steps, cases)[0], strict=True):
        assert result.loss == pytest.approx(exact.loss, rel=_LOSS[case.dtype]), case
        assert error(result.token_losses, exact.token_losses) < _GRADIENT[case.dtype], case
        for name, gradient in exact.grads.items():
            assert error(result.grads[name], gradient) < _GRADIENT[case.dtype], (case, name)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_grouped_heads(kv_heads: int) -> None:
    """Case GQA, MQA (2 is T0's own): Ulysses repeats just enough heads, and dK, dV are sums over the repeats."""
    args = replace(T0, num_kv_heads=kv_heads)
    cases = [
        Case(args=args, cp=4, method="gather"),
        Case(args=args, cp=4, ulysses=4),
        Case(args=args, cp=4, ulysses=2, method="gather"),
    ]
    exact = oracle(Case(args=args, dtype=_FP64))
    for case, result in zip(cases, run_ranks(4, _steps, cases)[0], strict=True):
        for name, gradient in exact.grads.items():
            assert error(result.grads[name], gradient) < 1e-6, (case, name)


def test_methods_with_data_parallel_ranks_and_updates() -> None:
    """Breaks when an exchange crosses from one sequence's ranks to another's."""
    cases = [case.on(dp=2, cp=2, updates=2) for case in (_GATHER, Case(ulysses=2))]
    exact = oracle(Case(dtype=_FP64, updates=2))
    allowed = 3 * max(
        error(single, exact.parameters[name]) for name, single in oracle(Case(updates=2)).parameters.items()
    )
    ranks = run_ranks(4, _steps, cases)
    for index, case in enumerate(cases):
        result = ranks[0][index]
        assert result.loss == pytest.approx(exact.loss, rel=1e-6), case
        for name, parameter in exact.parameters.items():
            assert error(result.parameters[name], parameter) < allowed, (case, name)
            assert all(torch.equal(other[index].parameters[name], result.parameters[name]) for other in ranks[1:])


@pytest.mark.parametrize("cp", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_bf16_is_as_good_as_one_bf16_process(cp: int) -> None:
    """Case bf16 merge, for gather and Ulysses: gradients summed in bf16 would be worse."""
    args = replace(T0, num_layers=8)
    bf16 = Case(args=args, seq_len=256, compute_dtype=_BF16)
    exact = oracle(Case(args=args, seq_len=256, dtype=_FP64))
    single = run_ranks(1, run_step, bf16)[0]
    cases = [bf16.on(cp=cp, method="gather"), bf16.on(cp=cp, ulysses=cp), bf16.on(cp=cp, ulysses=2, method="gather")]
    for case, result in zip(cases, run_ranks(cp, _steps, cases)[0], strict=True):
        assert result.loss == single.loss or abs(result.loss - exact.loss) <= 2 * abs(single.loss - exact.loss)
        for name, gradient in exact.grads.items():
            assert error(result.grads[name], gradient) <= 2 * error(single.grads[name], gradient), (case, name)


# Lengths that are multiples of the kernel's 512 columns, and that are not, so that chunks end anywhere.
_LENGTHS = (512, 1008, 1536)


def _bits(cases: list[Case]) -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Return logits and per-token losses in sequence order, and the loss as the trainer logs it."""
    results = []
    for case in cases:
        model, dims = build_split_model(case)
        batch, whole = local_batch(case, dims), make_batch(case)
        with torch.no_grad():
            loss = SingleStageRunner(model, ChunkedCrossEntropy("auto")).forward(batch)
            logits = model.logits(batch.inputs, batch.positions, batch.masks)
        token_losses = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), batch.labels.flatten(), reduction="none", ignore_index=IGNORED_LABEL
        ).view_as(batch.labels)
        mean = mean_loss(all_gather_rows(loss.row(), dims.fsdp_mesh), int((whole.labels >= 0).sum()))
        outputs = [logits, token_losses]
        if case.cp > 1:
            outputs = cp_unshard(dims.cp_mesh, outputs, batch.masks, load_balancer=case.load_balancer)
        results.append((outputs[0], outputs[1], mean))
    return results


@pytest.mark.parametrize("cp", [2, 4, 8])
def test_the_forward_has_the_same_bits_for_every_degree(cp: int) -> None:
    """The promise of gather and Ulysses: equal to the last bit to the model without CP, in fp32 and bf16, with GQA."""
    broken = run_ranks(1, why_bits_may_differ)[0]
    if broken:
        pytest.skip(broken)
    single = [Case(seq_len=length, compute_dtype=dtype) for length in _LENGTHS for dtype in (_FP32, _BF16)]
    expected = run_ranks(1, _bits, single)[0]
    for options in (
        {"method": "gather"},
        {"method": "gather", "load_balancer": "none", "gather_kv_heads": 1},
        {"ulysses": cp},
        {"method": "gather", "ulysses": 2},
    ):
        cases = [case.on(cp=cp, **options) for case in single]
        for rank in run_ranks(cp, _bits, cases):
            for case, found, wanted in zip(cases, rank, expected, strict=True):
                assert torch.equal(found[0], wanted[0]), case
                assert torch.equal(found[1], wanted[1]), case
                assert found[2] == wanted[2], case


def _one_block(lengths: list[int]) -> list[str]:
    """Compare query blocks that start anywhere with the whole sequence in one call; return where bits differ."""
    different = []
    for length, dtype in product(lengths, (_FP32, _BF16)):
        generator = torch.Generator().manual_seed(length)
        q, k, v = (torch.randn(1, heads, length, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
        q, k, v = kernels.operand(q), kernels.operand(k), kernels.operand(v)
        whole, whole_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        for degree, balanced in product((1, 2, 3, 4, 8), (True, False)):
            if length % (2 * degree if balanced else degree):
                continue
            chunk = length // (2 * degree if balanced else degree)
            for start in range(0, length, chunk):
                rows = slice(start, start + chunk)
                out, lse = kernels.forward(q[:, :, rows].contiguous(), k, v, start)
                if not (torch.equal(out, whole[:, :, rows]) and torch.equal(lse, whole_lse[:, :, rows])):
                    different.append(f"{dtype} {length} tokens, {degree} ranks, {balanced}, {rows}")
    return different


def test_a_query_block_has_the_bits_of_the_whole_sequence() -> None:
    """Lengths around the kernel's tiles (32, 64, 256 queries; 512 keys), all multiples of 4: see `kernels`."""
    broken = run_ranks(1, why_bits_may_differ)[0]
    if broken:
        pytest.skip(broken)
    lengths = [32, 48, 64, 80, 96, 176, 192, 208, 240, 400, 496, 512, 528, 752, 768, 784, 976, 1008, 1040, 1536, 2064]
    assert run_ranks(1, _one_block, lengths)[0] == []


def _collectives(cases: list[Case]) -> list[tuple[int, int]]:
    counts = []
    for case in cases:
        model, dims = build_split_model(case)
        batch = local_batch(case, dims)
        with count_traffic() as traffic:
            SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(batch, 128)
        counts.append((traffic.calls, traffic.bytes))
    return counts


def test_every_option_acts() -> None:
    """Case every option acts: each has its own number of collectives or bytes; one that is ignored shares another's."""
    cases = [
        Case(cp=4),
        Case(cp=4, rotate_method="alltoall"),
        Case(cp=4, method="gather"),
        Case(cp=4, method="gather", gather_kv_heads=1),
        Case(cp=4, method="gather", keep_gathered=True),
        Case(cp=4, ulysses=4),
        Case(cp=4, ulysses=2),
        Case(cp=4, ulysses=2, method="gather"),
    ]
    counts = run_ranks(4, _collectives, cases)[0]
    assert len(set(counts)) == len(cases), counts


def _recomputation(cases: list[Case]) -> list[tuple[int, dict[str, torch.Tensor]]]:
    """Return, per case, the forward calls of attention in one step, and the gradients."""
    results = []
    for case in cases:
        calls = _AttentionCalls()
        model, dims = build_split_model(case)
        with calls:
            SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(local_batch(case, dims), 128)
        results.append((calls.count, {name: full(p.grad) for name, p in model.named_parameters()}))
    return results


class _AttentionCalls:
    """Counts calls of the CPU's attention kernel and of the gather's blocks, wherever they are made."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        from torchtitan.distributed.cp import torch_private
        from torchtitan.models.common import attention

        self.patched = [(kernels, "forward"), (torch_private, "_flash_forward"), (attention, "_causal")]
        self.originals = [getattr(module, name) for module, name in self.patched]
        for (module, name), original in zip(self.patched, self.originals, strict=True):
            setattr(module, name, self._counted(original))

    def __exit__(self, *args: Any) -> None:
        for (module, name), original in zip(self.patched, self.originals, strict=True):
            setattr(module, name, original)

    def _counted(self, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return counted


def test_checkpointing_changes_no_bit_and_selective_spares_attention() -> None:
    """`op` keeps attention of every method, N recomputes every N-th layer, full all; gradients are those of none."""
    args = replace(T0, num_layers=4)
    methods = [Case(args=args, cp=2, method="gather"), Case(args=args, cp=2, ulysses=2), Case(args=args, dp=2)]
    modes = [("none", "op"), ("selective", "op"), ("selective", "2"), ("full", "op")]
    for method in methods:
        cases = [method.on(activation_checkpoint=mode, selective_ac_option=option) for mode, option in modes]
        for rank in run_ranks(2, _recomputation, cases):
            (calls, gradients), *others = rank
            for name, gradient in gradients.items():
                assert all(torch.equal(other[name], gradient) for _, other in others), name
            counts = [count for count, _ in others]
            if method.ulysses == 1 and method.cp == 2:  # the operator is opaque, so what it calls is what was computed
                assert counts == [calls, calls * 3 // 2, calls * 2]
            else:
                assert counts[1:] == [calls * 3 // 2, calls * 2]


def test_ring_recomputes_like_the_others() -> None:
    cases = [Case(cp=2, activation_checkpoint=mode) for mode in ("none", "selective", "full")]
    for rank in run_ranks(2, _recomputation, cases):
        (_, gradients), *others = rank
        for _, other in others:
            assert all(torch.equal(other[name], gradient) for name, gradient in gradients.items())


class _Scaled(ScaledDotProductAttention):
    """Attention of another scale, which gather does not compute."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hooked = ScaledDotProductAttention()
    apply_cp([hooked], mesh, seq_len=8, method="gather")
    q, k, v = (torch.zeros(1, 2, 4, 8) for _ in range(3))
    calls = [
        lambda: apply_cp([_Scaled()], mesh, seq_len=8, method="gather"),
        lambda: apply_cp([hooked], mesh, seq_len=8, method="gather"),
        lambda: apply_cp([ScaledDotProductAttention()], mesh, seq_len=8, method="gather", gather_kv_heads="foo"),
        lambda: apply_cp([ScaledDotProductAttention()], mesh, seq_len=8, method="gather", gather_kv_heads=-1),
        lambda: hooked(q, k=k, v=v),
        lambda: cp_rank_of(8, 8, mesh),
        lambda: cp_rank_of(0, 6, mesh),
    ]
    messages = []
    for call in calls:
        with pytest.raises(TitanError) as caught:
            call()
        messages.append(str(caught.value))
    apply_cp([_Scaled()], mesh, seq_len=8)  # the ring calls the module's own forward
    return messages


def test_what_a_method_cannot_do_right_is_refused() -> None:
    """Breaks when gather takes the place of a forward that is not what it computes: wrong by half, without an error."""
    for messages in run_ranks(2, _refusals):
        expected = ["_Scaled.forward", "mark it", "'foo'", "-1", "by position", "token 8", "multiple of 4"]
        assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def _faked() -> list[tuple[torch.Size, torch.dtype]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with FakeTensorMode():
        q, k, v = (torch.empty(2, heads, 16, 8, dtype=_BF16, requires_grad=True) for heads in (4, 2, 2))
        outputs = gather_attention(q, k, v, [], 0, mesh.get_group().group_name, 2, True, 0, True)
        outputs[0].sum().backward()
    return [(tensor.shape, tensor.dtype) for tensor in (*outputs, q.grad, k.grad, v.grad)]


def test_the_operator_is_known_to_fake_tensors() -> None:
    """Nothing is computed or sent: one process may play the part of many."""
    local, kv = torch.Size((2, 4, 16, 8)), torch.Size((2, 2, 16, 8))
    expected = [
        (local, _BF16),
        (torch.Size((2, 4, 16)), _FP32),
        (torch.Size((2, 2, 2, 32, 8)), _BF16),
        (local, _BF16),
        (kv, _BF16),
        (kv, _BF16),
    ]
    assert run_ranks(2, _faked)[0] == expected
