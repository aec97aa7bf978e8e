"""Warm-up, stable, decay. Source of the shape: MiniCPM, arXiv:2404.06395, section 4."""

import math
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.config.sections import LRScheduler

_DECAYS = {
    "linear": lambda done: 1.0 - done,
    "sqrt": lambda done: 1.0 - math.sqrt(done),
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


class ResumableLR(LambdaLR):
    """A schedule whose checkpoint tells how far it is; its rates are those of the run that loads it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates done."""
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the updates that were done."""
        self.last_epoch = int(state_dict["last_epoch"])
        self._last_lr = [
            rate * factor(self.last_epoch) for rate, factor in zip(self.base_lrs, self.lr_lambdas, strict=True)
        ]
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            group["lr"] = rate


def build_lr_scheduler(optimizer: Optimizer, section: LRScheduler, num_steps: int) -> ResumableLR:
    """Return the schedule over `num_steps` updates; the section's decay_ratio None decays all after the warm-up."""
    after_warmup = max(0, num_steps - section.warmup_steps)
    decay_steps = after_warmup if section.decay_ratio is None else round(num_steps * section.decay_ratio)
    factor = partial(
        _factor,
        warmup_steps=section.warmup_steps,
        decay_start=num_steps - decay_steps,
        decay_steps=decay_steps,
        decay=section.decay_type,
        floor=section.min_lr_factor,
    )
    return ResumableLR(optimizer, factor)


def _factor(step: int, *, warmup_steps: int, decay_start: int, decay_steps: int, decay: str, floor: float) -> float:
    """Return the factor on the base rate for the update after `step` updates."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if step < decay_start or decay_steps == 0:
        return 1.0
    done = min(1.0, (step - decay_start + 1) / (decay_steps + 1))
    return floor + (1.0 - floor) * _DECAYS[decay](done)
