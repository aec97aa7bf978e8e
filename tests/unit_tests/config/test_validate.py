"""Every rule between options, with the text it is refused by. A lost rule lets a run start that cannot be right."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.attention.masks import PLAIN, MaskKind
from torchtitan.config.job import OPTIONS, JobConfig
from torchtitan.config.parse import load_config
from torchtitan.config.sections import Job, Parallelism, Training
from torchtitan.config.validate import (
    RANGES,
    Degrees,
    check,
    ineffective,
    resolve_degrees,
    resolve_global_batch_size,
)
from torchtitan.errors import ConfigError

AXES = (
    "data_parallel_replicate 1 x data_parallel_shard -1 x context_parallel {cp} x tensor_parallel 1 x "
    "pipeline_parallel 1 x expert_parallel 1 for a world of {world}"
)
DEGREES = (
    "degrees are 1 (off) or more, their product is the number of processes, and only data_parallel_shard may be -1 "
    f"(derived); given are {AXES}"
)


def config_of(**options: Any) -> JobConfig:
    """Return the defaults with some options changed, named section__option."""
    config = JobConfig()
    for name, value in options.items():
        section, _, option = name.partition("__")
        config = replace(config, **{section: replace(getattr(config, section), **{option: value})})
    return config


def run_check(
    config: JobConfig,
    world_size: int = 1,
    device_type: str = "cpu",
    context_length: int = 131072,
    layer_kinds: tuple[MaskKind, ...] = (PLAIN,),
) -> None:
    """Check with what most tests do not care about filled in."""
    model = SimpleNamespace(context_length=context_length, num_heads=8, num_kv_heads=2, layer_kinds=layer_kinds)
    check(config, world_size=world_size, ranks_per_node=world_size, device_type=device_type, model=model)


def refusal(config: JobConfig, **environment: Any) -> str:
    """Return the message that the configuration is refused with."""
    with pytest.raises(ConfigError) as caught:
        run_check(config, **environment)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_are_accepted() -> None:
    run_check(JobConfig())
    run_check(JobConfig(), world_size=8, device_type="cuda")


@pytest.mark.parametrize(
    ("cp", "fact", "remedy"),
    [
        (3, "8 processes cannot be divided by 3", "use 1, 2, 4 or 8, or start 6 or 9 processes"),
        (16, "8 processes cannot be divided by 16", "use 1, 2, 4 or 8, or start 16 processes"),
        (0, "0 is no number of ranks", "use --parallelism.context_parallel_degree=1 to turn the axis off"),
        (-2, "-2 is no number of ranks", "use --parallelism.context_parallel_degree=1 to turn the axis off"),
        (-1, "-1 is no number of ranks", "use --parallelism.context_parallel_degree=1 to turn the axis off"),
    ],
)
def test_bad_degrees_name_every_degree_and_the_world(cp: int, fact: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_degrees(Parallelism(context_parallel_degree=cp), 8)
    rule = DEGREES.format(cp=cp, world=8)
    assert str(caught.value) == f"--parallelism.context_parallel_degree={cp}: {fact}; {rule}; {remedy}"


@pytest.mark.parametrize("degree", [0, -2])
def test_shard_degree_is_a_count_or_minus_one(degree: int) -> None:
    message = refusal(config_of(parallelism__data_parallel_shard_degree=degree), world_size=8)
    assert message.startswith(f"--parallelism.data_parallel_shard_degree={degree}: {degree} is no number of ranks; ")


def test_degrees_that_do_not_fill_the_world() -> None:
    config = config_of(parallelism__data_parallel_shard_degree=2, parallelism__context_parallel_degree=2)
    message = refusal(config, world_size=8)
    assert message.startswith("--parallelism.data_parallel_shard_degree=2: 2 x 2 = 4 ranks, not 8; degrees are 1 (off)")
    assert "data_parallel_shard 2 x context_parallel 2 x " in message
    assert message.endswith("for a world of 8; use 4 or -1 (derived), or start 4 processes")


@pytest.mark.parametrize("axis", ["data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "expert_parallel"])
def test_axes_that_do_not_exist_are_refused_by_name(axis: str) -> None:
    message = refusal(config_of(**{f"parallelism__{axis}_degree": 2}), world_size=2)
    assert message.startswith(f"--parallelism.{axis}_degree=2: this version has no {axis} axis; degrees are 1 (off)")
    assert f"{axis} 2" in message
    remedy = "use 1, and split by --parallelism.data_parallel_shard_degree or context_parallel_degree"
    assert message.endswith(f"for a world of 2; {remedy}")


@pytest.mark.parametrize("axis", ["data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "expert_parallel"])
@pytest.mark.parametrize("degree", [0, -1])
def test_only_the_shard_degree_is_derived(axis: str, degree: int) -> None:
    message = refusal(config_of(**{f"parallelism__{axis}_degree": degree}))
    assert message.startswith(f"--parallelism.{axis}_degree={degree}: {degree} is no number of ranks; ")


@settings(deadline=None)
@given(shard=st.integers(-2, 9) | st.just(-1), cp=st.integers(-2, 9), world=st.integers(1, 16))
def test_degrees_fill_the_world_or_are_refused(shard: int, cp: int, world: int) -> None:
    parallelism = Parallelism(data_parallel_shard_degree=shard, context_parallel_degree=cp)
    valid = cp >= 1 and world % cp == 0 and (shard == -1 or (shard >= 1 and shard * cp == world))
    if valid:
        assert resolve_degrees(parallelism, world) == Degrees(1, world // cp, cp, 1, 1, 1)
    else:
        with pytest.raises(
            ConfigError, match=f"data_parallel_shard {shard} x context_parallel {cp} .* world of {world}"
        ):
            resolve_degrees(parallelism, world)


@pytest.mark.parametrize(("size", "choices"), [(10, "8 or 16"), (3, "8"), (0, "8"), (-2, "8"), (17, "16 or 24")])
def test_global_batch_of_broken_microbatches(size: int, choices: str) -> None:
    config = config_of(training__global_batch_size=size, training__local_batch_size=4)
    assert refusal(config, world_size=2) == (
        f"--training.global_batch_size={size}: {size} is not a multiple of 8 = local_batch_size 4 x 2 data-parallel "
        f"ranks; every rank does the same number of whole microbatches per step; use {choices}, or -1 for one "
        "microbatch per rank"
    )


@settings(deadline=None)
@given(size=st.integers(1, 200) | st.just(-1), local=st.integers(1, 9), dp=st.integers(1, 9))
def test_global_batch_is_whole_microbatches(size: int, local: int, dp: int) -> None:
    training = Training(global_batch_size=size, local_batch_size=local)
    if size == -1:
        assert resolve_global_batch_size(training, dp) == local * dp
    elif size % (local * dp) == 0:
        assert resolve_global_batch_size(training, dp) == size
    else:
        with pytest.raises(ConfigError, match="is not a multiple"):
            resolve_global_batch_size(training, dp)


def test_context_parallel_ranks_share_samples() -> None:
    """The global batch counts data-parallel ranks, not processes."""
    config = config_of(training__global_batch_size=2, training__local_batch_size=2)
    run_check(replace(config, parallelism=Parallelism(context_parallel_degree=8)), world_size=8)


@pytest.mark.parametrize(
    ("seq_len", "cp", "balancer", "text"),
    [
        (
            62,
            2,
            "headtail",
            (
                "62 is not a multiple of 4; head-tail balancing cuts a sequence in 2 x context_parallel_degree 2 equal "
                "chunks; use 60 or 64, or --parallelism.context_parallel_load_balancer=none, or another "
                "--parallelism.context_parallel_degree"
            ),
        ),
        (
            63,
            2,
            "none",
            (
                "63 is not a multiple of 2; context parallelism cuts a sequence in 2 equal chunks; use 62 or 64, or "
                "another --parallelism.context_parallel_degree"
            ),
        ),
        (63, 2, "headtail", "63 is not a multiple of 4; .* use 60 or 64, or another"),
        (
            10,
            4,
            "none",
            "10 is not a multiple of 4; context parallelism cuts a sequence in 4 equal chunks; use 8 or 12",
        ),
        (10, 4, "headtail", "10 is not a multiple of 8; head-tail balancing .* use 8 or 16, or another"),
        (3, 4, "none", "3 is not a multiple of 4; .* use 4, or another"),
        (3, 4, "headtail", "3 is not a multiple of 8; .* use 8, or another"),
    ],
)
def test_bad_lengths_name_the_nearest_valid_ones(seq_len: int, cp: int, balancer: str, text: str) -> None:
    config = config_of(
        training__seq_len=seq_len,
        parallelism__context_parallel_degree=cp,
        parallelism__context_parallel_load_balancer=balancer,
    )
    with pytest.raises(ConfigError, match=f"--training.seq_len={seq_len}: {text}"):
        run_check(config, world_size=cp)


@pytest.mark.parametrize(("seq_len", "cp"), [(64, 1), (63, 1), (1, 1), (64, 2), (16, 8)])
def test_good_lengths(seq_len: int, cp: int) -> None:
    run_check(config_of(training__seq_len=seq_len, parallelism__context_parallel_degree=cp), world_size=cp)


@settings(deadline=None)
@given(seq_len=st.integers(1, 300), cp=st.integers(1, 9), balancer=st.sampled_from(["headtail", "none"]))
def test_lengths_that_are_proposed_are_accepted(seq_len: int, cp: int, balancer: str) -> None:
    config = config_of(
        training__seq_len=seq_len,
        parallelism__context_parallel_degree=cp,
        parallelism__context_parallel_load_balancer=balancer,
    )
    factor = 1 if cp == 1 else cp if balancer == "none" else 2 * cp
    if seq_len % factor == 0:
        run_check(config, world_size=cp)
        return
    message = refusal(config, world_size=cp)
    proposed = [int(word.rstrip(",")) for word in message.split("; use ")[1].split(", or")[0].split(" or ")]
    assert proposed == [
        length for length in (seq_len // factor * factor, seq_len // factor * factor + factor) if length
    ]
    for length in proposed:
        run_check(replace(config, training=replace(config.training, seq_len=length)), world_size=cp)


def test_lengths_beyond_the_context_are_not_proposed() -> None:
    config = config_of(training__seq_len=62, parallelism__context_parallel_degree=2)
    assert "; use 60, or --" in refusal(config, world_size=2, context_length=62)
    config = config_of(training__seq_len=3, parallelism__context_parallel_degree=2)
    assert "; use another --parallelism" in refusal(config, world_size=2, context_length=3)


def test_rope_limit_names_both_lengths() -> None:
    config = config_of(training__seq_len=256, parallelism__context_parallel_degree=2)
    assert refusal(config, world_size=2, context_length=128) == (
        "--training.seq_len=256: 256 tokens are more than the context of 128 that llama3 debugmodel is made for; RoPE "
        "knows no positions beyond it; use at most 128, another --model.flavor, or --model.attn_mask=document"
    )
    run_check(replace(config, training=replace(config.training, seq_len=128)), world_size=2, context_length=128)


@pytest.mark.parametrize("seq_len", [256, 131072])
def test_documents_fit_the_context_each_by_itself(seq_len: int) -> None:
    """A row may be longer than the context where positions begin anew in it; the loader sees to the documents."""
    config = config_of(training__seq_len=seq_len, model__attn_mask="document")
    run_check(config, context_length=128)
    assert "more than the context of 128" in refusal(config_of(training__seq_len=seq_len), context_length=128)
    window = (MaskKind(window=64),)  # bounds how far a token sees, not its position
    assert "more than the context of 128" in refusal(
        config_of(training__seq_len=seq_len, model__sliding_window=64), context_length=128, layer_kinds=window
    )


def test_lengths_beyond_the_context_are_proposed_for_documents() -> None:
    config = config_of(
        training__seq_len=1023,
        model__attn_mask="document",
        parallelism__context_parallel_degree=2,
        parallelism__context_parallel_method="gather",
    )
    assert "; use 1022 or 1024, or another --parallelism" in refusal(config, world_size=2, context_length=128)
    run_check(replace(config, training=replace(config.training, seq_len=1024)), world_size=2, context_length=128)


def outside(option: str) -> list[float]:
    """Return numbers just outside the option's range, and those that are in no range."""
    allowed = RANGES[option]
    whole = OPTIONS[option] is int
    below = allowed.low if allowed.above_low else allowed.low - (1 if whole else 1e-9)
    above = [] if allowed.high == float("inf") else [allowed.high if allowed.below_high else allowed.high + 1e-9]
    return [below, *above, *([] if whole else [float("nan"), float("inf"), float("-inf")])]


