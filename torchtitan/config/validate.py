"""The rules between options: every user error that can be known before anything is allocated is raised here."""

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Protocol

from torchtitan.attention.masks import PLAIN, MaskKind
from torchtitan.config.cp_method import (
    MASK_BALANCERS,
    CPChoice,
    resolve_cp_method,
    resolve_load_balancer,
    seq_len_factor,
)
from torchtitan.config.job import JobConfig, value_of
from torchtitan.config.sections import ActivationCheckpoint, Checkpoint, Compile, Parallelism, Training
from torchtitan.errors import ConfigError, option_error


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis has; the product is the number of processes."""

    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class Range:
    """The numbers an option allows, and why."""

    rule: str
    low: float
    high: float = math.inf
    above_low: bool = False  # low itself is refused
    below_high: bool = False  # high itself is refused

    def holds(self, value: float) -> bool:
        """Return whether `value` is a finite number of the range; NaN is not."""
        lower = value > self.low if self.above_low else value >= self.low
        upper = value < self.high if self.below_high else value <= self.high
        return lower and upper and math.isfinite(value)


_COUNT = Range("it must be 1 or more", 1)
_COUNT_OR_OFF = Range("it must be 0 (off) or more", 0)
_NON_NEGATIVE = Range("it must be 0 or more, and finite", 0)
_POSITIVE = Range("it must be above 0, and finite", 0, above_low=True)
_SHARE = Range("it must be from 0 to 1", 0, 1)
_DECAY = Range("it must be from 0 to below 1", 0, 1, below_high=True)

RANGES = {
    "model.sliding_window": _COUNT_OR_OFF,
    "model.attention_chunk_size": _COUNT_OR_OFF,
    "model.full_attention_every": _COUNT_OR_OFF,
    "training.local_batch_size": _COUNT,
    "training.seq_len": _COUNT,
    "training.steps": _COUNT,
    "training.max_norm": _NON_NEGATIVE,
    "training.num_workers": _COUNT_OR_OFF,
    "training.gc_freq": _COUNT,
    "training.loss_chunk_tokens": Range("it must be 1 or more, 0 (the whole microbatch) or auto", 0),
    "parallelism.context_parallel_gather_kv_heads": Range("it must be 1 or more, 0 (all at once) or auto", 0),
    "optimizer.lr": _POSITIVE,
    "optimizer.beta1": _DECAY,
    "optimizer.beta2": _DECAY,
    "optimizer.eps": _POSITIVE,
    "optimizer.weight_decay": _NON_NEGATIVE,
    "lr_scheduler.warmup_steps": _COUNT_OR_OFF,
    "lr_scheduler.decay_ratio": _SHARE,
    "lr_scheduler.min_lr_factor": _SHARE,
    "checkpoint.interval": _COUNT,
    "checkpoint.load_step": Range("it must be a step, 0 or more, or -1 for the newest", -1),
    "metrics.log_freq": _COUNT,
    "profiling.profile_freq": _COUNT,
    "comm.init_timeout_seconds": _COUNT,
    "comm.train_timeout_seconds": _COUNT,
    "verify.loss_tolerance": _NON_NEGATIVE,
    "verify.gradient_tolerance": _NON_NEGATIVE,
    "verify.memory_limit_gib": _POSITIVE,
    "debug.seed": Range("it must be from 0 to below 2^63", 0, 2**63, below_high=True),
}
"""The numeric options with a range of their own; degrees and the global batch size have functions instead."""

_MISSING_AXES = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "expert_parallel")
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


def resolve_degrees(parallelism: Parallelism, world_size: int) -> Degrees:
    """Return the degree of every axis for `world_size` processes, with data_parallel_shard_degree -1 derived.

    Raises:
        ConfigError: a degree that is no count, an axis that does not exist yet, or degrees that do not fit the world.
    """
    given = {
        "data_parallel_replicate": parallelism.data_parallel_replicate_degree,
        "data_parallel_shard": parallelism.data_parallel_shard_degree,
        "context_parallel": parallelism.context_parallel_degree,
        "tensor_parallel": parallelism.tensor_parallel_degree,
        "pipeline_parallel": parallelism.pipeline_parallel_degree,
        "expert_parallel": parallelism.expert_parallel_degree,
    }
    _check_counts(given, world_size)
    _check_axes_exist(given, world_size)
    _check_product(given, world_size)
    shard = given["data_parallel_shard"]
    return Degrees(
        dp_replicate=given["data_parallel_replicate"],
        dp_shard=world_size // given["context_parallel"] if shard == -1 else shard,
        cp=given["context_parallel"],
        tp=given["tensor_parallel"],
        pp=given["pipeline_parallel"],
        ep=given["expert_parallel"],
    )


def _check_counts(given: dict[str, int], world_size: int) -> None:
    for axis, degree in given.items():
        if degree < 1 and (axis, degree) != ("data_parallel_shard", -1):
            remedy = f"use --parallelism.{axis}_degree=1 to turn the axis off"
            raise _degree_error(axis, given, world_size, f"{degree} is no number of ranks", remedy)


def _check_axes_exist(given: dict[str, int], world_size: int) -> None:
    for axis in _MISSING_AXES:
        if given[axis] != 1:
            fact = f"this version has no {axis} axis"
            remedy = "use 1, and split by --parallelism.data_parallel_shard_degree or context_parallel_degree"
            raise _degree_error(axis, given, world_size, fact, remedy)


def _check_product(given: dict[str, int], world_size: int) -> None:
    shard, cp = given["data_parallel_shard"], given["context_parallel"]
    if world_size % cp:
        fact = f"{world_size} processes cannot be divided by {cp}"
        fitting = [str(degree) for degree in range(1, world_size + 1) if world_size % degree == 0]
        remedy = f"use {_either(fitting)}, or start {_either(_nearest_multiples(world_size, cp))} processes"
        raise _degree_error("context_parallel", given, world_size, fact, remedy)
    if shard not in (-1, world_size // cp):
        fact = f"{shard} x {cp} = {shard * cp} ranks, not {world_size}"
        remedy = f"use {world_size // cp} or -1 (derived), or start {shard * cp} processes"
        raise _degree_error("data_parallel_shard", given, world_size, fact, remedy)


def _degree_error(axis: str, given: dict[str, int], world_size: int, fact: str, remedy: str) -> ConfigError:
    degrees = " x ".join(f"{name} {degree}" for name, degree in given.items())
    rule = (
        "degrees are 1 (off) or more, their product is the number of processes, and only data_parallel_shard may be -1 "
        f"(derived); given are {degrees} for a world of {world_size}"
    )
    return option_error(f"parallelism.{axis}_degree", given[axis], fact, rule, remedy)


def resolve_global_batch_size(training: Training, dp: int) -> int:
    """Return the sequences of one step over `dp` data-parallel ranks, with global_batch_size -1 derived.

    Raises:
        ConfigError: the size cannot be made of whole microbatches on every rank.
    """
    unit, size = training.local_batch_size * dp, training.global_batch_size
    if size == -1:
        return unit
    if size < 1 or size % unit:
        local = training.local_batch_size
        fact = f"{size} is not a multiple of {unit} = local_batch_size {local} x {dp} data-parallel ranks"
        rule = "every rank does the same number of whole microbatches per step"
        remedy = f"use {_either(_nearest_multiples(size, unit))}, or -1 for one microbatch per rank"
        raise option_error("training.global_batch_size", size, fact, rule, remedy)
    return size


class ModelShape(Protocol):
    """What the rules need to know of the model."""

    @property
    def context_length(self) -> int: ...  # longest sequence in tokens
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def layer_kinds(self) -> tuple[MaskKind, ...]: ...


def is_plain_causal(config: JobConfig, layer_kinds: tuple[MaskKind, ...]) -> bool:
    """Return whether every token attends to all before it in its sequence, in all layers."""
    return config.model.attn_mask == "causal" and set(layer_kinds) == {PLAIN}


def check(config: JobConfig, *, world_size: int, ranks_per_node: int, device_type: str, model: ModelShape) -> None:
    """Raise a ConfigError for the first rule that the configuration breaks; run before anything is allocated."""
    _check_ranges(config)
    _check_dump_folder(config.job.dump_folder)
    degrees = resolve_degrees(config.parallelism, world_size)
    resolve_global_batch_size(config.training, degrees.dp_replicate * degrees.dp_shard)
    _check_context_length(config, model.context_length)
    _check_ulysses(config.parallelism, model.num_heads)
    plain = is_plain_causal(config, model.layer_kinds)
    choice = resolve_cp_method(
        config.parallelism,
        device_type=device_type,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        ranks_per_node=ranks_per_node,
        plain_causal=plain,
    )
    balancer = resolve_load_balancer(config.parallelism, plain_causal=plain)
    _check_ring(config, choice, balancer, plain)
    _check_cut(config, choice, balancer, model.context_length)
    _check_gather(config.parallelism, model.num_kv_heads)
    _check_selective(config.activation_checkpoint)
    _check_compile(config.compile, device_type)
    _check_compiled_ring(config, choice, balancer, degrees.cp)
    _check_decay(config)
    _check_dtypes(config.training, device_type)
    _check_dataset(config.training)
    _check_checkpoint(config, world_size)
    _check_wandb(config)


def _check_ranges(config: JobConfig) -> None:
    for option, allowed in RANGES.items():
        value = value_of(config, option)
        if value not in (None, "auto") and not allowed.holds(value):
            raise option_error(option, value, f"{value} is out of range", allowed.rule, "choose a value within it")


def _check_dump_folder(path: str) -> None:
    folder = Path(path).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    rule, remedy = "the run writes into it, and makes it if absent", "choose a folder that can be written"
    if not existing.is_dir():
        raise option_error("job.dump_folder", path, f"{existing} is a file", rule, remedy)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise option_error("job.dump_folder", path, f"{existing} cannot be written", rule, remedy)


def _check_context_length(config: JobConfig, context_length: int) -> None:
    seq_len = config.training.seq_len
    if seq_len > context_length and config.model.attn_mask == "causal":  # else positions are those in documents
        model = f"{config.model.name} {config.model.flavor}"
        fact = f"{seq_len} tokens are more than the context of {context_length} that {model} is made for"
        rule = "RoPE knows no positions beyond it"
        remedy = f"use at most {context_length}, another --model.flavor, or --model.attn_mask=document"
        raise option_error("training.seq_len", seq_len, fact, rule, remedy)


def _check_ulysses(parallelism: Parallelism, num_heads: int) -> None:
    option, ulysses = "parallelism.context_parallel_ulysses_degree", parallelism.context_parallel_ulysses_degree
    cp = parallelism.context_parallel_degree
    if ulysses < 1:
        fact, rule = f"{ulysses} is no number of ranks", "it is 1 (off) or more"
        raise option_error(option, ulysses, fact, rule, "use 1 to turn the exchange off")
    fitting = [str(degree) for degree in range(1, cp + 1) if cp % degree == 0 and num_heads % degree == 0]
    if cp % ulysses:
        fact = f"{ulysses} does not divide context_parallel_degree {cp}"
        raise option_error(option, ulysses, fact, "it is a part of the cp ranks", f"use {_either(fitting)}")
    if num_heads % ulysses:
        fact = f"the model's {num_heads} query heads cannot be shared out over {ulysses} ranks"
        raise option_error(option, ulysses, fact, "each rank gets as many heads", f"use {_either(fitting)}")


def _check_gather(parallelism: Parallelism, num_kv_heads: int) -> None:
    step = parallelism.context_parallel_gather_kv_heads
    if step != "auto" and step > num_kv_heads:
        fact, rule = f"the model has {num_kv_heads} key/value heads", "it is how many of them travel at a time"
        remedy = f"use at most {num_kv_heads}, 0 for all, or auto"
        raise option_error("parallelism.context_parallel_gather_kv_heads", step, fact, rule, remedy)


def _check_selective(section: ActivationCheckpoint) -> None:
    option = section.selective_ac_option
    if option != "op" and not (option.isdecimal() and int(option) >= 1):
        fact, rule = f"{option} is no way to select", "it is op, or a number N of 1 or more for every N-th layer"
        raise option_error("activation_checkpoint.selective_ac_option", option, fact, rule, "use op or 2")


def _check_compile(section: Compile, device_type: str) -> None:
    if not section.enable:
        return
    compilers = (os.environ.get("CXX", "g++"), "clang++")
    if section.backend == "inductor" and device_type == "cpu" and not any(map(shutil.which, compilers)):
        fact, rule = "there is no C++ compiler on this machine", "inductor compiles C++ code for a CPU"
        remedy = "install g++, name one by CXX=, or use --compile.backend=aot_eager"
        raise option_error("compile.backend", section.backend, fact, rule, remedy)


def _check_ring(config: JobConfig, choice: CPChoice, balancer: str, plain_causal: bool) -> None:
    """Refuse what torch's ring does not know: it would attend by another mask, or to local tokens only."""
    parallelism, model = config.parallelism, config.model
    cp, option = parallelism.context_parallel_degree, "parallelism.context_parallel_method"
    if choice.method != "ring" or cp == choice.ulysses_degree:
        return
    remedy = "use gather or auto, or Ulysses on all cp ranks"
    if not plain_causal:
        masks = {
            "attn_mask": "document" if model.attn_mask == "document" else "",
            "sliding_window": model.sliding_window,
            "attention_chunk_size": model.attention_chunk_size,
        }
        given = " and ".join(f"--model.{name}={value}" for name, value in masks.items() if value)
        fact = f"{given or model.flavor} is not the plain causal mask"
        raise option_error(option, "ring", fact, "the ring knows no other", remedy)
    if model.attn_type != "sdpa":
        fact, rule = f"--model.attn_type={model.attn_type} is not torch's SDPA", "the ring is made of SDPA's kernels"
        raise option_error(option, "ring", fact, rule, f"use --model.attn_type=sdpa, or {remedy}")
    if balancer in MASK_BALANCERS:
        fact = "torch's ring knows head-tail and plain order only"
        rule = f"{balancer} deals the tokens out by their masks, in any order"
        option = "parallelism.context_parallel_load_balancer"
        raise option_error(
            option, balancer, fact, rule, "use headtail, or --parallelism.context_parallel_method=gather"
        )


