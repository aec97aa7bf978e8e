"""The one order in which a model is split: CP, activation checkpointing, compile, FSDP."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan.distributed.activation_checkpoint import apply_activation_checkpoint
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.context_parallel import apply_cp
from torchtitan.distributed.data_parallel import apply_fsdp
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.plan import ParallelPlan, find_modules

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitOptions:
    """Everything but the degrees that decides how a model is split."""

    seq_len: int
    cp_method: str = "ring"
    cp_rotate_method: str = "allgather"
    cp_load_balancer: str = "headtail"
    cp_gather_kv_heads: int | str = "auto"
    cp_keep_gathered: bool = False
    activation_checkpoint: str = "none"
    selective_ac_option: str = "op"
    compile_backend: str = ""  # empty: not compiled
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32


def parallelize(model: nn.Module, plan: ParallelPlan, dims: ParallelDims, options: SplitOptions) -> None:
    """Split `model` (on the meta device or not) as its plan allows and the degrees ask, in place."""
    if dims.cp > 1:
        attention = [module for _, module in find_modules(model, plan.attention)]
        apply_cp(
            attention,
            dims.cp_mesh,
            seq_len=options.seq_len,
            method=options.cp_method,
            rotate_method=options.cp_rotate_method,
            load_balancer=options.cp_load_balancer,
            gather_kv_heads=options.cp_gather_kv_heads,
            keep_gathered=options.cp_keep_gathered,
        )
        logger.info(
            "Context parallelism: %s on %d attention modules, cp %d, balancer %s",
            _describe_cp(dims, options),
            len(attention),
            dims.cp,
            options.cp_load_balancer,
        )
    blocks = [module for _, module in find_modules(model, plan.blocks)]
    count = apply_activation_checkpoint(blocks, options.activation_checkpoint, options.selective_ac_option)
    if count:
        logger.info(
            "Activation checkpointing: %s, on %d of %d blocks", options.activation_checkpoint, count, len(blocks)
        )
    if options.compile_backend:
        apply_compile(blocks, options.compile_backend)
        logger.info("Compile: %d blocks, each by itself, backend %s", len(blocks), options.compile_backend)
    apply_fsdp(model, plan, dims.fsdp_mesh, param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    logger.info(
        "FSDP: parameters over %d ranks (dp_shard %d x cp %d), compute in %s, gradients reduced in %s",
        dims.dp_shard * dims.cp,
        dims.dp_shard,
        dims.cp,
        options.param_dtype,
        options.reduce_dtype,
    )


def _describe_cp(dims: ParallelDims, options: SplitOptions) -> str:
    method = f"ring ({options.cp_rotate_method})" if options.cp_method == "ring" else options.cp_method
    if dims.ulysses == 1:
        return method
    return "ulysses" if dims.ulysses == dims.cp else f"ulysses {dims.ulysses} over {method}"