@pytest.mark.parametrize("option", RANGES)
def test_numbers_out_of_range(option: str) -> None:
    for value in outside(option):
        message = refusal(config_of(**{option.replace(".", "__"): value}))
        rule = RANGES[option].rule
        assert message == f"--{option}={value}: {value} is out of range; {rule}; choose a value within it"


@pytest.mark.parametrize(
    "option",
    [
        "training.local_batch_size",
        "training.seq_len",
        "training.steps",
        "training.gc_freq",
        "optimizer.lr",
        "optimizer.eps",
        "checkpoint.interval",
        "metrics.log_freq",
        "profiling.profile_freq",
        "comm.init_timeout_seconds",
        "comm.train_timeout_seconds",
    ],
)
def test_zero_is_refused_where_it_would_divide_or_never_happen(option: str) -> None:
    assert refusal(config_of(**{option.replace(".", "__"): 0})).startswith(f"--{option}=0: 0 is out of range; ")


@pytest.mark.parametrize(("option", "value"), [("optimizer.beta1", 1.0), ("optimizer.beta2", 1.0)])
def test_a_mean_that_never_moves_is_refused(option: str, value: float) -> None:
    assert "it must be from 0 to below 1" in refusal(config_of(**{option.replace(".", "__"): value}))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model.sliding_window", 0),
        ("model.attention_chunk_size", 0),
        ("model.full_attention_every", 0),
        ("training.max_norm", 0.0),
        ("training.num_workers", 0),
        ("training.loss_chunk_tokens", 0),
        ("optimizer.beta1", 0.0),
        ("optimizer.weight_decay", 0.0),
        ("lr_scheduler.warmup_steps", 0),
        ("lr_scheduler.decay_ratio", 0.0),
        ("lr_scheduler.min_lr_factor", 1.0),
        ("debug.seed", 2**63 - 1),
    ],
)
def test_edges_of_ranges_are_accepted(option: str, value: float) -> None:
    run_check(config_of(**{option.replace(".", "__"): value}))


