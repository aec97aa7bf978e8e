"""A training run against a plain loop over `transformers`' Llama: same batches, same weights, no code in common."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.job import Outcome, options, run_job
from tests.helpers.ranks import run_ranks
from tests.helpers.transformers_llama import build_transformers_llama, copy_weights
from torchtitan.components.lr_scheduler import build_lr_scheduler
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.config.parse import load_config
from torchtitan.data.loader import build_dataloader
from torchtitan.models.common.init import initialise
from torchtitan.models.llama3.args import FLAVORS
from torchtitan.models.llama3.model import build_llama3
from torchtitan.models.llama3.plan import init_rules_llama3


def _job(cache: str, argv: list[str]) -> Outcome:
    os.environ["TORCHTITAN_CACHE"] = cache
    torch.set_num_threads(2)
    return run_job(argv)


def _plain_loop(argv: list[str], cache: Path) -> list[float]:
    config, _ = load_config(argv)
    training, section = config.training, config.optimizer
    args = replace(FLAVORS["debugmodel"], vocab_size=4096)
    own = build_llama3(args)
    initialise(own, init_rules_llama3(args), config.debug.seed)
    model = build_transformers_llama(args, attention="sdpa")
    copy_weights(own, model, args)
    loader = build_dataloader(
        dataset="python_stdlib",
        dataset_path="",
        text_field="text",
        tokenizer=build_tokenizer(""),
        seq_len=training.seq_len,
        packing="stream",
        document_masks=False,
        context_length=args.context_length,
        restart_positions=False,
        local_batch_size=training.local_batch_size,
        global_batch_size=training.local_batch_size,
        dp_rank=0,
        dp_degree=1,
        seed=config.debug.seed,
        num_workers=0,
        cache_folder=cache,
        build_cache=True,
        barrier=lambda: None,
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        weight_decay=section.weight_decay,
    )
    schedule = build_lr_scheduler(optimizer, config.lr_scheduler, training.steps)
    losses = []
    for batch, _ in zip(loader, range(training.steps), strict=False):
        logits = model(batch["input"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_norm)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("dtype", "steps", "tolerance"),
    [
        pytest.param("float32", 5, 1e-5),  # short: two orders of summation have not drifted apart yet
        pytest.param("float32", 100, 5e-3, marks=pytest.mark.slow),
        pytest.param("bfloat16", 100, 5e-3, marks=pytest.mark.slow),
    ],
)
def test_losses_follow_a_plain_transformers_loop(tmp_path: Path, dtype: str, steps: int, tolerance: float) -> None:
    """A falling loss proves little: a model without attention falls as far in 100 steps."""
    changes: dict[str, Any] = {
        "model__flavor": "debugmodel",
        "training__dataset_path": "",
        "training__seq_len": 256,
        "training__local_batch_size": 2,
        "training__steps": steps,
        "training__mixed_precision_param": dtype,
        "optimizer__lr": 1e-3,
        "lr_scheduler__warmup_steps": 10 if steps > 10 else 0,
    }
    argv = options(tmp_path / "run", Path(), **changes)
    argv = [argument for argument in argv if argument != "--training.dataset_path="]
    rows = run_ranks(1, _job, str(tmp_path / "cache"), argv)[0].rows
    expected = _plain_loop(argv, tmp_path / "cache")
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=tolerance)
