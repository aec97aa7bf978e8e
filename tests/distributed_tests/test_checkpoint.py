"""Checkpoints on real ranks: complete or absent, bitwise, and clear about what does not fit."""

import logging
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.tensor import DTensor

from tests.helpers.job import Outcome, options, run_job, write_documents
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import T0, Case, build_split_model, local_batch
from torchtitan.components.checkpoint import Checkpointer, ModelState, OptimizerState, _publish
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.config.sections import Checkpoint
from torchtitan.errors import CheckpointError, ConfigError
from torchtitan.runner import SingleStageRunner
from torchtitan.trainer import Trainer

_CASE = Case(cp=2)


class _Counter:
    """A part of the run that is not a tensor."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class _Run:
    """A model under cp 2, its optimizer, a counter, and their checkpointer."""

    def __init__(self, folder: str, case: Case = _CASE, **section: Any) -> None:
        self.case = case
        self.model, self.dims = build_split_model(case)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.counter = _Counter()
        self.checkpointer = Checkpointer(
            replace(Checkpoint(enable=True, interval=2), **section),
            Path(folder),
            {
                "model": ModelState(self.model),
                "optimizer": OptimizerState(self.model, self.optimizer),
                "dataloader": self.counter,
            },
        )

    def update(self) -> None:
        self.optimizer.zero_grad()
        SingleStageRunner(self.model, ChunkedCrossEntropy(0)).forward_backward(local_batch(self.case, self.dims), 128)
        self.optimizer.step()
        self.counter.value += 1

    def tensors(self) -> list[torch.Tensor]:
        state = [value for part in self.optimizer.state.values() for value in part.values()]
        tensors = [*self.model.parameters(), *state]
        return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in tensors]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _saver(folder: str, **section: Any) -> Checkpointer:
    """Return a checkpointer of little, for what does not depend on the content: a weight, and each rank's number."""
    states = {"model": ModelState(nn.Linear(2, 2)), "dataloader": _PerRank()}
    return Checkpointer(Checkpoint(enable=True, **section), Path(folder), states)


def _message(call: Any) -> str:
    try:
        call()
    except (CheckpointError, ConfigError) as caught:
        return str(caught)
    return "nothing was raised"


def _saved_and_loaded(folder: str, tied: bool) -> dict[str, bool]:
    case = _CASE.on(args=replace(T0, tie_embeddings=tied))
    first, unsaved = _Run(folder, case), _Run(folder, case)
    first.checkpointer.save(0)  # of an optimizer that made no step
    for _ in range(2):
        first.update()
        unsaved.update()
    first.checkpointer.save(2)
    after_two = first.tensors()
    first.update()
    second = _Run(folder, case)
    second.checkpointer.load()
    same_at_two, counter = _same(second.tensors(), after_two), second.counter.value
    second.update()
    start = _Run(folder, case, load_step=0)
    start.checkpointer.load()
    for _ in range(2):
        start.update()
    return {
        "loaded equals saved": same_at_two and counter == 2,
        "goes on alike": _same(second.tensors(), first.tensors()),
        "from the beginning alike": _same(start.tensors(), after_two),
        "saving changes nothing": _same(unsaved.tensors(), after_two),
    }


def _resumed_with_other_settings(folder: str) -> tuple[dict[str, Any], list[str]]:
    first = _Run(folder)
    first.update()
    first.checkpointer.save(1)
    second = _Run(folder)
    second.optimizer.param_groups[0].update(weight_decay=0.25, betas=(0.5, 0.6))
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchtitan.components.checkpoint").addHandler(handler)
    second.checkpointer.load()
    return {name: second.optimizer.param_groups[0][name] for name in ("weight_decay", "betas", "eps")}, messages


def test_a_resumed_run_has_its_own_settings_and_says_what_changed(tmp_path: Path) -> None:
    for settings, messages in run_ranks(2, _resumed_with_other_settings, str(tmp_path)):
        assert settings == {"weight_decay": 0.25, "betas": (0.5, 0.6), "eps": 1e-8}
        assert sorted(messages) == [
            "Checkpoint: it was saved with betas (0.9, 0.999); this run goes on with (0.5, 0.6)",
            "Checkpoint: it was saved with weight_decay 0.01; this run goes on with 0.25",
        ]


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path: Path, tied: bool) -> None:
    for rank in run_ranks(2, _saved_and_loaded, str(tmp_path), tied):
        assert all(rank.values()), rank


