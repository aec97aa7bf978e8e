"""Warm-up, stable, decay: the factors by hand."""

import math

import pytest
import torch

from torchtitan.components.lr_scheduler import build_lr_scheduler
from torchtitan.config.sections import LRScheduler


def _rates(section: LRScheduler, num_steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(optimizer, section, num_steps)
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_warm_up_stable_decay() -> None:
    rates = _rates(LRScheduler(warmup_steps=2, decay_ratio=0.3, min_lr_factor=0.2), 10)
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_without_a_ratio_all_after_the_warm_up_decays() -> None:
    assert _rates(LRScheduler(warmup_steps=1), 5) == pytest.approx([0.5, 0.8, 0.6, 0.4, 0.2])


def test_a_ratio_of_zero_never_decays() -> None:
    assert _rates(LRScheduler(warmup_steps=0, decay_ratio=0.0), 3) == [1, 1, 1]


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)])
def test_shapes_of_the_decay(shape: str, middle: float) -> None:
    rates = _rates(LRScheduler(warmup_steps=0, decay_ratio=1.0, decay_type=shape), 3)
    assert rates[1] == pytest.approx(middle)
    assert rates == sorted(rates, reverse=True)


def test_a_resumed_schedule_goes_on() -> None:
    section = LRScheduler(warmup_steps=2, decay_ratio=0.5)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = build_lr_scheduler(optimizer, section, 8)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    other = build_lr_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), section, 8)
    other.load_state_dict(scheduler.state_dict())
    assert other.get_last_lr() == scheduler.get_last_lr()
    assert _rates(section, 8)[5] == scheduler.get_last_lr()[0]
