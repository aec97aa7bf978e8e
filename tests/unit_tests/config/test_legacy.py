"""Files written for torchtitan of January 2026: they load, or one message names all that is refused."""

import re
from pathlib import Path
from typing import get_args

import pytest

from torchtitan.config.job import OPTIONS
from torchtitan.config.legacy import _VALUES, ABSENT, RENAMED
from torchtitan.config.parse import load_config
from torchtitan.errors import ConfigError
from torchtitan.models.llama3.args import FLAVORS

DEBUG_MODEL = """
[job]
dump_folder = "./outputs"
description = "Llama 3 debug training"
print_config = false

[profiling]
enable_profiling = false
save_traces_folder = "profile_trace"
profile_freq = 10
enable_memory_snapshot = false
save_memory_snapshot_folder = "memory_snapshot"

[metrics]
log_freq = 1
disable_color_printing = false
enable_tensorboard = false
save_tb_folder = "tb"
enable_wandb = false

[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "./tests/assets/tokenizer"
converters = []

[optimizer]
name = "AdamW"
lr = 8e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 2
decay_ratio = 0.8
decay_type = "linear"
min_lr_factor = 0.0

[training]
local_batch_size = 8
seq_len = 2048
max_norm = 1.0
steps = 10
dataset = "c4_test"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
fsdp_reshard_after_forward = "default"
tensor_parallel_degree = 1
enable_async_tensor_parallel = false
pipeline_parallel_degree = 1
pipeline_parallel_schedule = "1F1B"
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 10
last_save_model_only = false
export_dtype = "float32"
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"

[compile]
enable = false
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]

[validation]
enable = false
dataset = "c4_validation"
freq = 5
steps = 10

[debug]
seed = 42
deterministic = false
deterministic_warn_only = false
"""

LLAMA3_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float16"
async_mode = "disabled"

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = false
components = ["model", "loss"]

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false

