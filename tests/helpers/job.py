"""Run training jobs inside a test's ranks: the real parts, from the real command line."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers.tiny import T0, full
from torchtitan.build import build_parts, model_args
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.config.parse import load_config
from torchtitan.config.validate import check
from torchtitan.distributed.determinism import set_determinism
from torchtitan.errors import TitanError
from torchtitan.models import get_spec
from torchtitan.tools.device import resolve_device
from torchtitan.tools.stop import StopSignal
from torchtitan.trainer import Trainer


@dataclass(frozen=True)
class Outcome:
    """What a job left on one rank."""

    rows: list[dict[str, Any]]  # of metrics.jsonl
    parameters: dict[str, torch.Tensor]  # whole
    optimizer: list[torch.Tensor]  # this rank's shards of the optimizer's state
    step: int
    tokens_seen: int
    error: str  # the TitanError's text; empty: none


def write_documents(path: Path, num_documents: int, seed: int = 0, longest: int = 200) -> Path:
    """Write a JSONL data set whose text this file alone decides, so that numbers can be compared between machines.

    Documents have from a tenth of `longest` words to that many.
    """
    rng = random.Random(seed)
    words = ["context", "parallel", "ring", "head", "tail", "shard", "token", "loss", "gather", "of", "the", "a"]
    texts = (" ".join(rng.choices(words, k=rng.randint(longest // 10, longest))) for _ in range(num_documents))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def options(folder: Path, data: Path, **changes: Any) -> list[str]:
    """Return the command line of a small deterministic fp32 job; `section__option=value` changes or adds one."""
    values: dict[str, Any] = {
        "job__dump_folder": folder,
        "training__dataset_path": data,
        "model__flavor": "tiny",
        "training__local_batch_size": 1,
        "training__seq_len": 64,
        "training__steps": 3,
        "training__mixed_precision_param": "float32",
        "lr_scheduler__warmup_steps": 2,
        "metrics__log_freq": 1,
        "debug__deterministic": True,
        **changes,
    }
    return [f"--{name.replace('__', '.')}={value}" for name, value in values.items()]


def run_job(argv: Sequence[str], trainer_class: type[Trainer] = Trainer) -> Outcome:
    """Train as `torchtitan.train.main` does, within the process group that exists; returns what is left."""
    get_spec("llama3").flavors["tiny"] = replace(T0, vocab_size=0)
    config, _ = load_config(argv)
    device = resolve_device()
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    args = model_args(config, tokenizer)
    world_size = dist.get_world_size()
    check(config, world_size=world_size, ranks_per_node=world_size, device_type=device.type, model=args)
    set_determinism(config.debug.seed, config.debug.deterministic)
    trainer = trainer_class(build_parts(config, args, tokenizer, device, StopSignal()))
    error = ""
    try:
        trainer.train()
    except TitanError as caught:
        error = str(caught)
    trainer.close()
    torch.use_deterministic_algorithms(False)
    return Outcome(
        _rows(Path(config.job.dump_folder)),
        _whole_parameters(trainer),
        _optimizer_state(trainer),
        trainer.step,
        trainer.tokens_seen,
        error,
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    dist.barrier()
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _whole_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    for module in trainer.parts.model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.reshard()
    return {name: full(parameter) for name, parameter in trainer.parts.model.named_parameters()}


def _optimizer_state(trainer: Trainer) -> list[torch.Tensor]:
    states = trainer.parts.optimizer.state.values()
    tensors = [value for state in states for value in state.values()]
    return [
        torch.distributed.tensor.DTensor.to_local(t).clone()
        if isinstance(t, torch.distributed.tensor.DTensor)
        else t.clone()
        for t in tensors
    ]