def test_every_number_has_a_range() -> None:
    kinds = (int, float, float | None, int | Literal["auto"])
    numbers = {option for option, kind in OPTIONS.items() if kind in kinds}
    with_functions = {option for option in numbers if option.endswith("_degree")} | {"training.global_batch_size"}
    assert numbers - with_functions == set(RANGES)


def test_decay_within_the_warm_up_is_refused() -> None:
    config = config_of(training__steps=10, lr_scheduler__warmup_steps=5, lr_scheduler__decay_ratio=0.8)
    assert refusal(config) == (
        "--lr_scheduler.decay_ratio=0.8: 8 of 10 steps decay, after 5 of warm-up; warm-up and decay must fit into "
        "training.steps; use --lr_scheduler.warmup_steps=2 or --lr_scheduler.decay_ratio=0.5"
    )
    run_check(replace(config, lr_scheduler=replace(config.lr_scheduler, warmup_steps=2)))
    run_check(replace(config, lr_scheduler=replace(config.lr_scheduler, decay_ratio=0.5)))


def test_decay_after_a_warm_up_as_long_as_the_run_is_refused() -> None:
    config = config_of(training__steps=10, lr_scheduler__warmup_steps=20, lr_scheduler__decay_ratio=0.8)
    assert refusal(config).endswith("; use --lr_scheduler.warmup_steps=2")


