"""The training loop on real ranks: what is logged, counted and left must not depend on the layout."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.job import Outcome, options, run_job, write_documents
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import error, full
from torchtitan.components.loss import UNITS_PER_LOSS, LossSum
from torchtitan.trainer import Trainer

# (world size, options): every layout of eight sequences a step.
_LAYOUTS = [
    (1, {}),
    (2, {"parallelism__context_parallel_degree": 2}),
    (4, {"parallelism__context_parallel_degree": 4}),
    (4, {"parallelism__context_parallel_degree": 2}),
    (4, {"parallelism__data_parallel_shard_degree": 4}),
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the token caches of these tests out of the user's."""
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path / "cache"))


def _run(world_size: int, folder: Path, data: Path, cache: Path, **changes: Any) -> list[Outcome]:
    return run_ranks(world_size, _job, str(cache), options(folder, data, **changes))


def _job(cache: str, argv: list[str], trainer_class: type[Trainer] = Trainer) -> Outcome:
    import os

    os.environ["TORCHTITAN_CACHE"] = cache  # the fork server was started before the test set it
    return run_job(argv, trainer_class)


def test_layouts_agree_on_losses_data_and_counts(tmp_path: Path) -> None:
    """Breaks when a rank's tokens are counted twice, read in another order, or weighted by rank."""
    data = write_documents(tmp_path / "data.jsonl", 40)
    outcomes = [
        _run(
            world,
            tmp_path / f"run{index}",
            data,
            tmp_path / "cache",
            training__steps=5,
            training__global_batch_size=8,
            training__local_batch_size=2,
            **layout,
        )[0]
        for index, (world, layout) in enumerate(_LAYOUTS)
    ]
    expected = outcomes[0]
    assert expected.tokens_seen == 5 * 8 * 64 == 2560
    for outcome in outcomes[1:]:
        assert outcome.tokens_seen == expected.tokens_seen
        assert [row["tokens_seen"] for row in outcome.rows] == [row["tokens_seen"] for row in expected.rows]
        losses, wanted = ([row["loss"] for row in o.rows] for o in (outcome, expected))
        assert losses[0] == pytest.approx(wanted[0], rel=5e-7)
        assert losses == pytest.approx(wanted, rel=1e-6)  # cases.md: after 5 AdamW updates
        assert outcome.rows[0]["grad_norm"] == pytest.approx(expected.rows[0]["grad_norm"], rel=1e-6)


@pytest.mark.slow
def test_twenty_steps_agree_over_all_degrees(tmp_path: Path) -> None:
    """The issue's line: cp and dp_shard 1, 2, 4, 8, one global batch, 20 steps within 1e-5 in fp32."""
    data = write_documents(tmp_path / "data.jsonl", 60)
    common = {"training__steps": 20, "training__global_batch_size": 8, "optimizer__lr": 1e-3}
    expected = _run(1, tmp_path / "one", data, tmp_path / "cache", **common)[0]
    for degree in (2, 4, 8):
        for axis in ("context_parallel", "data_parallel_shard"):
            layout = {f"parallelism__{axis}_degree": degree}
            outcome = _run(degree, tmp_path / f"{axis}{degree}", data, tmp_path / "cache", **common, **layout)[0]
            assert outcome.tokens_seen == expected.tokens_seen
            losses, wanted = ([row["loss"] for row in o.rows] for o in (outcome, expected))
            assert losses == pytest.approx(wanted, rel=1e-5), (axis, degree)


_PACKED = {
    "model__attn_mask": "document",
    "training__packing": "best_fit",
    "training__position_overflow": "restart",
    "parallelism__context_parallel_method": "gather",
}


@pytest.mark.slow
def test_fifty_steps_of_packed_documents_agree(tmp_path: Path) -> None:
    """The standard library's documents, packed; greedy on four ranks and one process, within 1e-5 over 50 steps."""
    common = {**_PACKED, "training__steps": 50, "training__seq_len": 512, "optimizer__lr": 1e-3}
    common |= {"training__global_batch_size": 2, "training__dataset_path": ""}
    expected = _run(1, tmp_path / "one", tmp_path, tmp_path / "cache", **common)[0]
    layout = {"parallelism__context_parallel_degree": 4, "parallelism__context_parallel_load_balancer": "greedy"}
    found = _run(4, tmp_path / "four", tmp_path, tmp_path / "cache", **common, **layout)[0]
    assert len(found.rows) == 50
    for row, wanted in zip(found.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5), row["step"]