def _check_compiled_ring(config: JobConfig, choice: CPChoice, balancer: str, cp: int) -> None:
    rounds = cp // choice.ulysses_degree
    if config.compile.enable and choice.method == "ring" and rounds > 1 and balancer == "none":
        # The compiler drops what a rank receives and masks out, and with it the collective that the others wait for.
        fact = "without balancing a rank does not use all that it receives, so compiled ranks would wait for ever"
        rule = "a compiled ring needs a balanced placement"
        remedy = "use headtail, or --parallelism.context_parallel_method=gather, or --compile.no_enable"
        raise option_error("parallelism.context_parallel_load_balancer", balancer, fact, rule, remedy)


def _check_cut(config: JobConfig, choice: CPChoice, load_balancer: str, context_length: int) -> None:
    seq_len, cp = config.training.seq_len, config.parallelism.context_parallel_degree
    rounds = cp // choice.ulysses_degree
    balanced = load_balancer == "headtail" and rounds > 1
    factor = seq_len_factor(cp, load_balancer, ulysses_degree=choice.ulysses_degree)
    if seq_len % factor == 0:
        return
    rule = f"context parallelism cuts a sequence in {cp} equal chunks"
    if balanced and rounds == cp:
        rule = f"head-tail balancing cuts a sequence in 2 x context_parallel_degree {cp} equal chunks"
    elif balanced:
        rule = (
            f"head-tail balancing cuts a sequence in 2 x {rounds} equal chunks (context_parallel_degree {cp} / "
            f"ulysses {choice.ulysses_degree}), and {cp} ranks get equal parts"
        )
    elif load_balancer == "ptrr" and rounds > 1:
        rule = f"ptrr deals out blocks of 128 tokens, as many to each of {rounds} ranks"
    longest = context_length if config.model.attn_mask == "causal" else seq_len + factor
    lengths = [length for length in _nearest_multiples(seq_len, factor) if int(length) <= longest]
    remedies = [_either(lengths)] if lengths else []
    if factor > cp and seq_len % cp == 0:
        remedies.append("--parallelism.context_parallel_load_balancer=none")
    remedies.append("another --parallelism.context_parallel_degree")
    fact = f"{seq_len} is not a multiple of {factor}"
    raise option_error("training.seq_len", seq_len, fact, rule, f"use {', or '.join(remedies)}")


