"""FSDP2 over dp_shard x cp: the ranks of one cp group hold different tokens of one sequence, so they are data ranks."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from torchtitan.distributed.plan import ParallelPlan, find_modules


def apply_fsdp(
    model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh, *, param_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> None:
    """Shard the parameters of `model` over `mesh` in place: they gather unit by unit, gradients are summed.

    Sums, not means: the loss is divided once by the tokens of the whole step. gloo needs a divide factor of 1 and
    plain sums (it has no PREMUL_SUM).
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    kept = {id(module) for pattern in plan.kept_gathered for _, module in find_modules(model, pattern)}
    for pattern in plan.fsdp_units:
        for _, module in find_modules(model, pattern):
            # One rank has nothing to free: it would only copy its parameters twice.
            reshard = mesh.size() > 1 and id(module) not in kept
            fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
