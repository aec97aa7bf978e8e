"""Every option of the optimizer section changes what it says."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchtitan.components.optimizer import build_optimizer
from torchtitan.config.sections import Optimizer


def _updated(section: Optimizer) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = build_optimizer(model, section)
    for step in range(3):
        model.weight.grad = torch.full_like(model.weight, 0.1 * (step + 1))
        optimizer.step()
    return model.weight.detach().clone()


def test_adamw_is_torchs() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        model.weight.grad = torch.full_like(model.weight, 0.1 * (step + 1))
        optimizer.step()
    for implementation in ("fused", "foreach", "for-loop"):
        actual = _updated(Optimizer(lr=0.01, implementation=implementation))
        assert torch.allclose(actual, model.weight, rtol=1e-5, atol=1e-7), implementation


@pytest.mark.parametrize(
    "change", [{"lr": 0.02}, {"beta1": 0.5}, {"beta2": 0.5}, {"eps": 0.1}, {"weight_decay": 0.5}, {"name": "Adam"}]
)
def test_every_option_acts(change: dict[str, object]) -> None:
    base = Optimizer(lr=0.01)
    assert not torch.equal(_updated(base), _updated(replace(base, **change)))


def test_implementation_picks_the_form() -> None:
    groups = {
        implementation: build_optimizer(nn.Linear(2, 2), Optimizer(implementation=implementation)).param_groups[0]
        for implementation in ("fused", "foreach", "for-loop")
    }
    assert groups["fused"]["fused"] and groups["foreach"]["foreach"]
    assert not groups["for-loop"]["fused"] and not groups["for-loop"]["foreach"]
