"""Keys of torchtitan's files (January 2026) that this project spells differently or does not have.

A key that means the same under another name moves there. One that cannot be obeyed is dropped: silently while it asks
for nothing, with a note where results stay the same, and else it is refused.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

RENAMED = {
    "model.hf_assets_path": "model.tokenizer_path",
    "model.attn_mask_type": "model.attn_mask",
    "training.seed": "debug.seed",
    "training.deterministic": "debug.deterministic",
    "training.dataloader.num_workers": "training.num_workers",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
}


@dataclass(frozen=True)
class Absent:
    """What becomes of a key that this project does not have."""

    off: tuple[object, ...] = (False, 0, "", [])  # values that ask for nothing
    note: str = ""  # what happens instead; results stay the same
    refusal: str = ""  # why it cannot be, and what to do
    switch: str = ""  # the key asks for nothing while the option of this name is off


def _silent() -> Absent:
    return Absent()


def _note(text: str, *off: object, switch: str = "") -> Absent:
    return Absent(off or Absent.off, note=text, switch=switch)


def _refuse(text: str, *off: object, switch: str = "") -> Absent:
    return Absent(off or Absent.off, refusal=text, switch=switch)


_WHOLE = "every checkpoint holds the whole state in the dtypes of training"
_NO_HF = "checkpoints are torch's distributed format only; convert the weights, and drop this key"
_NO_QUANTIZED = "quantised training does not exist here; remove it, bfloat16 is the narrowest"
_NO_VALIDATION = "validation does not exist here; remove it, and evaluate a checkpoint on its own"
_NO_IMPORT = "modules are not imported by name; start a script of your own by TRAIN_FILE"
_NO_FT = "fault-tolerant groups do not exist here; remove it, and restart from --checkpoint.enable"
_LOADER = "the data loader chooses it"
_RECORDER = "torch's flight recorder is set by its environment variables"
_AXIS_DETAILS = (
    "expert_parallel_comm_backend",
    "module_fqns_per_model_part",
    "pipeline_parallel_expert_parallel_overlap",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_microbatch_size",
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "pipeline_parallel_split_points",
)
_SELECTIVE_DETAILS = (
    "debug",
    "determinism_check",
    "early_stop",
    "memory_budget",
    "per_op_sac_force_recompute_mm_shapes_by_fqns",
    "preserve_rng_state",
    "visualize_memory_budget_pareto",
)

# The first pattern that fits counts; only sections that this project does not have are matched whole, so that a
# misspelt key of the others stays unknown.
ABSENT = {
    "job.custom_config_module": _refuse(_NO_IMPORT),
    "experimental.*": _refuse(_NO_IMPORT),
    "model.use_flex_attn": _refuse('the kernel of attention is chosen by name; use model.attn_type = "flex"'),
    "model.converters": _refuse(_NO_QUANTIZED),
    "model.print_after_conversion": _silent(),
    "quantize.*": _silent(),  # read by a converter only, and those are refused
    "float8.*": _silent(),
    "mx.*": _silent(),
    "optimizer.early_step_in_backward": _refuse("gradients are clipped before the update; remove it"),
    "training.enable_cpu_offload": _note("parameters stay on the device"),
    "training.gc_debug": _note("garbage collection is not traced"),
    "training.dataloader.*": _note(_LOADER),
    "debug.deterministic_warn_only": _note("debug.deterministic raises where there is no deterministic kernel"),
    "debug.moe_force_load_balance": _note("there are no experts to balance"),
    "parallelism.fsdp_reshard_after_forward": _note("each layer is resharded after its forward", "default", "always"),
    "parallelism.disable_loss_parallel": _note("there is no tensor parallelism"),
    "parallelism.enable_async_tensor_parallel": _note("there is no tensor parallelism"),
    "parallelism.enable_compiled_autograd": _note("backwards are compiled with their forwards, layer by layer"),
    "parallelism.expert_tensor_parallel_degree": _refuse("there is no expert_parallel axis; use 1", 1),
    "checkpoint.async_mode": _note("checkpoints are saved synchronously", "disabled", switch="checkpoint.enable"),
    "checkpoint.keep_latest_k": _note("all checkpoints are kept", 0, switch="checkpoint.enable"),
    "checkpoint.export_dtype": _note(_WHOLE, "float32", switch="checkpoint.enable"),
    "checkpoint.last_save_model_only": _note(_WHOLE, False, switch="checkpoint.enable"),
    "checkpoint.last_save_in_hf": _refuse(_NO_HF, False, switch="checkpoint.enable"),
    "checkpoint.initial_load_in_hf": _refuse(_NO_HF, False, switch="checkpoint.enable"),
    "checkpoint.initial_load_in_hf_quantized": _refuse(_NO_HF, False, switch="checkpoint.enable"),
    "checkpoint.initial_load_model_only": _refuse(
        "checkpoint.initial_load_path loads weights only; to resume a whole state use checkpoint.folder and load_step",
        True,
        switch="checkpoint.initial_load_path",
    ),
    "checkpoint.exclude_from_loading": _refuse(
        "a checkpoint is loaded whole; for its weights alone use checkpoint.initial_load_path",
        [],
        "",
        switch="checkpoint.enable",
    ),
    "checkpoint.enable_first_step_checkpoint": _note(
        "the first save is at checkpoint.interval", False, switch="checkpoint.enable"
    ),
    "checkpoint.enable_ft_dataloader_checkpoints": _silent(),  # read under fault_tolerance only, which is refused
    "metrics.save_for_all_ranks": _note("one rank reports for all"),
    "profiling.profiler_active": _note("one step is traced at a time", 1, switch="profiling.enable_profiling"),
    "profiling.profiler_warmup": _note("the profiler chooses it", switch="profiling.enable_profiling"),
    "comm.mode": _refuse('collectives are always real; use "default"', "default"),
    "comm.trace_buf_size": _note(_RECORDER),
    "comm.save_traces_folder": _note(_RECORDER, switch="comm.trace_buf_size"),
    "comm.save_traces_file_prefix": _note(_RECORDER, switch="comm.trace_buf_size"),
    "compile.*": _note("each layer is compiled, and nothing else", switch="compile.enable"),
    "validation.enable": _refuse(_NO_VALIDATION, False),
    "validation.*": _silent(),
    "fault_tolerance.enable": _refuse(_NO_FT, False),
    "fault_tolerance.*": _silent(),
    "memory_estimation.enable": _refuse("it does not exist here; remove it, and read memory in the log", False),
    "memory_estimation.*": _silent(),
    # Details of an axis whose degree may only be 1, and of a mode that _VALUES replaces:
    **{f"parallelism.{name}": _silent() for name in _AXIS_DETAILS},
    **{f"activation_checkpoint.{name}": _silent() for name in _SELECTIVE_DETAILS},
}
_FLAVORS_OF_KERNELS = {
    "debugmodel_flex_attn": "flex",
    "debugmodel_varlen_attn": "varlen",
    "8B_flex": "flex",
    "8B_varlen": "varlen",
}
_NO_BUDGET = 'activation_checkpoint.mode="selective" is used: the same results'

# Values that torchtitan has for an option of this project, with what is used instead and why; None: refused.
_VALUES: dict[tuple[str, object], tuple[str | None, str]] = {
    ("activation_checkpoint.mode", "memory_budget"): ("selective", _NO_BUDGET),
    ("model.attn_mask", "block_causal"): ("document", 'model.attn_mask="document" is used: the same mask'),
    ("training.dataset", "c4_test"): (
        None,
        'a file of torchtitan\'s repository; use "python_stdlib", or "local" with the file as training.dataset_path',
    ),
    # Flavours that differ from another by their attention alone, which options of their own choose here:
    **{
        ("model.flavor", flavor): (
            None,
            f'use "{flavor.partition("_")[0]}", with model.attn_type = "{kind}" and model.attn_mask = "document"',
        )
        for flavor, kind in _FLAVORS_OF_KERNELS.items()
    },
}


@dataclass
class Adapted:
    """What to do with the values that were given, by key."""

    replaced: dict[str, str] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


def adapt(given: Mapping[str, Any], known: Collection[str]) -> Adapted:
    """Decide on every value of `given` that torchtitan knows and this project, whose options are `known`, does not."""
    adapted = Adapted()
    for key, value in given.items():
        if key in known:
            _adapt_value(key, value, adapted)
        elif absent := _find(key):
            adapted.dropped.add(key)
            _judge(key, value, absent, given, adapted)
    return adapted


def _adapt_value(key: str, value: Any, adapted: Adapted) -> None:
    if not isinstance(value, str) or (key, value) not in _VALUES:
        return
    replacement, text = _VALUES[key, value]
    if replacement is None:
        adapted.refused[key] = text
    else:
        adapted.replaced[key] = replacement
        adapted.notes.append(f"{key}={value} does not exist here: {text}")


def _find(key: str) -> Absent | None:
    return next((absent for pattern, absent in ABSENT.items() if fnmatchcase(key, pattern)), None)


def _judge(key: str, value: Any, absent: Absent, given: Mapping[str, Any], adapted: Adapted) -> None:
    if value in absent.off or (absent.switch and not given.get(absent.switch)):
        return
    if absent.refusal:
        adapted.refused[key] = absent.refusal
    elif absent.note:
        adapted.notes.append(f"No effect of {key}={value}: {absent.note}")