def _check_decay(config: JobConfig) -> None:
    """Refuse a decay that begins within the warm-up: the rate would jump."""
    steps, warmup, ratio = config.training.steps, config.lr_scheduler.warmup_steps, config.lr_scheduler.decay_ratio
    if ratio is None:
        return
    decay = round(steps * ratio)
    if decay > 0 and warmup + decay > steps:
        fact = f"{decay} of {steps} steps decay, after {warmup} of warm-up"
        rule = "warm-up and decay must fit into training.steps"
        remedies = [f"--lr_scheduler.warmup_steps={steps - decay}"]
        if warmup < steps:
            remedies.append(f"--lr_scheduler.decay_ratio={(steps - warmup) / steps:.4g}")
        raise option_error("lr_scheduler.decay_ratio", ratio, fact, rule, f"use {' or '.join(remedies)}")


def _check_dtypes(training: Training, device_type: str) -> None:
    dtypes = {
        "dtype": training.dtype,
        "mixed_precision_param": training.mixed_precision_param,
        "mixed_precision_reduce": training.mixed_precision_reduce,
    }
    for name, dtype in dtypes.items():
        if dtype == "float64" and device_type != "cpu":
            fact = f"this run is on {device_type}, whose attention kernels have no float64"
            rule = "float64 runs on a CPU only"
            remedy = "use float32, or hide the GPUs by CUDA_VISIBLE_DEVICES="
            raise option_error(f"training.{name}", dtype, fact, rule, remedy)
    param, reduce = training.mixed_precision_param, training.mixed_precision_reduce
    if _DTYPE_BYTES[reduce] < _DTYPE_BYTES[param]:
        fact = f"gradients computed in {param} would be summed in {reduce}"
        rule = "the sum must be at least as wide as --training.mixed_precision_param"
        raise option_error("training.mixed_precision_reduce", reduce, fact, rule, f"use {param}")