def test_documents_in_the_trainer(tmp_path: Path) -> None:
    """Masks reach the model from the loader; FLOPs, balance and traffic are those of the masks."""
    data = write_documents(tmp_path / "data.jsonl", 90, longest=20)
    common = {**_PACKED, "training__packing": "stream", "training__global_batch_size": 2}
    single = _run(1, tmp_path / "one", data, tmp_path / "cache", **common)[0]
    layout = {"parallelism__context_parallel_degree": 2}
    split = _run(2, tmp_path / "two", data, tmp_path / "cache", **common, **layout)[0]
    causal = _run(1, tmp_path / "causal", data, tmp_path / "cache", training__global_batch_size=2)[0]
    for row, wanted, other in zip(split.rows, single.rows, causal.rows, strict=True):
        assert row["loss"] == pytest.approx(wanted["loss"], rel=2e-6)
        assert row["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
        assert abs(row["loss"] - other["loss"]) > 1e-4 * other["loss"]
        assert wanted["attention_balance"] == 1.0 and wanted["kv_travelled"] is None
        assert 1.0 <= row["attention_balance"] < 1.5 and 0 < row["kv_travelled"] < 1
    flops = [outcome.rows[0]["tflops"] * outcome.rows[0]["seconds_per_step"] for outcome in (single, causal)]
    assert flops[0] < flops[1]
    assert split.rows[0]["tflops"] * split.rows[0]["seconds_per_step"] * 2 == pytest.approx(flops[0])


def test_two_runs_are_equal_bit_for_bit(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data.jsonl", 40)
    layout = {"parallelism__context_parallel_degree": 4}
    first, second = (_run(4, tmp_path / name, data, tmp_path / "cache", **layout) for name in ("a", "b"))
    for one, other in zip(first, second, strict=True):
        _assert_same_numbers(one.rows, other.rows)
        _assert_same_state(one, other)


def test_resume_is_bitwise_equal_to_not_stopping(tmp_path: Path) -> None:
    """Case resume: five rows, so that an epoch ends inside; accumulation 2; save at 3, go on to 6."""
    data = write_documents(tmp_path / "data.jsonl", 5)
    common = {
        "training__steps": 6,
        "training__global_batch_size": 2,
        "parallelism__context_parallel_degree": 2,
        "checkpoint__enable": True,
        "checkpoint__interval": 3,
    }
    whole = _run(2, tmp_path / "whole", data, tmp_path / "cache", **common)
    import shutil

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoint/step-6")
    resumed = _run(2, tmp_path / "resumed", data, tmp_path / "cache", **common)
    for one, other in zip(whole, resumed, strict=True):
        assert [row["step"] for row in other.rows] == [1, 2, 3, 4, 5, 6]
        _assert_same_numbers(one.rows, other.rows)
        _assert_same_state(one, other)
        assert (one.step, one.tokens_seen) == (other.step, other.tokens_seen)


class _PoisonedGradient(Trainer):
    """Puts NaN into one gradient of rank 1 at step 2, which is not logged."""

    def train_step(self, microbatches: Any) -> bool:
        if self.step == 1 and dist.get_rank() == 1:
            self.parts.runner.forward_backward = _poison(self.parts.runner.forward_backward, self.parts.model)
        return super().train_step(microbatches)


def _poison(forward_backward: Any, model: torch.nn.Module) -> Any:
    def poisoned(*args: Any) -> torch.Tensor:
        loss = forward_backward(*args)
        next(iter(model.parameters())).grad.to_local()[0, 0] = float("nan")
        return loss

    return poisoned


def test_a_nan_gradient_on_one_rank_stops_all_before_the_update(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data.jsonl", 40)
    changes = {
        "parallelism__context_parallel_degree": 2,
        "metrics__log_freq": 10,
        "lr_scheduler__warmup_steps": 0,
        "lr_scheduler__decay_ratio": 0.0,  # one rate for all steps, however many there are
    }
    before = _run(2, tmp_path / "a", data, tmp_path / "cache", training__steps=1, **changes)
    argv = options(tmp_path / "b", data, **changes)
    ended = run_ranks(2, _job, str(tmp_path / "cache"), argv, _PoisonedGradient)
    for one, other in zip(before, ended, strict=True):
        assert "step 2: the gradient norm is nan" in other.error
        assert other.step == 1
        # The rate of step 1 is the same in both runs, so the parameters after it are.
        for name, parameter in one.parameters.items():
            assert torch.equal(parameter, other.parameters[name]), name


class _OtherSample(Trainer):
    """Feeds rank 1 another sample than its cp group."""

    def post_dataloading_process(self, microbatch: dict[str, torch.Tensor]) -> Any:
        if dist.get_rank() == 1:
            microbatch = {**microbatch, "input": microbatch["input"].roll(1, -1)}
        return super().post_dataloading_process(microbatch)


def test_other_data_on_a_cp_rank_is_an_error_that_names_both(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data.jsonl", 40)
    argv = options(tmp_path / "a", data, parallelism__context_parallel_degree=2)
    for outcome in run_ranks(2, _job, str(tmp_path / "cache"), argv, _OtherSample):
        assert "ranks 0 and 1 are of one cp group but were fed different samples" in outcome.error
        assert outcome.step == 0


class _NoLabels(Trainer):
    """Ignores every label of step 1."""

    def train_step(self, microbatches: Any) -> bool:
        if self.step > 0:
            return super().train_step(microbatches)
        raw = next(microbatches)
        return super().train_step(iter([{**raw, "labels": torch.full_like(raw["labels"], -100)}]))


def _warned_job(cache: str, argv: list[str]) -> tuple[Outcome, list[str]]:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan.trainer").addHandler(handler)
    return _job(cache, argv, _NoLabels), warnings


def test_a_step_without_labels_does_nothing_but_decay(tmp_path: Path) -> None:
    """Case no valid token: loss and norm exactly 0, never NaN, and a warning that names the step."""
    data = write_documents(tmp_path / "data.jsonl", 40)
    argv = options(tmp_path / "a", data, parallelism__context_parallel_degree=2, training__steps=2)
    for outcome, warnings in run_ranks(2, _warned_job, str(tmp_path / "cache"), argv):
        assert warnings == ["Step 1 has no valid token: its loss and gradients are 0"]
        assert outcome.rows[0]["loss"] == 0.0
        assert outcome.rows[0]["grad_norm"] == 0.0
        assert outcome.rows[1]["loss"] > 0
        assert all(torch.isfinite(parameter).all() for parameter in outcome.parameters.values())


class _FewLabels(Trainer):
    """Keeps 64, 8 and 1 labels of three pairs of sequences, and the gradients of the step."""

    kept = torch.tensor([32, 32, 4, 4, 1, 0])  # of each sequence of the global batch

    def train_step(self, microbatches: Any) -> bool:
        raw = [next(microbatches) for _ in range(self.options.num_microbatches)]
        own = self.kept.view(len(raw), self.dims.dp_shard, -1)[:, self.dims.dp_rank]
        for microbatch, counts in zip(raw, own, strict=True):
            for labels, count in zip(microbatch["labels"], counts, strict=True):
                labels[count:] = -100
        return super().train_step(iter(raw))

    def _check_finite(self, *args: Any) -> None:
        type(self).gradients = {name: full(p.grad) for name, p in self.parts.model.named_parameters()}
        super()._check_finite(*args)


def _gradients_job(cache: str, argv: list[str]) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    outcome = _job(cache, argv, _FewLabels)
    return _FewLabels.gradients, outcome.rows


def test_accumulation_divides_once_by_all_valid_tokens(tmp_path: Path) -> None:
    """Case accumulation: dp 2 x cp 2, three microbatches of 64, 8 and 1 valid tokens, against one big batch."""
    data = write_documents(tmp_path / "data.jsonl", 40)
    common = {"training__global_batch_size": 6, "training__steps": 1}
    runs = []
    for world_size, layout in (
        (1, {"training__local_batch_size": 6}),
        (4, {"training__local_batch_size": 1, "parallelism__context_parallel_degree": 2}),
    ):
        argv = options(tmp_path / f"{world_size}", data, **common, **layout)
        runs.append(run_ranks(world_size, _gradients_job, str(tmp_path / "cache"), argv)[0])
    (gradients, (row,)), (accumulated, (accumulated_row,)) = runs
    assert accumulated_row["loss"] == pytest.approx(row["loss"], rel=5e-7)
    assert accumulated_row["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-6)
    for name, gradient in gradients.items():
        # Both sides are fp32, each with an error of its own: twice what cases.md allows against the exact gradient.
        assert error(accumulated[name], gradient) < 2e-6, name


def test_max_loss_is_that_of_rank_means(tmp_path: Path) -> None:
    """Case max loss: local sums 20 over 10 tokens and 90 over 30."""
    data = write_documents(tmp_path / "data.jsonl", 40)
    argv = options(tmp_path / "a", data, parallelism__context_parallel_degree=2, training__steps=1)
    summary = run_ranks(2, _summary_job, str(tmp_path / "cache"), argv)
    assert all(each == (2.75, 3.0) for each in summary)


class _TwoSums(Trainer):
    """Reports 20 over 10 tokens on rank 0 and 90 over 30 on rank 1."""

    def train(self) -> None:
        rank = dist.get_rank()
        batch = self.post_dataloading_process(next(iter(self.parts.dataloader)))
        batch.labels.fill_(-100)
        batch.labels.flatten()[: (10, 30)[rank]] = 1
        total = torch.tensor((20.0, 90.0)[rank], dtype=torch.float64)
        loss = LossSum(total, (total * UNITS_PER_LOSS).long(), torch.tensor(0), torch.zeros(0))
        self.summary = self._summarise(loss, [batch], 40)


def _summary_job(cache: str, argv: list[str]) -> tuple[float, float]:
    seen = []

    class Seen(_TwoSums):
        def close(self) -> None:
            seen.append(self.summary)
            super().close()

    _job(cache, argv, Seen)
    return seen[0].loss, seen[0].loss_max


def _assert_same_numbers(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    keys = ("step", "loss_hex", "grad_norm_hex", "lr", "tokens_seen")
    assert [[row[key] for key in keys] for row in one] == [[row[key] for key in keys] for row in other]


def _assert_same_state(one: Outcome, other: Outcome) -> None:
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, other.parameters[name]), name
    assert len(one.optimizer) == len(other.optimizer) > 0
    assert all(torch.equal(a, b) for a, b in zip(one.optimizer, other.optimizer, strict=True))