[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = -1
"""
TOKENIZER = "model.hf_assets_path is named model.tokenizer_path here"


def write(folder: Path, text: str) -> str:
    """Return the argument that names a file of that text."""
    path = folder / "torchtitan.toml"
    path.write_text(text)
    return f"--job.config_file={path}"


def test_llama3_8b_loads_with_its_differences_noted(tmp_path: Path) -> None:
    config, notes = load_config([write(tmp_path, LLAMA3_8B)])
    assert notes == (TOKENIZER,)
    assert config.model.tokenizer_path == "./assets/hf/Llama-3.1-8B"
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option) == ("selective", "op")
    assert (config.model.flavor, config.training.dataset, config.training.seq_len) == ("8B", "c4", 8192)
    assert (config.optimizer.lr, config.profiling.profile_freq) == (3e-4, 100)


def test_debug_model_is_refused_for_its_data_alone(tmp_path: Path) -> None:
    argument = write(tmp_path, DEBUG_MODEL)
    with pytest.raises(ConfigError) as caught:
        load_config([argument])
    path = argument.partition("=")[2]
    assert str(caught.value) == (
        f'{path}: training.dataset = "c4_test": a file of torchtitan\'s repository; use "python_stdlib", or "local" '
        "with the file as training.dataset_path"
    )


def test_debug_model_loads_with_other_data(tmp_path: Path) -> None:
    config, notes = load_config([write(tmp_path, DEBUG_MODEL), "--training.dataset=python_stdlib"])
    assert notes == (
        TOKENIZER,
        "No effect of checkpoint.interval: checkpoint.enable is false",
        "No effect of profiling.save_traces_folder: profiling.enable_profiling is false",
    )
    assert (config.training.steps, config.lr_scheduler.decay_ratio, config.debug.seed) == (10, 0.8, 42)


def test_every_refused_key_is_in_one_message(tmp_path: Path) -> None:
    text = DEBUG_MODEL.replace("c4_test", "c4").replace("converters = []", 'converters = ["quantize.linear.float8"]')
    text = text.replace("[validation]\nenable = false", "[validation]\nenable = true")
    text += '[comm]\nmode = "fake_backend"\n[experimental]\ncustom_import = "mine"\n'
    with pytest.raises(ConfigError) as caught:
        load_config([write(tmp_path, text), "--fault_tolerance.enable"])
    first, *lines = [line.partition("torchtitan.toml: ")[2] or line.strip() for line in str(caught.value).splitlines()]
    assert first == "5 options cannot be used:"
    assert lines == [
        (
            "model.converters = ['quantize.linear.float8']: quantised training does not exist here; remove it, "
            "bfloat16 is the narrowest"
        ),
        "validation.enable = true: validation does not exist here; remove it, and evaluate a checkpoint on its own",
        'comm.mode = "fake_backend": collectives are always real; use "default"',
        (
            'experimental.custom_import = "mine": modules are not imported by name; start a script of your own by '
            "TRAIN_FILE"
        ),
        (
            "--fault_tolerance.enable=True: fault-tolerant groups do not exist here; remove it, and restart from "
            "--checkpoint.enable"
        ),
    ]


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_renamed_keys_move_from_file_and_command_line(tmp_path: Path, old: str, new: str) -> None:
    kind = OPTIONS[new]
    values = {bool: ("True", "true"), int: ("3", "3"), str: ("x", '"x"')}
    chosen = [] if kind in values else get_args(kind)  # of a Literal the last, which is no default
    text, literal = values[kind] if kind in values else (chosen[-1], f'"{chosen[-1]}"')
    section, _, name = old.rpartition(".")
    by_file = load_config([write(tmp_path, f"[{section}]\n{name} = {literal}\n")])
    by_line, given = load_config([f"--{old}={text}"]), load_config([f"--{new}={text}"])
    assert by_line[0] == given[0]
    assert by_file[1] == by_line[1] == (f"{old} is named {new} here", *given[1])


def test_old_and_new_name_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.seed = 1: debug\.seed is given too, and is the same option"):
        load_config([write(tmp_path, "[training]\nseed = 1\n[debug]\nseed = 2\n")])


def test_command_line_wins_over_a_renamed_key_of_the_file(tmp_path: Path) -> None:
    config, _ = load_config([write(tmp_path, "[training]\nseed = 1\n"), "--debug.seed=2"])
    assert config.debug.seed == 2


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (["--checkpoint.enable", "--checkpoint.async_mode=async"], "checkpoints are saved synchronously"),
        (["--checkpoint.enable", "--checkpoint.keep_latest_k=3"], "all checkpoints are kept"),
        (["--checkpoint.enable", "--checkpoint.last_save_model_only"], "every checkpoint holds the whole state"),
        (["--checkpoint.enable", "--checkpoint.export_dtype=float16"], "every checkpoint holds the whole state"),
        (["--training.enable_cpu_offload"], "parameters stay on the device"),
        (["--parallelism.fsdp_reshard_after_forward=never"], "each layer is resharded after its forward"),
        (["--parallelism.enable_async_tensor_parallel"], "there is no tensor parallelism"),
        (["--compile.enable", "--compile.components=model"], "each layer is compiled, and nothing else"),
        (["--metrics.save_for_all_ranks"], "one rank reports for all"),
        (["--comm.trace_buf_size=20000"], "torch's flight recorder is set by its environment variables"),
        (["--training.dataloader.pin_memory"], "the data loader chooses it"),
    ],
)
def test_keys_that_change_no_result_are_noted(argv: list[str], note: str) -> None:
    notes = load_config([*argv, "--training.steps=300"])[1]
    name, _, text = argv[-1][2:].partition("=")
    assert [line for line in notes if line.startswith(f"No effect of {name}={text or True}: {note}")] == list(notes)
    assert len(notes) == 1


@pytest.mark.parametrize(
    "argument",
    [
        "--checkpoint.async_mode=async",  # checkpoints are off
        "--checkpoint.last_save_in_hf",
        "--checkpoint.enable_ft_dataloader_checkpoints",
        "--compile.components=model",
        "--float8.enable_fsdp_float8_all_gather",
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        "--parallelism.expert_tensor_parallel_degree=1",
        "--validation.freq=3",
        "--fault_tolerance.replica_id=3",
        "--memory_estimation.enable=False",
        "--optimizer.early_step_in_backward=False",
        "--experimental.custom_import=",
        "--job.custom_config_module=None",
        "--comm.mode=default",
    ],
)
def test_keys_that_ask_for_nothing_are_dropped_silently(argument: str) -> None:
    assert load_config([argument]) == load_config([])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--checkpoint.enable", "--checkpoint.last_save_in_hf"], "torch's distributed format only"),
        (["--checkpoint.enable", "--checkpoint.initial_load_in_hf"], "torch's distributed format only"),
        (["--checkpoint.enable", "--checkpoint.exclude_from_loading=optimizer"], "a checkpoint is loaded whole"),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_path=x", "--checkpoint.initial_load_model_only=false"],
            "loads weights only",
        ),
        (["--optimizer.early_step_in_backward"], "gradients are clipped before the update"),
        (["--parallelism.expert_tensor_parallel_degree=2"], "there is no expert_parallel axis; use 1"),
        (["--fault_tolerance.enable"], "fault-tolerant groups do not exist here"),
        (["--memory_estimation.enable"], "read memory in the log"),
        (["--model.use_flex_attn"], 'use model.attn_type = "flex"'),
        (
            ["--model.flavor=debugmodel_flex_attn"],
            'use "debugmodel", with model.attn_type = "flex" and model.attn_mask = "document"',
        ),
        (["--model.flavor=8B_varlen"], 'use "8B", with model.attn_type = "varlen" and model.attn_mask = "document"'),
    ],
)
def test_keys_that_would_change_the_result_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    assert str(caught.value).startswith(argv[-1].partition("=")[0])
    assert message in str(caught.value)


def test_masks_and_balancers_of_torchtitan_are_those_here(tmp_path: Path) -> None:
    """Its block-causal mask is the one of documents; its balancer of blocks is torch's, in both."""
    text = '[model]\nattn_type = "varlen"\nattn_mask_type = "block_causal"\n'
    text += '[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_load_balancer = "ptrr"\n'
    for argv in (
        [write(tmp_path, text)],
        [
            "--model.attn_type=varlen",
            "--model.attn_mask_type=block_causal",
            "--parallelism.context_parallel_degree=2",
            "--parallelism.context_parallel_load_balancer=ptrr",
        ],
    ):
        config, notes = load_config(argv)
        assert (config.model.attn_type, config.model.attn_mask) == ("varlen", "document")
        assert config.parallelism.context_parallel_load_balancer == "ptrr"
        assert notes == (
            "model.attn_mask_type is named model.attn_mask here",
            'model.attn_mask=block_causal does not exist here: model.attn_mask="document" is used: the same mask',
        )
    assert load_config(["--model.attn_mask_type=causal"])[0].model.attn_mask == "causal"


@pytest.mark.parametrize("flavor", [flavor for name, flavor in _VALUES if name == "model.flavor"])
def test_what_a_refusal_of_a_flavor_says_is_accepted(flavor: object) -> None:
    """The flavour and the options that it names exist, and no flavour of this project is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config([f"--model.flavor={flavor}"])
    name, attn_type, attn_mask = re.findall(r'"(\w+)"', str(caught.value))
    load_config([f"--model.flavor={name}", f"--model.attn_type={attn_type}", f"--model.attn_mask={attn_mask}"])
    assert name in FLAVORS and flavor not in FLAVORS


@pytest.mark.parametrize("name", ["activation_checkpoint.selective_ac_optoin", "parallelism.pipeline_parallel_degre"])
def test_a_misspelt_key_is_not_taken_for_an_old_one(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown option"):
        load_config([f"--{name}=2"])


def test_no_rule_hides_an_option_of_this_project() -> None:
    assert not OPTIONS.keys() & ABSENT.keys()
    assert not OPTIONS.keys() & RENAMED.keys()
    assert set(RENAMED.values()) <= OPTIONS.keys()