def _check_dataset(training: Training) -> None:
    path = training.dataset_path
    if training.dataset == "local" and not path:
        fact, rule = "no files are named", "local data is read from --training.dataset_path"
        raise option_error("training.dataset", "local", fact, rule, "give the path of a file or folder")
    if training.dataset == "c4" and training.packing == "best_fit":
        fact, rule = "c4 is streamed, so its documents are not known ahead", "best fit chooses among all of an epoch"
        raise option_error(
            "training.packing", "best_fit", fact, rule, "use stream, or files by --training.dataset_path"
        )
    if training.dataset == "c4" and path:
        fact, rule = "c4 is streamed from the hub and would ignore it", "a path is read with --training.dataset=local"
        raise option_error("training.dataset_path", path, fact, rule, "use --training.dataset=local, or drop the path")
    if path and not glob(str(Path(path).expanduser()), recursive=True) and not Path(path).expanduser().exists():
        raise _missing_path("training.dataset_path", path)


def _check_checkpoint(config: JobConfig, world_size: int) -> None:
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        _check_checkpoints_off(checkpoint)
    if checkpoint.create_seed_checkpoint and world_size > 1:
        fact, rule = f"this run has {world_size} processes", "a seed checkpoint is made in one"
        raise option_error("checkpoint.create_seed_checkpoint", True, fact, rule, "start with NGPU=1")
    if checkpoint.create_seed_checkpoint and checkpoint.load_only:
        fact, rule = "checkpoint.load_only forbids to save", "a seed checkpoint is saved"
        raise option_error("checkpoint.create_seed_checkpoint", True, fact, rule, "use --checkpoint.no_load_only")
    if checkpoint.initial_load_path and not Path(checkpoint.initial_load_path).is_dir():
        raise _missing_path("checkpoint.initial_load_path", checkpoint.initial_load_path)
    _check_something_to_load(checkpoint, Path(config.job.dump_folder))


