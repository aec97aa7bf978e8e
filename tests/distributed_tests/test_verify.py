"""`verify` passes what is right and finds each fault that is planted, naming where it begins."""

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.bits import why_bits_may_differ
from tests.helpers.job import options, write_documents
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import T0
from torchtitan.attention.masks import LayerMask
from torchtitan.batch import Batch
from torchtitan.build import model_args
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.config.parse import load_config
from torchtitan.distributed import context_parallel
from torchtitan.distributed.cp import gather
from torchtitan.errors import ConfigError
from torchtitan.fingerprints import FingerprintRecorder, fingerprints
from torchtitan.models import get_spec
from torchtitan.tools.stop import StopSignal
from torchtitan.train import Job
from torchtitan.trainer import Trainer
from torchtitan.verify import verify

Plant = Callable[[], type[Trainer]]


def _verify(argv: list[str], trainer_class: type[Trainer]) -> tuple[int, str]:
    get_spec("llama3").flavors["tiny"] = replace(T0, vocab_size=0)
    config, _ = load_config(argv)
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    job = Job(config, model_args(config, tokenizer), tokenizer, torch.device("cpu"), StopSignal())
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = verify(job, trainer_class)
    return code, shown.getvalue()


def _all_pass(argvs: list[list[str]]) -> list[tuple[int, str]]:
    return [_verify(argv, Trainer) for argv in argvs]


def _argvs(folder: Path, world_size: int) -> list[list[str]]:
    data = write_documents(folder / "data.jsonl", 60)
    cp = {"parallelism__context_parallel_degree": world_size}
    layouts: list[dict[str, Any]] = [
        cp,
        {**cp, "parallelism__context_parallel_method": "gather", "activation_checkpoint__mode": "full"},
        {**cp, "parallelism__context_parallel_ulysses_degree": world_size},
        {**cp, "parallelism__context_parallel_method": "auto", "training__mixed_precision_param": "bfloat16"},
        # Many tokens in bf16, of which some are frequent; and so few that gradients of attention are rounding alone.
        {**cp, "training__mixed_precision_param": "bfloat16", "training__seq_len": 8192},
        {"training__seq_len": 1},
        {**cp, "parallelism__context_parallel_ulysses_degree": world_size, "training__seq_len": world_size},
        {"training__mixed_precision_param": "float64", "training__mixed_precision_reduce": "float64",
         "training__dtype": "float64", **cp},
    ]  # fmt: skip
    documents = {"model__attn_mask": "document", "training__seq_len": 512}
    window = {"model__sliding_window": 32, "model__full_attention_every": 2}
    gather_method = {"parallelism__context_parallel_method": "gather"}
    layouts += [
        {**cp, **documents, **gather_method},
        {**cp, **documents, **gather_method, **window, "activation_checkpoint__mode": "full"},
        {
            **cp,
            **gather_method,
            "model__attention_chunk_size": 24,
            "parallelism__context_parallel_load_balancer": "none",
        },
        {**cp, **documents, "parallelism__context_parallel_ulysses_degree": world_size},
    ]
    if world_size > 2:
        half = {"parallelism__context_parallel_ulysses_degree": 2}
        layouts.append({**cp, **half, "parallelism__context_parallel_method": "gather"})
        layouts.append({**cp, "parallelism__context_parallel_degree": 2, "training__local_batch_size": 2})
        selective = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "2"}
        layouts.append({**cp, **half, **selective, "parallelism__context_parallel_load_balancer": "none"})
        layouts.append({**cp, **half, **documents, **gather_method, **window})
    return [options(folder / f"run{index}", data, **layout) for index, layout in enumerate(layouts)]