@settings(deadline=None)
@given(steps=st.integers(1, 50), warmup=st.integers(0, 60), ratio=st.floats(0, 1))
def test_the_proposed_decay_is_accepted(steps: int, warmup: int, ratio: float) -> None:
    config = config_of(training__steps=steps, lr_scheduler__warmup_steps=warmup, lr_scheduler__decay_ratio=ratio)
    if round(steps * ratio) == 0 or warmup + round(steps * ratio) <= steps:
        run_check(config)
        return
    message = refusal(config)
    remedy = message.split("; use ")[1]
    warmup = int(remedy.split("warmup_steps=")[1].split(" ")[0])
    run_check(replace(config, lr_scheduler=replace(config.lr_scheduler, warmup_steps=warmup)))
    if "decay_ratio=" in remedy:
        ratio = float(remedy.split("decay_ratio=")[1])
        run_check(replace(config, lr_scheduler=replace(config.lr_scheduler, decay_ratio=ratio)))


@pytest.mark.parametrize("name", ["dtype", "mixed_precision_param", "mixed_precision_reduce"])
def test_float64_runs_on_a_cpu_only(name: str) -> None:
    config = config_of(**{"training__mixed_precision_reduce": "float64", f"training__{name}": "float64"})
    message = refusal(config, device_type="cuda")
    assert (
        "=float64: this run is on cuda, whose attention kernels have no float64; float64 runs on a CPU only; "
        in message
    )
    assert message.endswith("; use float32, or hide the GPUs by CUDA_VISIBLE_DEVICES=")
    run_check(config)