def _check_checkpoints_off(checkpoint: Checkpoint) -> None:
    """Refuse what would be ignored, with another result, because checkpoints are off."""
    for name in ("load_step", "initial_load_path", "create_seed_checkpoint", "load_only"):
        value = attrgetter(name)(checkpoint)
        if value != attrgetter(name)(Checkpoint()):
            option = f"checkpoint.{name}"
            fact, rule = "checkpoints are off", "nothing is loaded or saved without --checkpoint.enable"
            raise option_error(option, value, fact, rule, f"add --checkpoint.enable, or drop --{option}")


def _check_something_to_load(checkpoint: Checkpoint, dump_folder: Path) -> None:
    if not checkpoint.load_only or checkpoint.initial_load_path:
        return
    folder = dump_folder / checkpoint.folder
    if not any(folder.glob("step-*")):
        fact, rule = f"{folder} holds no step-N folder", "load_only needs something to load"
        remedy = "give --checkpoint.initial_load_path, or another --job.dump_folder or --checkpoint.folder"
        raise option_error("checkpoint.load_only", True, fact, rule, remedy)


def _check_wandb(config: JobConfig) -> None:
    if config.metrics.enable_wandb and find_spec("wandb") is None:
        fact, rule = "the package wandb is not installed", "it is not among this project's dependencies"
        raise option_error("metrics.enable_wandb", True, fact, rule, "pip install wandb")


def _missing_path(option: str, path: str) -> ConfigError:
    fact = f"there is nothing at {Path(path).absolute()}"
    return option_error(option, path, fact, "relative paths start at the caller's folder", "give an existing path")