@pytest.mark.parametrize("world_size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_every_method_is_proven(tmp_path: Path, world_size: int) -> None:
    argvs = _argvs(tmp_path, world_size)
    ranks = run_ranks(world_size, _all_pass, argvs)
    for index, argv in enumerate(argvs):
        _, shown = ranks[0][index]
        assert shown.splitlines()[-1] == "PASSED", (argv, shown)
        assert all(rank[index] == (0, "") for rank in ranks[1:])
        if "load_balancer=none" not in " ".join(argv) and argv[4] != "--training.seq_len=1":
            shares = [float(share) for share in re.findall(r"attention work ([\d. ]+) of an equal", shown)[0].split()]
            # With documents blocks of tokens are dealt out, which are as equal as their costs allow.
            allowed = 1.02 if "--model.attn_mask=document" in argv else 1.0005
            assert max(shares) < allowed and sum(shares) == pytest.approx(world_size, abs=0.005), argv
    if not run_ranks(1, why_bits_may_differ)[0]:
        assert "  token losses   bitwise equal" in ranks[0][1][1]


class _LocalPositions(Trainer):
    def post_dataloading_process(self, microbatch: dict[str, torch.Tensor]) -> Batch:
        batch = super().post_dataloading_process(microbatch)
        local = torch.arange(batch.positions.size(1), dtype=torch.int32)
        return replace(batch, positions=local.expand_as(batch.positions))


class _LabelsShiftedAfterTheSplit(Trainer):
    def post_dataloading_process(self, microbatch: dict[str, torch.Tensor]) -> Batch:
        batch = super().post_dataloading_process(microbatch)
        return replace(batch, labels=batch.inputs.roll(-1, dims=1))


class _DividedByTheLocalCount(Trainer):
    def _count_valid_tokens(self, raw: list[dict[str, torch.Tensor]]) -> int:
        return super()._count_valid_tokens(raw) // self.dims.cp


def _plant_local_positions() -> type[Trainer]:
    return _LocalPositions


def _plant_labels_shifted_after_the_split() -> type[Trainer]:
    return _LabelsShiftedAfterTheSplit


def _plant_loss_divided_by_the_local_count() -> type[Trainer]:
    return _DividedByTheLocalCount


def _plant_mask_in_another_layout() -> type[Trainer]:
    original = context_parallel.apply_gather
    context_parallel.apply_gather = lambda module, settings: original(module, replace(settings, balanced=False))
    return Trainer


def _plant_missing_gradient_reduction() -> type[Trainer]:
    def own_part(grad_kv: torch.Tensor, mask: LayerMask, ranks: dist.ProcessGroup) -> torch.Tensor:
        rows = grad_kv.permute(1, 3, 0, 2, 4).flatten(0, 1)[mask.slots]
        own = rows[: rows.size(0) - int(mask.counts[1].sum())]
        return own.unflatten(0, (grad_kv.size(1), -1)).permute(2, 0, 3, 1, 4)

    gather._returned = own_part
    return Trainer


def _plant_gathered_along_the_wrong_dim() -> type[Trainer]:
    original = gather._gathered

    def gathered(*args: Any) -> Iterator[tuple[slice, torch.Tensor]]:
        for heads, keys_and_values in original(*args):  # [2, B, heads, W, E], from [B, W, 2, heads, E]
            yield heads, keys_and_values.permute(1, 3, 0, 2, 4).reshape(keys_and_values.shape)

    gather._gathered = gathered
    return Trainer


def _plant_gathered_in_the_order_of_the_ranks() -> type[Trainer]:
    original = gather._gathered

    def gathered(k: torch.Tensor, v: torch.Tensor, mask: LayerMask, *args: Any) -> Iterator[tuple[slice, torch.Tensor]]:
        return original(k, v, mask._replace(take=mask.take.sort(1).values), *args)

    gather._gathered = gathered
    return Trainer


def _plant_windows_that_are_dropped() -> type[Trainer]:
    original = gather._layer_mask
    gather._layer_mask = lambda *args: original(*args)._replace(window=0)
    return Trainer


class _DocumentsThatAreDropped(Trainer):
    def post_dataloading_process(self, microbatch: dict[str, Any]) -> Batch:
        planner = context_parallel.MaskPlanner(
            self.parts.model.layer_kinds, self.dims.cp, self.dims.cp_rank, self.options.load_balancer
        )
        return super().post_dataloading_process(
            planner({name: value for name, value in microbatch.items() if name not in ("document_starts", "masks")})
        )


def _plant_documents_that_are_dropped() -> type[Trainer]:
    return _DocumentsThatAreDropped


def _planted(argv: list[str], plant: Plant) -> tuple[int, str]:
    return _verify(argv, plant())


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        # Token 0 of rank 0 has position 0 either way; with head-tail rank 0's late chunk is the first that is wrong.
        (_plant_local_positions, "differs is layers.0.attention.inner_attention, at sequence 0, token 16, on rank 1"),
        (_plant_mask_in_another_layout, "differs is layers.0.attention.inner_attention, at sequence 0, token"),
        (_plant_gathered_along_the_wrong_dim, "differs is layers.0.attention.inner_attention, at sequence 0, token"),
        (
            _plant_gathered_in_the_order_of_the_ranks,
            "differs is layers.0.attention.inner_attention, at sequence 0, token",
        ),
        (_plant_labels_shifted_after_the_split, "FAILED: the loss is off by"),
        (_plant_missing_gradient_reduction, "FAILED: the gradient of layers."),
        (_plant_loss_divided_by_the_local_count, "FAILED: the loss is off by 1.0e+00"),
    ],
)
def test_a_planted_fault_is_found_and_named(tmp_path: Path, plant: Plant, named: str) -> None:
    data = write_documents(tmp_path / "data.jsonl", 60)
    cp = {"parallelism__context_parallel_degree": 2, "parallelism__context_parallel_method": "gather"}
    ranks = run_ranks(2, _planted, options(tmp_path / "run", data, **cp), plant)
    assert [code for code, _ in ranks] == [1, 1]
    last = ranks[0][1].splitlines()[-1]
    assert named in last, ranks[0][1]
    if "differs" not in named:
        assert last.endswith("every module's output agrees, so it lies in the labels, the loss or the backward")


