"""Context parallelism against one process with dense attention: the cases that broke other trainers."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import (
    T0,
    Case,
    DenseAttention,
    Result,
    build_model,
    build_split_model,
    error,
    local_batch,
    make_batch,
    oracle,
    split_step,
)
from torchtitan.batch import Batch, CPLayout
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.distributed.context_parallel import apply_cp, cp_shard, cp_unshard
from torchtitan.distributed.cp.torch_private import read_state
from torchtitan.errors import TitanError
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.runner import SingleStageRunner

_FP32, _FP64 = torch.float32, torch.float64
# cases.md, step 1 against the oracle of the same dtype.
_LOSS = {_FP32: 5e-7, _FP64: 1e-12}
_GRADIENT = {_FP32: 1e-6, _FP64: 1e-12}


def _steps(cases: list[Case]) -> list[Result]:
    return [split_step(case) for case in cases]


def _assert_matches(actual: Result, expected: Result, dtype: torch.dtype) -> None:
    assert actual.loss == pytest.approx(expected.loss, rel=_LOSS[dtype])
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=_GRADIENT[dtype])
    assert error(actual.token_losses, expected.token_losses) < _GRADIENT[dtype]
    for name, gradient in expected.grads.items():
        assert error(actual.grads[name], gradient) < _GRADIENT[dtype], name


@pytest.mark.parametrize("cp", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_parity_of_every_option_at_step_one(cp: int) -> None:
    """Breaks with a wrong placement, mask, rotation, accumulation dtype or reduction: all gradients are compared."""
    options = list(product((_FP32, _FP64), ("headtail", "none"), ("allgather", "alltoall")))
    cases = [Case(cp=cp, dtype=dtype, load_balancer=lb, rotate_method=rotate) for dtype, lb, rotate in options]
    expected = {dtype: oracle(Case(dtype=dtype)) for dtype in (_FP32, _FP64)}
    ranks = run_ranks(cp, _steps, cases)
    for index, case in enumerate(cases):
        _assert_matches(ranks[0][index], expected[case.dtype], case.dtype)


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_parity_after_five_updates(cp: int) -> None:
    cases = [Case(cp=cp, dtype=dtype, updates=5) for dtype in (_FP32, _FP64)]
    ranks = run_ranks(cp, _steps, cases)
    fp32, fp64 = ranks[0]
    exact = oracle(Case(dtype=_FP64, updates=5))
    single = oracle(Case(dtype=_FP32, updates=5))
    assert fp32.loss == pytest.approx(single.loss, rel=1e-6)
    assert fp64.loss == pytest.approx(exact.loss, rel=1e-12)
    for name, parameter in exact.parameters.items():
        assert error(fp64.parameters[name], parameter) < 1e-12, name
        # fp32: two orders of summation differ by 1e-5 after five updates; three times the error of one process.
        assert error(fp32.parameters[name], parameter) <= 3 * error(single.parameters[name], parameter), name
    for other in ranks[1:]:
        for a, b in zip(ranks[0], other, strict=True):
            assert all(torch.equal(a.parameters[name], b.parameters[name]) for name in a.parameters)


def test_data_parallel_and_context_parallel_mixes() -> None:
    cases = [
        Case(dp=4, batch_size=4),
        Case(dp=2, cp=2),
        Case(cp=4, batch_size=1),  # case cp alone
        Case(dp=2, cp=2, activation_checkpoint="full"),
        Case(cp=4, args=T0.__class__(64, 2, 8, 1, 128, vocab_size=97)),  # MQA
        Case(cp=4, args=T0.__class__(64, 2, 8, 2, 128, vocab_size=97, tie_embeddings=True)),
    ]
    ranks = run_ranks(4, _steps, cases)
    for index, case in enumerate(cases):
        _assert_matches(ranks[0][index], oracle(case.on(dp=1, cp=1)), _FP32)
    with_checkpoint, without = ranks[0][3], ranks[0][1]
    assert with_checkpoint.loss == without.loss
    for name, gradient in without.grads.items():  # the same mathematics: the same bits
        assert torch.equal(with_checkpoint.grads[name], gradient), name


def _local_parameter_sizes(case: Case) -> tuple[int, int]:
    model, _ = build_split_model(case)
    parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
    return sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)


def test_parameters_are_sharded_over_the_cp_ranks() -> None:
    """Breaks when FSDP covers dp_shard only: cp ranks would then drift apart."""
    for local, whole in run_ranks(4, _local_parameter_sizes, Case(cp=4)):
        assert whole == sum(parameter.numel() for parameter in build_model(Case()).parameters())
        assert local < whole / 4 + 200  # 97 rows of the vocabulary do not divide by 4


def test_ignored_labels_wherever_they_lie() -> None:
    """Cases uneven labels, empty shard, one valid token: a mean of local means differs in the third digit."""
    cases = [
        Case(cp=4, ignored=((40, 64),)),
        Case(cp=4, batch_size=1, ignored=((0, 8), (56, 64))),  # rank 0 holds no label
        Case(cp=4, batch_size=1, ignored=((0, 63),)),
        Case(cp=2, dp=2, ignored=((0, 63),)),
    ]
    ranks = run_ranks(4, _steps, cases)
    for index, case in enumerate(cases):
        _assert_matches(ranks[0][index], oracle(case.on(dp=1, cp=1)), _FP32)


def _valid_and_loss(case: Case) -> tuple[int, float]:
    model, dims = build_split_model(case)
    batch = local_batch(case, dims)
    total = SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(batch, 48)
    return int((batch.labels != -100).sum()), float(total)


def test_a_rank_without_labels_adds_exactly_zero() -> None:
    counts = run_ranks(4, _valid_and_loss, Case(cp=4, batch_size=1, ignored=((0, 8), (56, 64))))
    assert [valid for valid, _ in counts] == [0, 16, 16, 16]
    assert counts[0][1] == 0.0
    assert all(loss > 0 for _, loss in counts[1:])


def _updates_without_labels(case: Case) -> bool:
    model, dims = build_split_model(case)
    runner = SingleStageRunner(model, ChunkedCrossEntropy(0))
    before = [parameter.to_local().clone() for parameter in model.parameters()]
    assert float(runner.forward_backward(local_batch(case, dims), 1)) == 0.0
    assert all(not parameter.grad.to_local().any() for parameter in model.parameters())
    torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1).step()
    expected = [torch.nn.Parameter(tensor) for tensor in before]
    for parameter in expected:
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(expected, lr=1e-3, weight_decay=0.1).step()
    return all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), expected, strict=True))


def test_no_valid_token_at_all_is_an_update_with_zero_gradients() -> None:
    assert all(run_ranks(2, _updates_without_labels, Case(cp=2, ignored=((0, 64),))))


def _largest_errors(case: Case, expected: Result) -> float:
    actual = split_step(case)
    return max(error(actual.grads[name], gradient) for name, gradient in expected.grads.items())


@pytest.mark.parametrize("cp", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_bf16_is_as_good_as_one_bf16_process(cp: int) -> None:
    """Case bf16 merge: partial results merged in bf16 would add 4e-3."""
    args = T0.__class__(64, 8, 8, 2, 128, vocab_size=97)
    bf16 = Case(args=args, seq_len=256, compute_dtype=torch.bfloat16)
    exact = oracle(Case(args=args, seq_len=256, dtype=_FP64))
    single = run_ranks(1, split_step, bf16)[0]
    split = run_ranks(cp, _steps, [bf16.on(cp=cp, load_balancer=lb) for lb in ("headtail", "none")])[0]
    for result in split:
        assert abs(result.loss - exact.loss) <= 2 * max(abs(single.loss - exact.loss), 1e-4)
        for name, gradient in exact.grads.items():
            assert error(result.grads[name], gradient) <= 2 * error(single.grads[name], gradient), name


def _ring_rounding() -> list[float]:
    from torchtitan.distributed.cp import torch_private

    torch_private.kernel_dtype = lambda tensor: torch.float32  # so that only the ring's own roundings are left
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, heads, 256, 8, generator=generator).bfloat16() for heads in (8, 2, 2, 8))
    module = ScaledDotProductAttention()
    apply_cp([module], mesh, seq_len=256)
    local = [tensor.requires_grad_() for tensor in cp_shard(mesh, [q, k, v], seq_dim=2)]
    out = module(*local)
    out.backward(cp_shard(mesh, [grad], seq_dim=2)[0])
    actual = cp_unshard(mesh, [out, *(tensor.grad for tensor in local)], seq_dim=2)
    exact_qkv = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    exact_out = DenseAttention()(*exact_qkv)
    exact_out.backward(grad.double())
    exact = [exact_out.detach(), *(tensor.grad for tensor in exact_qkv)]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(actual, exact, strict=True)]


def test_partial_results_are_merged_and_summed_in_fp32() -> None:
    """Rounding a result to bf16 once costs 1.7e-3 (root mean square); partial sums in bf16 cost 2.5e-3 and more."""
    assert max(run_ranks(4, _ring_rounding)[0]) < 2.2e-3


def _large_logits(dtype: torch.dtype) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = ScaledDotProductAttention()
    apply_cp([module], mesh, seq_len=64)
    generator = torch.Generator().manual_seed(dist.get_rank())
    q, k, v = (torch.randn(1, 2, 32, 8, generator=generator) for _ in range(3))
    q, k, v = (tensor.to(dtype).requires_grad_() for tensor in (q * 60, k * 60, v))  # q k^T / sqrt(8) up to 1e4
    module(q, k, v).sum().backward()
    return all(bool(tensor.grad.isfinite().all()) for tensor in (q, k, v))


def test_large_logits_stay_finite() -> None:
    for dtype in (torch.bfloat16, _FP32):
        assert all(run_ranks(2, _large_logits, dtype))


# Where the tokens lie.


def _placement(cp_sizes: dict[str, list[int]]) -> list[Any]:
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
    two = run_ranks(2, _placement, {})
    assert two[0] == [[0, 1, 2, 3, 12, 13, 14, 15], list(range(8))]
    assert two[1] == [[4, 5, 6, 7, 8, 9, 10, 11], list(range(8, 16))]
    four = run_ranks(4, _placement, {})
    assert [rank[0] for rank in four] == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]


def _round_trips(examples: list[tuple[int, int, str]]) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for batch_size, chunks, balancer in examples:
        x = torch.randn(batch_size, chunks * 2 * dist.get_world_size(), 2, generator=torch.Generator().manual_seed(0))
        (back,) = cp_unshard(mesh, cp_shard(mesh, [x], load_balancer=balancer), load_balancer=balancer)
        assert torch.equal(back, x)
    return True


def test_unshard_undoes_shard_at_any_size() -> None:
    examples: list[tuple[int, int, str]] = []

    @given(st.integers(1, 3), st.integers(1, 9), st.sampled_from(["headtail", "none"]))
    @settings(max_examples=30, deadline=None, database=None)
    def collect(batch_size: int, chunks: int, balancer: str) -> None:
        examples.append((batch_size, chunks, balancer))

    collect()
    for world_size in (2, 3):
        assert all(run_ranks(world_size, _round_trips, examples))


# What is refused.


def _message(call: Any) -> str:
    try:
        call()
    except TitanError as caught:
        return str(caught)
    return "nothing was raised"


def _refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))
    module = ScaledDotProductAttention()
    x = torch.zeros(1, 62)
    case = Case(cp=2)
    model, dims = build_split_model(case)
    cut = local_batch(case, dims)
    whole = make_batch(case)
    half = Batch(*(tensor[:, :16] for tensor in (whole.inputs, whole.labels, whole.positions)))
    return [
        _message(lambda: apply_cp([module], mesh, seq_len=64, method="rings")),
        _message(lambda: apply_cp([module], mesh, seq_len=64, rotate_method="all2all")),
        _message(lambda: apply_cp([module], mesh, seq_len=64, load_balancer="tail")),
        _message(lambda: apply_cp([], mesh, seq_len=64)),
        _message(lambda: cp_shard(mesh, [x])),
        _message(lambda: cp_shard(mesh, [torch.zeros(1, 63)], load_balancer="none")),
        _message(lambda: cp_shard(mesh, [torch.zeros(1, 4), torch.zeros(1, 8)])),
        _message(lambda: cut.cut(CPLayout(2, "headtail", 32), cut.inputs, cut.labels, cut.positions)),
        _message(lambda: model(whole.inputs, whole.positions)),
        _message(lambda: model(half.inputs, half.positions)),
        _message(lambda: whole.cut(CPLayout(2, "headtail", 64), half.inputs, half.labels, half.positions)),
    ]


def test_what_cannot_be_right_is_refused_with_its_numbers() -> None:
    messages = run_ranks(2, _refusals)[0]
    for message, part in zip(
        messages,
        [
            "unknown method 'rings'; did you mean ring?; allowed: ring",
            "unknown rotate_method 'all2all'; did you mean alltoall, allgather?; allowed: allgather, alltoall",
            "unknown load_balancer 'tail'; did you mean headtail?; allowed: headtail, none",
            "found no attention module",
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


# No process-wide state decides.


def _layout_guard() -> tuple[bool, Result, Result]:
    """Shard head-tail, shard plainly, forward, shard again, backward; two models with other settings take turns."""
    before = read_state()
    balanced, plain = Case(cp=2), Case(cp=2, load_balancer="none", rotate_method="alltoall")
    sides = []
    for case in (balanced, plain):
        model, dims = build_split_model(case)
        sides.append((case, model, dims, local_batch(case, dims)))
    totals = []
    for case, model, dims, batch in sides:
        hidden = model(batch.inputs, batch.positions)
        cp_shard(dims.cp_mesh, [torch.zeros(1, 8)], load_balancer="none" if case is balanced else "headtail")
        totals.append(ChunkedCrossEntropy(0)(model.output, hidden, batch.labels))
    for total in totals:
        (total / 128).backward()
    results = []
    for (_, model, _, _), total in zip(sides, totals, strict=True):
        dist.all_reduce(total := total.detach())
        grads = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results.append(Result(float(total) / 128, torch.zeros(1), grads, {}, 0.0))
    restored = all(a is b or a == b for a, b in zip(before, read_state(), strict=True))
    return restored, results[0], results[1]


def test_no_hidden_global_decides_a_result() -> None:
    expected = oracle(Case())
    for restored, *results in run_ranks(2, _layout_guard):
        assert restored
        for result in results:
            assert result.loss == pytest.approx(expected.loss, rel=5e-7)
            for name, gradient in expected.grads.items():
                assert error(result.grads[name], gradient) < 1e-6, name


class _Failing(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def _state_after_failure() -> bool:
    mesh = init_device_mesh("cpu", (2,))
    module = _Failing()
    apply_cp([module], mesh, seq_len=8, load_balancer="none")
    before = read_state()
    qkv = [torch.zeros(1, 1, 4, 4) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        module(*qkv)
    return read_state() == before


def test_state_is_restored_when_attention_fails() -> None:
    assert all(run_ranks(2, _state_after_failure))


# Every option takes its own path.


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


def _strided(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for contiguous in (True, False):
        module = ScaledDotProductAttention()
        apply_cp([module], mesh, seq_len=32)
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        qkv = [torch.randn(1, 16, heads, 8, generator=generator).transpose(1, 2) for heads in (4, 2, 2)]
        qkv = [(tensor.contiguous() if contiguous else tensor).requires_grad_() for tensor in qkv]
        out = module(*qkv)
        out.square().sum().backward()
        results.append(torch.cat([out.detach().flatten(), *(tensor.grad.flatten() for tensor in qkv)]))
    return results[0], results[1]


def test_strided_keys_and_values_give_the_same_bits() -> None:
    """Trap 11: non-contiguous K and V gave wrong losses in torch's ring."""
    for contiguous, strided in run_ranks(2, _strided, 3):
        assert torch.equal(contiguous, strided)


def _same_start(case: Case) -> dict[str, torch.Tensor]:
    model, _ = build_split_model(case)
    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}


def test_initial_weights_are_the_same_bits_in_every_layout() -> None:
    """Case determinism; trap 17: random init on a CPU DTensor draws the same shard on every rank."""
    expected = {name: parameter.detach() for name, parameter in build_model(Case()).named_parameters()}
    for case in (Case(cp=2), Case(dp=2, cp=2)):
        for start in run_ranks(case.dp * case.cp, _same_start, case):
            assert start.keys() == expected.keys()
            assert all(torch.equal(start[name], tensor) for name, tensor in expected.items())
