"""Checkpoints: torch's distributed format, written aside and renamed when complete on all ranks."""

import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from torchtitan.config.sections import Checkpoint
from torchtitan.errors import CheckpointError

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step-(\d+)")
_LISTED = 20  # keys named in an error
_METADATA = ".metadata"  # written last by torch, so that its presence tells a complete save


class Stateful(Protocol):
    """A part of the run that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class ModelState:
    """The parameters by name, loaded in place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters themselves (shards of them under FSDP)."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: torch reads into the tensors of `state_dict`, which are the parameters."""


class OptimizerState:
    """The optimizer's state by parameter name, whatever the order and the sharding of the parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; of an optimizer that made no step, the state that it will start from."""
        fresh = not self.optimizer.state
        state = get_optimizer_state_dict(self.model, self.optimizer, options=self.options)
        if fresh:  # torch made the state by a step with zero gradients at rate 0, which it counted
            for part in self.optimizer.state.values():
                part["step"].zero_()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state."""
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)


class Checkpointer:
    """Saves and loads `states`; every method is collective. Nothing happens where checkpoints are off."""

    def __init__(self, section: Checkpoint, dump_folder: Path, states: dict[str, Stateful]) -> None:
        self.section = section
        self.folder = dump_folder / section.folder
        self.states = states

    def should_save(self, step: int, *, last: bool) -> bool:
        """Return whether the state after `step` is to be kept."""
        return self.section.enable and not self.section.load_only and (last or step % self.section.interval == 0)

    def save(self, step: int) -> None:
        """Write `step-N`, in place of one of that name; every rank returns when it is complete.

        Raises:
            CheckpointError: some rank could not write; what was there before is untouched.
        """
        start = time.perf_counter()
        target, aside = self.folder / f"step-{step}", self.folder / f".step-{step}.tmp"
        self._on_first_rank(lambda: self._prepare(aside), aside)
        state = {name: part.state_dict() for name, part in self.states.items()}
        _agree(_attempt(lambda: dcp.save(state, checkpoint_id=aside)), f"{aside} could not be written")
        self._on_first_rank(lambda: _publish(aside, target), target)
        logger.info("Checkpoint: saved %s in %.1f s", target, time.perf_counter() - start)

    def load(self) -> None:
        """Load the step that the section asks for, else the initial weights, if any.

        Raises:
            CheckpointError: that step is not there, or it does not fit the model.
        """
        if not self.section.enable or self.section.create_seed_checkpoint:
            return
        step = _from_first_rank(self._choose_step)
        if step is not None:
            self._load(self.folder / f"step-{step}", list(self.states))
        elif self.section.initial_load_path:
            self._load(Path(self.section.initial_load_path), ["model"])

    def steps(self) -> list[int]:
        """Return the steps that are complete, in order."""
        found = ((path, _STEP.fullmatch(path.name)) for path in self.folder.glob("step-*"))
        return sorted(int(match[1]) for path, match in found if match and (path / _METADATA).is_file())

    def _choose_step(self) -> int | None:
        steps, wanted = self.steps(), self.section.load_step
        if wanted == -1:
            return steps[-1] if steps else None
        if wanted not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"--checkpoint.load_step={wanted}: {self.folder} has no such complete step; it has {there}"
            )
        return wanted

    def _load(self, path: Path, names: list[str]) -> None:
        start = time.perf_counter()
        state = {name: self.states[name].state_dict() for name in names}
        _agree(_attempt(lambda: _check_fits(path, state)), f"{path} cannot be loaded")
        _agree(_attempt(lambda: _read(path, state)), f"{path} cannot be loaded")
        for name in names:
            self.states[name].load_state_dict(state[name])
        what = "" if len(names) == len(self.states) else " (weights alone)"
        logger.info("Checkpoint: loaded %s%s in %.1f s", path, what, time.perf_counter() - start)

    def _prepare(self, aside: Path) -> None:
        for leftover in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        aside.mkdir(parents=True)

    def _on_first_rank(self, action: Callable[[], None], path: Path) -> None:
        error = _attempt(action) if dist.get_rank() == 0 else ""
        _agree(error, f"{path} could not be written")


def _publish(aside: Path, target: Path) -> None:
    """Rename a complete save to its name; an older one of that name is moved out first and deleted last."""
    if not target.exists():
        aside.rename(target)
        return
    old = target.with_name(f".{target.name}.old.tmp")
    target.rename(old)
    aside.rename(target)
    shutil.rmtree(old)


def _attempt(action: Callable[[], Any]) -> str:
    """Run `action`; returns the text of its failure, empty for none."""
    try:
        action()
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointError, dcp.api.CheckpointException) as error:
        return f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)
    return ""


def _agree(error: str, what: str) -> None:
    """Raise a CheckpointError on every rank where any rank has an error."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next(((rank, text) for rank, text in enumerate(errors) if text), None)
    if first is not None:
        raise CheckpointError(f"{what}; first on rank {first[0]}: {first[1]}")


def _from_first_rank(choose: Callable[[], int | None]) -> int | None:
    """Return on every rank what rank 0 chose, or raise its error: file systems may show ranks different listings."""
    answer: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            answer[0] = choose()
        except CheckpointError as error:
            answer[1] = str(error)
    dist.broadcast_object_list(answer)
    if answer[1]:
        raise CheckpointError(answer[1])
    return answer[0]


def _read(path: Path, state: dict[str, Any]) -> None:
    """Fill `state` in place.

    The position in the data apart: where each rank has its own, another number of ranks finds keys missing, and the
    loader can say better than torch what that means.
    """
    dcp.load({name: part for name, part in state.items() if name != "dataloader"}, checkpoint_id=path)
    if "dataloader" in state:
        position = {"dataloader": state["dataloader"]}
        dcp.load(position, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))


def _check_fits(path: Path, state: Mapping[str, Any]) -> None:
    """Raise a CheckpointError that lists all parameters that `path` lacks, adds or has in another shape."""
    if not (path / _METADATA).is_file():
        raise CheckpointError("it has no .metadata, so it is no complete checkpoint")
    saved = {
        key: tuple(entry.size)
        for key, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
    }
    wanted = {f"model.{name}": tuple(tensor.shape) for name, tensor in state["model"].items()}
    problems = [f"{key} is missing" for key in wanted.keys() - saved.keys()]
    problems += [f"{key} is not in the model" for key in saved.keys() - wanted.keys()]
    problems += [
        f"{key} is {saved[key]}, the model's is {shape}"
        for key, shape in wanted.items()
        if saved.get(key, shape) != shape
    ]
    if problems:
        listed = "; ".join(sorted(problems)[:_LISTED])
        raise CheckpointError(f"{len(problems)} parameters do not fit: {listed}")