def test_gradients_are_summed_no_narrower_than_computed() -> None:
    config = config_of(training__dtype="float64", training__mixed_precision_param="float64")
    assert refusal(config) == (
        "--training.mixed_precision_reduce=float32: gradients computed in float64 would be summed in float32; the sum "
        "must be at least as wide as --training.mixed_precision_param; use float64"
    )


def test_local_data_needs_a_path() -> None:
    assert refusal(config_of(training__dataset="local")) == (
        "--training.dataset=local: no files are named; local data is read from --training.dataset_path; give the path "
        "of a file or folder"
    )


def test_streamed_data_has_no_path(tmp_path: Path) -> None:
    config = config_of(training__dataset="c4", training__dataset_path=str(tmp_path))
    assert refusal(config) == (
        f"--training.dataset_path={tmp_path}: c4 is streamed from the hub and would ignore it; a path is read with "
        "--training.dataset=local; use --training.dataset=local, or drop the path"
    )


def test_streamed_data_cannot_be_packed_by_best_fit() -> None:
    config = config_of(training__dataset="c4", training__packing="best_fit")
    assert refusal(config) == (
        "--training.packing=best_fit: c4 is streamed, so its documents are not known ahead; best fit chooses among all "
        "of an epoch; use stream, or files by --training.dataset_path"
    )
    run_check(config_of(training__dataset="c4", training__packing="stream"))
    run_check(config_of(training__packing="best_fit"))


@pytest.mark.parametrize("dataset", ["local", "python_stdlib"])
def test_path_of_data_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dataset: str) -> None:
    monkeypatch.chdir(tmp_path)
    config = config_of(training__dataset=dataset, training__dataset_path="mine")
    assert refusal(config) == (
        f"--training.dataset_path=mine: there is nothing at {tmp_path / 'mine'}; relative paths start at the caller's "
        "folder; give an existing path"
    )
    (tmp_path / "mine").write_text("text")
    run_check(config)
    run_check(config_of(training__dataset=dataset, training__dataset_path="m*"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("load_step", 3), ("initial_load_path", "/x"), ("create_seed_checkpoint", True), ("load_only", True)],
)
def test_checkpoint_wishes_without_checkpoints(option: str, value: object) -> None:
    assert refusal(config_of(**{f"checkpoint__{option}": value})) == (
        f"--checkpoint.{option}={value}: checkpoints are off; nothing is loaded or saved without --checkpoint.enable; "
        f"add --checkpoint.enable, or drop --checkpoint.{option}"
    )


def test_seed_checkpoint_is_made_in_one_process() -> None:
    config = config_of(checkpoint__enable=True, checkpoint__create_seed_checkpoint=True)
    run_check(config)
    assert refusal(config, world_size=2) == (
        "--checkpoint.create_seed_checkpoint=True: this run has 2 processes; a seed checkpoint is made in one; "
        "start with NGPU=1"
    )


def test_seed_checkpoint_is_saved() -> None:
    config = config_of(checkpoint__enable=True, checkpoint__create_seed_checkpoint=True, checkpoint__load_only=True)
    assert "checkpoint.load_only forbids to save; a seed checkpoint is saved; use --checkpoint.no_load_only" in refusal(
        config
    )


def test_load_only_needs_something_to_load(tmp_path: Path) -> None:
    config = config_of(checkpoint__enable=True, checkpoint__load_only=True, job__dump_folder=str(tmp_path))
    assert refusal(config) == (
        f"--checkpoint.load_only=True: {tmp_path / 'checkpoint'} holds no step-N folder; load_only needs something to "
        "load; give --checkpoint.initial_load_path, or another --job.dump_folder or --checkpoint.folder"
    )
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    run_check(config)


