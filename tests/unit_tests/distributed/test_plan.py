"""Patterns of a plan name whole levels of the module tree, and every family's plan names modules that exist."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.helpers.tiny import T0
from torchtitan.distributed.plan import InnerAttention, find_modules
from torchtitan.models.llama3.args import Llama3Args
from torchtitan.models.llama3.model import build_llama3
from torchtitan.models.llama3.plan import plan_llama3


def _names(model: nn.Module, pattern: str) -> list[str]:
    return [name for name, _ in find_modules(model, pattern)]


def test_a_star_is_one_name() -> None:
    """Breaks when `layers.*` also matches what lies below a layer: FSDP would wrap every linear on its own."""
    model = build_llama3(replace(T0, num_layers=12))
    assert _names(model, "layers.*") == [f"layers.{index}" for index in range(12)]  # in order: 10 after 9
    assert _names(model, "layers.*.attention") == [f"layers.{index}.attention" for index in range(12)]
    assert _names(model, "output") == ["output"]
    assert _names(model, "layer.*") == []


@pytest.mark.parametrize("args", [T0, replace(T0, tie_embeddings=True)])
def test_every_pattern_of_llama3_finds_its_modules(args: Llama3Args) -> None:
    plan = plan_llama3(args)
    with torch.device("meta"):
        model = build_llama3(args)
    assert len(_names(model, plan.blocks)) == args.num_layers
    attention = [module for _, module in find_modules(model, plan.attention)]
    assert len(attention) == args.num_layers and all(isinstance(module, InnerAttention) for module in attention)
    units = [name for pattern in plan.fsdp_units for name in _names(model, pattern)]
    assert units == ["layers.0", "layers.1"] + ([] if args.tie_embeddings else ["tok_embeddings", "output"])
    assert set(plan.kept_gathered) <= set(units)