@pytest.mark.parametrize("plant", [_plant_windows_that_are_dropped, _plant_documents_that_are_dropped])
def test_a_dropped_mask_is_found(tmp_path: Path, plant: Plant) -> None:
    """One process attends by the masks of the configuration, whatever the split run made of them."""
    data = write_documents(tmp_path / "data.jsonl", 60)
    layout = {"parallelism__context_parallel_degree": 2, "parallelism__context_parallel_method": "gather"}
    masks = {"model__attn_mask": "document", "model__sliding_window": 8, "training__seq_len": 512}
    ranks = run_ranks(2, _planted, options(tmp_path / "run", data, **layout, **masks), plant)
    assert [code for code, _ in ranks] == [1, 1]
    last = ranks[0][1].splitlines()[-1]
    assert "differs is layers.0.attention.inner_attention, at sequence 0, token" in last, ranks[0][1]


def _refused(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        _verify(argv, Trainer)
    return str(caught.value)


def test_a_model_that_one_process_cannot_hold_is_refused_and_a_smaller_one_named(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data.jsonl", 5)
    message = run_ranks(1, _refused, options(tmp_path, data, model__flavor="8B"))[0]
    assert message.startswith("--verify.memory_limit_gib=16.0: 8B in one process needs about ")
    assert "raise it, or --model.flavor=" in message and "8B needs" not in message.partition("or --model")[2]


def _fingerprinted(model: torch.nn.Module, x: torch.Tensor) -> Any:
    with FingerprintRecorder(model) as recorder:
        model(x)
    return fingerprints(recorder.names, recorder.rows())


def test_fingerprints_name_the_first_module_and_token() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    x = torch.randn(2, 5, 8)
    before = _fingerprinted(model, x)
    assert before.names == ["0", "1", "2"]
    assert before.first_divergence(_fingerprinted(model, x), 0.0) is None
    changed = x.clone()
    changed[1, 3, 2] += 1e-3
    assert before.first_divergence(_fingerprinted(model, changed), 1e-6) == ("0", 1, 3)
    assert before.first_other_bits(_fingerprinted(model, changed)) == ("0", 1, 3)
    changed = x.clone()
    changed[0, 4] *= 1 + 1e-6
    assert before.first_divergence(_fingerprinted(model, changed), 1e-3) is None
    assert before.first_other_bits(_fingerprinted(model, changed)) == ("0", 0, 4)
