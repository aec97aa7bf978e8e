"""Initial weights that do not depend on the layout.

Each full parameter is drawn in fp32 from a generator of its own, seeded by (seed, its name); each rank keeps its
slice. So every layout starts from the same bits on one kind of device, and no rank draws another's numbers.
"""

import hashlib
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan.errors import TitanError


@dataclass(frozen=True)
class InitRule:
    """Parameters whose names match `pattern` start as N(0, std) cut at `cutoff` stds, or as ones where std is None."""

    pattern: str
    std: float | None
    cutoff: float = 3.0


@torch.no_grad()
def initialise(model: nn.Module, rules: tuple[InitRule, ...], seed: int) -> None:
    """Draw every parameter of `model` in place, by the first rule that matches its name.

    Raises:
        TitanError: a parameter has no rule.
    """
    for name, parameter in model.named_parameters():
        rule = next((rule for rule in rules if fnmatchcase(name, rule.pattern)), None)
        if rule is None:
            raise TitanError(f"parameter {name} has no rule of initialisation; the family's init_rules must name it")
        _assign(parameter, _draw(name, parameter, rule, seed))


def _draw(name: str, parameter: nn.Parameter, rule: InitRule, seed: int) -> torch.Tensor:
    full = torch.ones(parameter.shape, dtype=torch.float32, device=parameter.device)
    if rule.std is None:
        return full
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    cut = rule.cutoff * rule.std
    return nn.init.trunc_normal_(full, std=rule.std, a=-cut, b=cut, generator=generator)


def _assign(parameter: nn.Parameter, full: torch.Tensor) -> None:
    if isinstance(parameter, DTensor):
        # No source rank: every rank has drawn the same tensor, and keeps its slice without communicating.
        parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))
    else:
        parameter.copy_(full)
