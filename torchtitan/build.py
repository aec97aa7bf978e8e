"""From the configuration to the parts; the only file that sees everything."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.components.checkpoint import Checkpointer, ModelState, OptimizerState, Stateful
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.components.lr_scheduler import build_lr_scheduler
from torchtitan.components.metrics import MetricsLogger
from torchtitan.components.optimizer import build_optimizer
from torchtitan.components.tokenizer import Tokenizer
from torchtitan.config.cp_method import CPChoice, resolve_cp_method, resolve_load_balancer
from torchtitan.config.job import JobConfig
from torchtitan.config.validate import is_plain_causal, resolve_degrees, resolve_global_batch_size
from torchtitan.data.cache import default_cache_folder
from torchtitan.data.loader import TrainLoader, build_dataloader
from torchtitan.distributed.context_parallel import MaskPlanner
from torchtitan.distributed.parallel_dims import ParallelDims, build_parallel_dims
from torchtitan.distributed.parallelize import SplitOptions, parallelize
from torchtitan.distributed.process_group import local_rank_from_env, ranks_per_node_from_env
from torchtitan.models import get_args, get_spec, resolve_vocab_size
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.init import initialise
from torchtitan.models.spec import ModelArgs
from torchtitan.runner import SingleStageRunner
from torchtitan.tools.device import peak_flops
from torchtitan.tools.gc import ScheduledGC
from torchtitan.tools.profiling import Profiler
from torchtitan.tools.stop import StopSignal
from torchtitan.trainer import TrainerOptions, TrainerParts

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def model_args(config: JobConfig, tokenizer: Tokenizer) -> ModelArgs:
    """Return the arguments of the model that is asked for; raises ConfigError for an unknown name or flavour."""
    section = config.model
    args = get_args(get_spec(section.name), section.flavor)
    if section.sliding_window or section.attention_chunk_size:
        args = args.with_attention(
            window=section.sliding_window,
            chunk=section.attention_chunk_size,
            full_attention_every=section.full_attention_every,
        )
    return resolve_vocab_size(args, config.model.flavor, tokenizer.vocab_size)


def build_parts(
    config: JobConfig, args: ModelArgs, tokenizer: Tokenizer, device: torch.device, stop: StopSignal
) -> TrainerParts:
    """Return all parts of a run, in the order in which they need each other; collective."""
    dims, method = build_layout(config, args, device)
    options = _trainer_options(config, args, dims)
    logger.info(
        "Layout:\n%s",
        dims.table(
            global_batch_size=options.global_batch_size,
            local_batch_size=config.training.local_batch_size,
            seq_len=config.training.seq_len,
        ),
    )
    dataloader = _build_dataloader(config, args, tokenizer, dims, options)
    model = build_model(config, args, dims, method, device)
    optimizer = build_optimizer(model, config.optimizer)
    lr_scheduler = build_lr_scheduler(optimizer, config.lr_scheduler, config.training.steps)
    states: dict[str, Stateful] = {
        "model": ModelState(model),
        "optimizer": OptimizerState(model, optimizer),
        "lr_scheduler": lr_scheduler,
        "dataloader": dataloader,
    }
    return TrainerParts(
        model=model,
        runner=SingleStageRunner(model, ChunkedCrossEntropy(config.training.loss_chunk_tokens)),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        dataloader=dataloader,
        checkpointer=Checkpointer(config.checkpoint, Path(config.job.dump_folder), states),
        metrics=_build_metrics(config, device),
        profiler=_build_profiler(config, device),
        gc=ScheduledGC(config.training.gc_freq),
        stop=stop,
        dims=dims,
        device=device,
        options=options,
    )


def cp_choice(config: JobConfig, args: ModelArgs, device: torch.device) -> CPChoice:
    """Return the method of context parallelism, and why it is this one."""
    return resolve_cp_method(
        config.parallelism,
        device_type=device.type,
        num_heads=args.num_heads,
        num_kv_heads=args.num_kv_heads,
        ranks_per_node=ranks_per_node_from_env(),
        plain_causal=is_plain_causal(config, args.layer_kinds),
    )


def load_balancer(config: JobConfig, args: ModelArgs) -> str:
    """Return the load balancer of context parallelism."""
    return resolve_load_balancer(config.parallelism, plain_causal=is_plain_causal(config, args.layer_kinds))


def build_layout(config: JobConfig, args: ModelArgs, device: torch.device) -> tuple[ParallelDims, str]:
    """Return the axes of the job and the method of context parallelism; collective."""
    degrees = resolve_degrees(config.parallelism, dist.get_world_size())
    choice = cp_choice(config, args, device)
    if choice.reason and degrees.cp > 1:
        name = "ulysses" if choice.ulysses_degree == degrees.cp else choice.method
        logger.info("--parallelism.context_parallel_method=auto: %s, as %s", name, choice.reason)
    dims = build_parallel_dims(device, dp_shard=degrees.dp_shard, cp=degrees.cp, ulysses=choice.ulysses_degree)
    return dims, choice.method


def build_model(
    config: JobConfig, args: ModelArgs, dims: ParallelDims, cp_method: str, device: torch.device
) -> Decoder:
    """Return the split model with its initial weights: built on meta, split, materialised, initialised."""
    spec = get_spec(config.model.name)
    with torch.device("meta"):
        model = spec.build(args, config.model.attn_type).to(DTYPES[config.training.dtype])
    plan = spec.plan(args)
    parallelize(model, plan, dims, _split_options(config, args, cp_method))
    model.to_empty(device=device)
    initialise(model, spec.init_rules(args), config.debug.seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    logger.info("Model: %s %s, %s parameters", config.model.name, config.model.flavor, f"{num_parameters:,}")
    return model


def _split_options(config: JobConfig, args: ModelArgs, cp_method: str) -> SplitOptions:
    parallelism = config.parallelism
    return SplitOptions(
        seq_len=config.training.seq_len,
        cp_method=cp_method,
        cp_rotate_method=parallelism.context_parallel_rotate_method,
        cp_load_balancer=load_balancer(config, args),
        cp_gather_kv_heads=parallelism.context_parallel_gather_kv_heads,
        cp_keep_gathered=parallelism.context_parallel_keep_gathered,
        activation_checkpoint=config.activation_checkpoint.mode,
        selective_ac_option=config.activation_checkpoint.selective_ac_option,
        compile_backend=config.compile.backend if config.compile.enable else "",
        param_dtype=DTYPES[config.training.mixed_precision_param],
        reduce_dtype=DTYPES[config.training.mixed_precision_reduce],
    )


def _trainer_options(config: JobConfig, args: ModelArgs, dims: ParallelDims) -> TrainerOptions:
    training = config.training
    global_batch_size = resolve_global_batch_size(training, dims.dp_shard)
    return TrainerOptions(
        steps=training.steps,
        seq_len=training.seq_len,
        global_batch_size=global_batch_size,
        num_microbatches=global_batch_size // (training.local_batch_size * dims.dp_shard),
        max_norm=training.max_norm,
        load_balancer=load_balancer(config, args),
        check_same_data=config.debug.deterministic,
        init_timeout_s=config.comm.init_timeout_seconds,
        train_timeout_s=config.comm.train_timeout_seconds,
        create_seed_checkpoint=config.checkpoint.create_seed_checkpoint,
        flops=args.flops,
    )


def _build_profiler(config: JobConfig, device: torch.device) -> Profiler:
    section, dump_folder = config.profiling, Path(config.job.dump_folder)
    traces = dump_folder / section.save_traces_folder if section.enable_profiling else None
    snapshots = dump_folder / section.save_memory_snapshot_folder if section.enable_memory_snapshot else None
    return Profiler(section.profile_freq, traces, snapshots, device)


def _build_dataloader(
    config: JobConfig, args: ModelArgs, tokenizer: Tokenizer, dims: ParallelDims, options: TrainerOptions
) -> TrainLoader:
    training = config.training
    planner = MaskPlanner(
        args.layer_kinds, dims.cp // dims.ulysses, dims.cp_rank // dims.ulysses, options.load_balancer
    )
    return build_dataloader(
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        text_field=training.dataset_text_field,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        packing=training.packing,
        document_masks=config.model.attn_mask == "document",
        context_length=args.context_length,
        restart_positions=training.position_overflow == "restart",
        prepare=planner,
        local_batch_size=training.local_batch_size,
        global_batch_size=options.global_batch_size,
        dp_rank=dims.dp_rank,
        dp_degree=dims.dp_shard,
        seed=config.debug.seed,
        num_workers=training.num_workers,
        cache_folder=default_cache_folder(),
        build_cache=local_rank_from_env() == 0,
        barrier=dist.barrier,
    )


def _build_metrics(config: JobConfig, device: torch.device) -> MetricsLogger:
    return MetricsLogger(
        config.metrics,
        Path(config.job.dump_folder),
        writes=dist.get_rank() == 0,
        num_devices=dist.get_world_size(),
        peak_flops=peak_flops(device),
        device=device,
        num_steps=config.training.steps,
    )
