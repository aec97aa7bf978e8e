"""Context parallelism against one process with dense attention: the cases that broke other trainers."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

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
    oracle,
    split_step,
)
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.distributed.context_parallel import apply_cp, cp_shard, cp_unshard
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.runner import SingleStageRunner

_FP32, _FP64 = torch.float32, torch.float64
# cases.md, step 1, relative.
_LOSS = {_FP32: 5e-7, _FP64: 1e-12}
_GRADIENT = {_FP32: 1e-6, _FP64: 1e-12}


def _steps(cases: list[Case]) -> list[Result]:
    return [split_step(case) for case in cases]


def _exact(case: Case) -> Result:
    """Return the step in one process in fp64: dense attention in fp32 is itself 8e-7 off, nearly all of 1e-6."""
    return oracle(case.on(dp=1, cp=1, dtype=_FP64))


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
    expected = _exact(Case())
    ranks = run_ranks(cp, _steps, cases)
    for index, case in enumerate(cases):
        _assert_matches(ranks[0][index], expected, case.dtype)


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)])
def test_parity_after_five_updates(cp: int) -> None:
    cases = [Case(cp=cp, dtype=dtype, updates=5) for dtype in (_FP32, _FP64)]
    ranks = run_ranks(cp, _steps, cases)
    fp32, fp64 = ranks[0]
    exact = oracle(Case(dtype=_FP64, updates=5))
    single = oracle(Case(dtype=_FP32, updates=5))
    assert fp32.loss == pytest.approx(single.loss, rel=1e-6)
    assert fp64.loss == pytest.approx(exact.loss, rel=1e-12)
    # fp32: two orders of summation differ by 1e-5 after five updates, where a gradient is so near 0 that a step may
    # have either sign. In which tensor that happens is chance, so the worst of one process is what others may err by.
    allowed = 3 * max(error(single.parameters[name], parameter) for name, parameter in exact.parameters.items())
    for name, parameter in exact.parameters.items():
        assert error(fp64.parameters[name], parameter) < 1e-12, name
        assert error(fp32.parameters[name], parameter) <= allowed, name
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
        _assert_matches(ranks[0][index], _exact(case), _FP32)
    with_checkpoint, without = ranks[0][3], ranks[0][1]
    assert with_checkpoint.loss == without.loss
    for name, gradient in without.grads.items():  # the same mathematics: the same bits
        assert torch.equal(with_checkpoint.grads[name], gradient), name


@pytest.mark.slow
def test_every_mix_of_eight_ranks() -> None:
    cases = [Case(dp=dp, cp=8 // dp, batch_size=8, load_balancer=lb) for dp in (8, 4, 2) for lb in ("headtail", "none")]
    ranks = run_ranks(8, _steps, cases)
    expected = _exact(Case(batch_size=8))
    for result in ranks[0]:
        _assert_matches(result, expected, _FP32)


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
        Case(cp=2, dp=2, ignored=((40, 64),)),
        Case(cp=4, batch_size=1, ignored=((0, 8), (56, 64))),  # rank 0 holds no label
        Case(cp=4, batch_size=4, ignored=((0, 63),)),
        Case(cp=2, dp=2, batch_size=4, ignored=((0, 63),)),
        Case(dp=4, batch_size=4, ignored=((0, 63),)),
    ]
    ranks = run_ranks(4, _steps, cases)
    for index, case in enumerate(cases):
        _assert_matches(ranks[0][index], _exact(case), _FP32)


def _valid_and_loss(case: Case) -> tuple[int, float]:
    model, dims = build_split_model(case)
    batch = local_batch(case, dims)
    total = SingleStageRunner(model, ChunkedCrossEntropy(0)).forward_backward(batch, 48).total
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
    assert float(runner.forward_backward(local_batch(case, dims), 1).total) == 0.0
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


def _large_logits(dtypes: list[torch.dtype]) -> list[tuple[bool, float]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = ScaledDotProductAttention()
    apply_cp([module], mesh, seq_len=64)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 64, 8, generator=generator) * size for size in (60, 60, 1)]
    assert float((whole[0] @ whole[1].transpose(-1, -2)).abs().max()) / 8**0.5 > 1e4
    results = []
    for dtype in dtypes:
        qkv = [tensor.to(dtype) for tensor in whole]
        local = [tensor.requires_grad_() for tensor in cp_shard(mesh, qkv, seq_dim=2)]
        out = module(*local)
        out.sum().backward()
        finite = all(bool(tensor.grad.isfinite().all()) for tensor in local)
        exact = DenseAttention()(*(tensor.double() for tensor in qkv))
        results.append((finite, error(cp_unshard(mesh, [out], seq_dim=2)[0], exact)))
    return results


def test_large_logits_stay_finite_and_right() -> None:
    """Case bf16 merge: log-sum-exps of 1e4 are merged by differences, or exp overflows."""
    for results in run_ranks(2, _large_logits, [torch.bfloat16, _FP32]):
        for finite, distance in results:
            # A logit of 1e4 is exact to 5e-3 in fp32, and so is its probability; bf16 rounds the output once more.
            assert finite and distance < 3e-2


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
