"""The one order in which a model is split: CP, activation checkpointing, FSDP."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from torchtitan.distributed.activation_checkpoint import apply_full_activation_checkpoint
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
    activation_checkpoint: str = "none"
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
        )
        logger.info(
            "Context parallelism: %s (%s) on %d attention modules, cp %d, balancer %s",
            options.cp_method,
            options.cp_rotate_method,
            len(attention),
            dims.cp,
            options.cp_load_balancer,
        )
    if options.activation_checkpoint == "full":
        blocks = [module for _, module in find_modules(model, plan.blocks)]
        apply_full_activation_checkpoint(blocks)
        logger.info("Activation checkpointing: full, on %d blocks", len(blocks))
    apply_fsdp(model, plan, dims.fsdp_mesh, param_dtype=options.param_dtype, reduce_dtype=options.reduce_dtype)
    logger.info(
        "FSDP: parameters over %d ranks (dp_shard %d x cp %d), compute in %s, gradients reduced in %s",
        dims.dp_shard * dims.cp,
        dims.dp_shard,
        dims.cp,
        options.param_dtype,
        options.reduce_dtype,
    )