def test_initial_weights_must_exist(tmp_path: Path) -> None:
    config = config_of(checkpoint__enable=True, checkpoint__initial_load_path=str(tmp_path / "step-1"))
    assert f"--checkpoint.initial_load_path={tmp_path}/step-1: there is nothing at {tmp_path}/step-1" in refusal(config)
    (tmp_path / "step-1").mkdir()
    run_check(config)


def test_wandb_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan.config.validate.find_spec", lambda name: None)
    assert refusal(config_of(metrics__enable_wandb=True)) == (
        "--metrics.enable_wandb=True: the package wandb is not installed; it is not among this project's dependencies; "
        "pip install wandb"
    )


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (
            [
                "--parallelism.context_parallel_rotate_method=alltoall",
                "--parallelism.context_parallel_load_balancer=none",
            ],
            (
                "No effect of parallelism.context_parallel_rotate_method, parallelism.context_parallel_load_balancer: "
                "parallelism.context_parallel_degree is 1"
            ),
        ),
        (["--checkpoint.interval=3"], "No effect of checkpoint.interval: checkpoint.enable is false"),
        (
            ["--checkpoint.enable", "--checkpoint.load_only", "--checkpoint.interval=3"],
            "No effect of checkpoint.interval: checkpoint.load_only is true",
        ),
        (["--metrics.save_tb_folder=x"], "No effect of metrics.save_tb_folder: metrics.enable_tensorboard is false"),
        (["--profiling.profile_freq=3"], "No effect of profiling.profile_freq: profiling is off"),
        (
            ["--profiling.save_traces_folder=x"],
            "No effect of profiling.save_traces_folder: profiling.enable_profiling is false",
        ),
        (
            ["--profiling.save_memory_snapshot_folder=x"],
            "No effect of profiling.save_memory_snapshot_folder: profiling.enable_memory_snapshot is false",
        ),
        (
            ["--lr_scheduler.decay_ratio=0", "--lr_scheduler.min_lr_factor=0.1"],
            "No effect of lr_scheduler.min_lr_factor: lr_scheduler.decay_ratio 0.0 leaves no step to decay",
        ),
        (
            ["--training.dataset_text_field=body"],
            "No effect of training.dataset_text_field: training.dataset is python_stdlib",
        ),
        (
            ["--model.full_attention_every=2"],
            "No effect of model.full_attention_every: no layer has a window or chunks",
        ),
        (
            ["--training.position_overflow=restart"],
            "No effect of training.position_overflow: model.attn_mask is causal",
        ),
        (["--training.steps=200"], "The warm-up of 200 steps lasts for all 200: the rate stays below optimizer.lr"),
    ],
)
def test_values_without_effect_are_noted_once(argv: list[str], note: str) -> None:
    assert load_config(argv)[1] == (note,)


def test_decay_after_the_end_is_noted() -> None:
    config = config_of(training__steps=3, lr_scheduler__decay_type="cosine")
    assert ineffective(config)[0] == "No effect of lr_scheduler.decay_type: the warm-up of 200 steps lasts for all 3"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_rotate_method=alltoall"],
        ["--checkpoint.enable", "--checkpoint.interval=3"],
        ["--metrics.enable_tensorboard", "--metrics.save_tb_folder=x"],
        ["--profiling.enable_memory_snapshot", "--profiling.profile_freq=3"],
        ["--profiling.enable_profiling", "--profiling.profile_freq=3", "--profiling.save_traces_folder=x"],
        ["--checkpoint.folder=checkpoint", "--parallelism.context_parallel_rotate_method=allgather"],  # the defaults
        ["--training.dataset=c4", "--training.dataset_text_field=body"],
        ["--model.sliding_window=128", "--model.full_attention_every=2"],
        ["--model.attention_chunk_size=128", "--model.full_attention_every=2"],
        ["--model.attn_mask=document", "--training.position_overflow=restart"],
    ],
)
def test_values_with_effect_are_not_noted(argv: list[str]) -> None:
    assert load_config(argv)[1] == ()


def test_a_dump_folder_that_cannot_be_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=rf"--job\.dump_folder={path}: {file} is a file; the run writes into it"):
            run_check(JobConfig(job=Job(dump_folder=str(path))))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=rf"{tmp_path} cannot be written; .*choose a folder that can be written"):
        run_check(JobConfig(job=Job(dump_folder=str(tmp_path / "new"))))