class _Tied(nn.Module):
    """A weight of two names, and buffers that are kept and that are not."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        nn.init.constant_(self.a.weight, value)
        self.register_buffer("kept", torch.tensor(value))
        self.register_buffer("derived", torch.tensor(value), persistent=False)


def _tied_and_buffered(folder: str) -> tuple[list[str], list[float]]:
    models = _Tied(1.0), _Tied(2.0)
    savers = [Checkpointer(Checkpoint(enable=True), Path(folder), {"model": ModelState(model)}) for model in models]
    savers[0].save(1)
    savers[1].load()
    values = [float(models[1].b.weight.detach()[0, 0]), float(models[1].kept), float(models[1].derived)]
    return sorted(savers[0].states["model"].state_dict()), values


def test_a_tied_weight_is_kept_once_and_persistent_buffers_too(tmp_path: Path) -> None:
    assert run_ranks(1, _tied_and_buffered, str(tmp_path)) == [(["a.weight", "kept"], [1.0, 1.0, 2.0])]


def _choices(folder: str) -> list[Any]:
    run = _Run(folder)
    results: list[Any] = [run.checkpointer.steps()]
    run.checkpointer.load()  # nothing there: a fresh start
    for step in (2, 4):
        run.update()
        run.checkpointer.save(step)
    if dist.get_rank() == 0:
        (Path(folder) / "checkpoint/step-9").mkdir()  # no .metadata: not complete
        (Path(folder) / "checkpoint/.step-8.tmp").mkdir()
        (Path(folder) / "checkpoint/step-best").mkdir()
    dist.barrier()
    newest = _Run(folder)
    newest.checkpointer.load()
    results += [newest.checkpointer.steps(), newest.counter.value]
    results.append(_message(_Run(folder, load_step=3).checkpointer.load))
    run.update()
    run.checkpointer.save(4)  # replaces
    again = _Run(folder, load_step=4)
    again.checkpointer.load()
    results += [again.counter.value, sorted(path.name for path in (Path(folder) / "checkpoint").iterdir())]
    return results


def test_which_step_is_loaded(tmp_path: Path) -> None:
    empty, steps, newest, message, replaced, names = run_ranks(2, _choices, str(tmp_path))[0]
    assert empty == [] and steps == [2, 4] and newest == 2
    assert message.startswith("--checkpoint.load_step=3: ") and message.endswith("it has 2, 4")
    assert replaced == 3
    assert names == ["step-2", "step-4", "step-9", "step-best"]


def _misfits(folder: str) -> list[str]:
    _Run(folder).checkpointer.save(1)
    wider = _Run(folder, _CASE.on(args=replace(T0, hidden_dim=96)))
    before = [parameter.to_local().clone() for parameter in wider.model.parameters()]
    deeper = _Run(folder, _CASE.on(args=replace(T0, num_layers=3)))
    shallower = _Run(folder, _CASE.on(args=replace(T0, num_layers=1)))
    messages = [_message(run.checkpointer.load) for run in (wider, deeper, shallower)]
    messages.append(str(_same([parameter.to_local() for parameter in wider.model.parameters()], before)))
    return messages


def test_a_checkpoint_of_another_model_is_refused_by_parameter(tmp_path: Path) -> None:
    wider, deeper, shallower, untouched = run_ranks(2, _misfits, str(tmp_path))[1]
    assert "6 parameters do not fit" in wider
    assert "model.layers.0.feed_forward.w1.weight is (128, 64), the model's is (96, 64)" in wider
    assert "9 parameters do not fit" in deeper and "model.layers.2.attention.wk.weight is missing" in deeper
    assert "model.layers.1.attention.wk.weight is not in the model" in shallower
    assert untouched == "True"


def _failing_save(folder: str) -> list[Any]:
    saver = _saver(folder, load_step=2)
    weight = saver.states["model"].model.weight
    nn.init.constant_(weight, 1.0)
    saver.save(2)
    nn.init.constant_(weight, 2.0)
    original = FileSystem.create_stream
    if dist.get_rank() == 1:

        def full_disk(*args: Any, **kwargs: Any) -> Any:
            raise OSError(28, "No space left on device")

        FileSystem.create_stream = full_disk
    messages = [_message(partial(saver.save, step)) for step in (4, 2)]  # a new one, and one that is there
    FileSystem.create_stream = original
    dist.barrier()
    names = [path.name for path in (Path(folder) / "checkpoint").iterdir()]
    saver.load()
    saver.save(6)
    return [messages, names, float(weight.detach()[0, 0]), saver.steps()]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_loses_nothing(tmp_path: Path) -> None:
    full = "could not be written; first on rank 1: OSError: [Errno 28] No space left on device"
    for messages, names, weight, steps in run_ranks(2, _failing_save, str(tmp_path)):
        assert all(message.endswith(full) for message in messages), messages
        assert names == ["step-2"] and weight == 1.0
        assert steps == [2, 6]


def test_a_step_stays_in_its_place_where_its_replacement_cannot_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(FileNotFoundError):
        _publish(tmp_path / ".step-1.tmp", tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def _damaged(folder: str) -> list[str]:
    checkpoint = Path(folder) / "checkpoint"
    saver = _saver(folder)
    for step in (1, 2, 3):
        saver.save(step)
    if dist.get_rank() == 0:
        (checkpoint / "step-1/.metadata").write_bytes(b"")
        (checkpoint / "step-2/__1_0.distcp").unlink()
        shard = checkpoint / "step-3/__1_0.distcp"
        shard.write_bytes(shard.read_bytes()[:100])
    dist.barrier()
    return [_message(_saver(folder, load_step=step).load) for step in (1, 2, 3)]


def test_damage_is_told_in_one_line(tmp_path: Path) -> None:
    for metadata, gone, cut in run_ranks(2, _damaged, str(tmp_path)):
        assert metadata.endswith("step-1 cannot be loaded; first on rank 0: EOFError: Ran out of input")
        assert "step-2 cannot be loaded; first on rank " in gone and "FileNotFoundError: " in gone
        assert "step-3 cannot be loaded; first on rank " in cut
        assert "\n" not in metadata + gone + cut


def _replaced(folder: str) -> list[Any]:
    checkpoint = Path(folder) / "checkpoint"
    saver = _saver(folder)
    saver.save(1)
    if dist.get_rank() == 0:
        (checkpoint / "step-1").rename(checkpoint / ".step-1.old")  # a crash between the two renames
    dist.barrier()
    message, there = _message(_saver(folder, load_step=1).load), saver.steps()
    saver.save(1)
    return [message, there, [path.name for path in checkpoint.iterdir()]]


def test_a_replacement_that_was_cut_short_is_undone(tmp_path: Path) -> None:
    for message, there, names in run_ranks(2, _replaced, str(tmp_path)):
        assert message == "nothing was raised" and there == [1] and names == ["step-1"]


def _own_disks(folder: str) -> str:
    return _message(lambda: _saver(f"{folder}/node{dist.get_rank()}").save(1))


def test_nodes_that_do_not_share_the_folder_are_told(tmp_path: Path) -> None:
    for message in run_ranks(2, _own_disks, str(tmp_path)):
        assert "first on rank 1: this node does not see the folder that rank 0 made" in message


def _unwritable(folder: str) -> str:
    saver = _saver(folder)
    if dist.get_rank() == 0:
        (Path(folder) / "checkpoint").write_text("a file where the folder should be")
    dist.barrier()
    return _message(lambda: saver.save(1))


def test_a_folder_that_cannot_be_written_is_named_on_all_ranks(tmp_path: Path) -> None:
    for message in run_ranks(2, _unwritable, str(tmp_path)):
        assert "could not be written; first on rank 0: " in message and "checkpoint" in message


def _initial_weights(folder: str) -> list[bool]:
    first = _Run(folder)
    first.update()
    first.checkpointer.save(1)
    path = str(Path(folder) / "checkpoint/step-1")
    second = _Run(folder + "/other", initial_load_path=path, load_only=True)
    second.checkpointer.load()
    weights = [parameter.to_local() for parameter in first.model.parameters()]
    loaded = [parameter.to_local() for parameter in second.model.parameters()]
    third = _Run(folder + "/other", initial_load_path=path, create_seed_checkpoint=True)
    third.checkpointer.load()
    return [
        _same(loaded, weights),
        second.counter.value == 0 and not second.optimizer.state,
        second.checkpointer.should_save(2, last=True),
        first.checkpointer.should_save(2, last=False) and first.checkpointer.should_save(3, last=True),
        first.checkpointer.should_save(3, last=False),
        _same([parameter.to_local() for parameter in third.model.parameters()], weights),
    ]


def test_initial_weights_alone_and_when_to_save(tmp_path: Path) -> None:
    expected = [True, True, False, True, False, False]
    assert run_ranks(2, _initial_weights, str(tmp_path)) == [expected, expected]


class _Doubled(Trainer):
    """Starts from weights that no seed gives."""

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.parts.model.parameters():
                parameter.mul_(2)
        super().train()


def _job(cache: str, argv: list[str], trainer_class: type[Trainer] = Trainer) -> Outcome:
    os.environ["TORCHTITAN_CACHE"] = cache
    return run_job(argv, trainer_class)


def test_a_seed_checkpoint_is_the_start_of_another_layout(tmp_path: Path) -> None:
    """Breaks when making one trains or logs, or when a run that finds one starts from weights of its own."""
    data, cache = write_documents(tmp_path / "data.jsonl", 20), str(tmp_path / "cache")
    common = {"checkpoint__enable": True, "training__global_batch_size": 2, "training__steps": 1}
    argv = options(tmp_path / "run", data, checkpoint__create_seed_checkpoint=True, **common)
    (seed,) = run_ranks(1, _job, cache, argv, _Doubled)
    assert seed.step == 0 and seed.rows == []
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == ["step-0"]
    argv = options(tmp_path / "run", data, parallelism__context_parallel_degree=2, **common)
    for outcome in run_ranks(2, _job, cache, argv):
        assert outcome.step == 1
        norm = outcome.parameters["norm.weight"]  # starts as ones
        assert torch.allclose(norm, torch.full_like(norm, 2.0), atol=0.01)  # one update of at most the rate


class _PerRank(_Counter):
    """A position of each rank's own, as streamed data have it; it refuses another number of ranks by name."""

    def state_dict(self) -> dict[str, Any]:
        return {"ranks": dist.get_world_size(), f"rank_{dist.get_rank()}": dist.get_rank()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["ranks"] != dist.get_world_size():
            raise ConfigError(f"saved by {state['ranks']} ranks, loaded by {dist.get_world_size()}")
        self.value = state[f"rank_{dist.get_rank()}"]


def _per_rank(folder: str, save: bool) -> Any:
    model = nn.Linear(2, 2)
    part = _PerRank()
    states = {"model": ModelState(model), "dataloader": part}
    checkpointer = Checkpointer(Checkpoint(enable=True), Path(folder), states)
    if save:
        checkpointer.save(1)
    return _message(checkpointer.load), part.value


def test_positions_of_each_rank_and_the_loaders_own_refusal(tmp_path: Path) -> None:
    assert run_ranks(2, _per_rank, str(tmp_path), True) == [("nothing was raised", 0), ("nothing was raised", 1)]
    for message, _ in run_ranks(3, _per_rank, str(tmp_path), False):
        assert message == "saved by 2 ranks, loaded by 3"


def test_off_means_off(tmp_path: Path) -> None:
    checkpointer = Checkpointer(Checkpoint(), tmp_path, {})
    checkpointer.load()
    assert not checkpointer.should_save(500, last=True)
    with pytest.raises(StopIteration):
        next(tmp_path.iterdir())