def _nearest_multiples(value: int, factor: int) -> list[str]:
    """Return the multiples of `factor` just below and just above `value`, as text; none below `factor`."""
    below = value // factor * factor
    return [str(multiple) for multiple in (below, below + factor) if multiple >= factor] or [str(factor)]


def _either(choices: list[str]) -> str:
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def ineffective(config: JobConfig) -> tuple[str, ...]:
    """Return a line for each set of options that differ from their defaults and cannot take effect in this run."""
    idle = ((reason, _changed(config, options)) for reason, options in _idle_groups(config))
    lines = [f"No effect of {', '.join(changed)}: {reason}" for reason, changed in idle if changed]
    steps, warmup = config.training.steps, config.lr_scheduler.warmup_steps
    if warmup >= steps:
        lines.append(f"The warm-up of {warmup} steps lasts for all {steps}: the rate stays below optimizer.lr")
    return tuple(lines)


def _idle_groups(config: JobConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (reason, options) for every switch that is off."""
    if config.parallelism.context_parallel_degree == 1:
        yield "parallelism.context_parallel_degree is 1", _cp_options("ulysses_degree", *_CP_METHOD, "load_balancer")
    yield from _idle_cp(config)
    if not config.checkpoint.enable:
        yield "checkpoint.enable is false", ("checkpoint.folder", "checkpoint.interval")
    elif config.checkpoint.load_only:
        yield "checkpoint.load_only is true", ("checkpoint.interval",)
    if not config.metrics.enable_tensorboard:
        yield "metrics.enable_tensorboard is false", ("metrics.save_tb_folder",)
    if config.activation_checkpoint.mode != "selective":
        yield "activation_checkpoint.mode is not selective", ("activation_checkpoint.selective_ac_option",)
    if not config.compile.enable:
        yield "compile.enable is false", ("compile.backend",)
    if config.model.attn_mask == "causal":
        yield "model.attn_mask is causal", ("training.position_overflow",)
    if not config.model.sliding_window and not config.model.attention_chunk_size:
        yield "no layer has a window or chunks", ("model.full_attention_every",)
    yield from _idle_profiling(config)
    yield from _idle_schedule(config)
    if config.training.dataset == "python_stdlib" and not config.training.dataset_path:
        yield "training.dataset is python_stdlib", ("training.dataset_text_field",)


_CP_METHOD = ("method", "rotate_method", "gather_kv_heads", "keep_gathered")


def _cp_options(*names: str) -> tuple[str, ...]:
    return tuple(f"parallelism.context_parallel_{name}" for name in names)


def _idle_cp(config: JobConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    parallelism = config.parallelism
    if parallelism.context_parallel_degree == 1:
        return
    if parallelism.context_parallel_ulysses_degree == parallelism.context_parallel_degree:
        yield "Ulysses takes all cp ranks", _cp_options(*_CP_METHOD, "load_balancer")
    elif parallelism.context_parallel_method == "gather":
        yield "parallelism.context_parallel_method is gather", _cp_options("rotate_method")
    elif parallelism.context_parallel_method == "ring":
        yield "parallelism.context_parallel_method is ring", _cp_options("gather_kv_heads", "keep_gathered")


def _idle_profiling(config: JobConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    profiling = config.profiling
    if not profiling.enable_profiling:
        yield "profiling.enable_profiling is false", ("profiling.save_traces_folder",)
    if not profiling.enable_memory_snapshot:
        yield "profiling.enable_memory_snapshot is false", ("profiling.save_memory_snapshot_folder",)
    if not (profiling.enable_profiling or profiling.enable_memory_snapshot):
        yield "profiling is off", ("profiling.profile_freq",)


def _idle_schedule(config: JobConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    steps, section = config.training.steps, config.lr_scheduler
    shape = ("lr_scheduler.decay_type", "lr_scheduler.min_lr_factor")
    if section.decay_ratio is not None and round(steps * section.decay_ratio) == 0:
        yield f"lr_scheduler.decay_ratio {section.decay_ratio} leaves no step to decay", shape
    elif section.warmup_steps >= steps:
        yield f"the warm-up of {section.warmup_steps} steps lasts for all {steps}", shape


def _changed(config: JobConfig, options: tuple[str, ...]) -> list[str]:
    defaults = JobConfig()
    return [option for option in options if value_of(config, option) != value_of(defaults, option)]
