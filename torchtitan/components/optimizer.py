"""The optimizer, from its section."""

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from torchtitan.config.sections import Optimizer as OptimizerSection


def build_optimizer(model: nn.Module, section: OptimizerSection) -> Optimizer:
    """Return the optimizer over all parameters of `model`, in fused form where asked for."""
    return {"AdamW": AdamW, "Adam": Adam}[section.name](
        model.parameters(),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
        fused=section.implementation == "fused",
        foreach=section.implementation == "foreach",
    )
