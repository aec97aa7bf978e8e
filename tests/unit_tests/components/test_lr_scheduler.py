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


def test_a_resumed_schedule_has_the_rates_of_the_run_that_resumes() -> None:
    section = LRScheduler(warmup_steps=2)
    before = build_lr_scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), section, 8)
    for _ in range(5):
        before.optimizer.step()
        before.step()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    after = build_lr_scheduler(optimizer, section, 8)
    after.load_state_dict(before.state_dict())
    assert after.get_last_lr()[0] == optimizer.param_groups[0]["lr"] == 3 * before.get_last_lr()[0]


def test_a_warm_up_as_long_as_the_run_never_reaches_the_rate() -> None:
    assert _rates(LRScheduler(warmup_steps=4), 3) == pytest.approx([0.2, 0.4, 0.6])


@pytest.mark.parametrize("shape", ["linear", "sqrt", "cosine"])
def test_beyond_the_end_the_rate_stays_at_the_floor(shape: str) -> None:
    """A schedule that runs on (a resumed run with fewer steps) must not rise or turn negative."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_lr_scheduler(optimizer, LRScheduler(warmup_steps=0, decay_type=shape, min_lr_factor=0.25), 4)
    rates = []
    for _ in range(8):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates[3:] == pytest.approx([0.5] * 5)
    assert rates[0] > rates[1] > rates[2] > 0.5
