"""Checkpoints: torch's distributed format, written aside and renamed when complete on all ranks."""

import logging
import pickle
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
_GIB = 1024**3
_LOGGED_SETTINGS = ("initial_lr", "betas", "eps", "weight_decay")  # of an optimizer, by torch's names
# What a disk, or a file that is not what it should be, makes torch raise.
_FAILURES = (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError)


class Stateful(Protocol):
    """A part of the run that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class ModelState:
    """The parameters and persistent buffers by name, loaded in place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the tensors themselves (shards of them under FSDP), a tied one once."""
        once = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        return {name: tensor for name, tensor in self.model.state_dict().items() if name in once}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: torch reads into the tensors of `state_dict`, which are the model's."""


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
        """Set the state; settings such as the weight decay stay this run's own, and a change is logged."""
        own = [_settings(group) for group in self.optimizer.param_groups]
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=self.options)
        for group, settings in zip(self.optimizer.param_groups, own, strict=True):
            for name, value in settings.items():
                if name in _LOGGED_SETTINGS and group[name] != value:
                    logger.warning(
                        "Checkpoint: it was saved with %s %s; this run goes on with %s", name, group[name], value
                    )
            group.update(settings)


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
        _agree(_attempt(lambda: _check_seen(aside)), f"{aside} could not be written")
        state = {name: part.state_dict() for name, part in self.states.items()}
        self._write(state, aside)
        self._on_first_rank(lambda: _publish(aside, target), target)
        if logger.isEnabledFor(logging.INFO):
            logger.info("Checkpoint: saved %s (%.2f GiB) in %.1f s", target, _size(target), time.perf_counter() - start)

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
        _put_back(self.folder)
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

    def _write(self, state: dict[str, Any], aside: Path) -> None:
        error = _attempt(lambda: dcp.save(state, checkpoint_id=aside))
        try:
            _agree(error, f"{aside} could not be written")
        except CheckpointError:
            if dist.get_rank() == 0:  # all ranks are done: give the space back
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _prepare(self, aside: Path) -> None:
        _put_back(self.folder)
        for leftover in self.folder.glob(".step-*.tmp"):
            shutil.rmtree(leftover)
        aside.mkdir(parents=True)

    def _on_first_rank(self, action: Callable[[], None], path: Path) -> None:
        error = _attempt(action) if dist.get_rank() == 0 else ""
        _agree(error, f"{path} could not be written")


def _publish(aside: Path, target: Path) -> None:
    """Rename a complete save to its name; an older one of that name is moved out first and deleted last."""
    if target.exists():
        target.rename(target.with_name(f".{target.name}.old"))
    try:
        aside.rename(target)
    finally:
        _put_back(target.parent)


def _put_back(folder: Path) -> None:
    """Delete what was replaced, or bring it back where a crash fell between the two renames."""
    for old in folder.glob(".step-*.old"):
        target = folder / old.stem[1:]
        if target.exists():
            shutil.rmtree(old)
        else:
            old.rename(target)


def _check_seen(aside: Path) -> None:
    """Raise a CheckpointError if the folder that rank 0 made is not there for this rank: torch would make its own."""
    if not aside.is_dir():
        raise CheckpointError("this node does not see the folder that rank 0 made; give one that all nodes share")


def _size(path: Path) -> float:
    """Return the size of a folder's files in GiB; NaN if it cannot be read, which no save should fail for."""
    try:
        return sum(file.stat().st_size for file in path.iterdir()) / _GIB
    except OSError:
        return float("nan")


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _attempt(action: Callable[[], Any]) -> str:
    """Run `action`; returns its failure in one line with the rank that had it, empty for none."""
    try:
        action()
    except dcp.api.CheckpointException as error:  # the failures of all ranks, known to each
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_describe(cause)}"
    except (*_FAILURES, CheckpointError) as error:
        return f"rank {dist.get_rank()}: {_describe(error)}"
    return ""


def _describe(error: BaseException) -> str:
    """Return the error in one line."""
    text = str(error).partition("\n")[0] or "no more is known"
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def _agree(error: str, what: str) -> None:
    """Raise a CheckpointError on every rank where any rank has an error."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    first = next(filter(None, errors), "")
    if first:
        raise CheckpointError(f"{what}; first on {first}")


def _from_first_rank(choose: Callable[[], int | None]) -> int | None:
    """Return on every rank what rank 0 chose, or raise its error: file systems may show ranks different listings."""
    answer: list[Any] = [None, ""]
    if dist.get_rank() == 0:
        try:
            answer[0] = choose()
        except (OSError, CheckpointError) as error:
            answer[1] = _describe(error)
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
