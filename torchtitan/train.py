"""Train a model: `python -m torchtitan.train --job.config_file=F`, alone or under torchrun."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.build import build_parts, model_args
from torchtitan.components.tokenizer import Tokenizer, build_tokenizer
from torchtitan.config.job import JobConfig
from torchtitan.config.parse import load_config, to_toml
from torchtitan.config.validate import check
from torchtitan.distributed.determinism import set_determinism
from torchtitan.distributed.process_group import (
    init_process_group,
    is_lost_peer,
    leave_process_group,
    rank_from_env,
    ranks_per_node_from_env,
    world_size_from_env,
)
from torchtitan.errors import CheckpointError, ConfigError, NonFiniteError, TitanError
from torchtitan.models.spec import ModelArgs
from torchtitan.tools.device import keep_freed_memory, resolve_device
from torchtitan.tools.logging import init_logging, speaks
from torchtitan.tools.stop import StopSignal
from torchtitan.trainer import Trainer

logger = logging.getLogger("torchtitan.train")  # by name: run as a script, this module is __main__


@dataclass(frozen=True)
class Job:
    """A job that this process has joined, with everything validated and nothing allocated."""

    config: JobConfig
    args: ModelArgs
    tokenizer: Tokenizer
    device: torch.device
    stop: StopSignal


def main(argv: Sequence[str] | None = None, trainer_class: type[Trainer] = Trainer) -> int:
    """Run a training job from its command line; returns the exit code (0 done or stopped, 1 failed, 2 refused).

    `trainer_class` is how a file of the user's own brings its Trainer: `sys.exit(main(trainer_class=MyTrainer))`.
    """
    return start(argv, partial(train, trainer_class=trainer_class))


def start(argv: Sequence[str] | None, action: Callable[[Job], int]) -> int:
    """Parse, validate, join and run `action`; returns its exit code, or that of an error, which is shown once."""
    stop = StopSignal()
    stop.install()
    try:
        return _run(sys.argv[1:] if argv is None else argv, action, stop)
    except (ConfigError, CheckpointError, NonFiniteError) as error:  # every rank has it alike: shown once
        if speaks():
            print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except TitanError as error:
        logger.error("%s", error)
        return error.exit_code
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        logger.error("rank %d lost a peer, which tells why: %s", rank_from_env(), str(error).splitlines()[0])
        return TitanError.exit_code


def _run(argv: Sequence[str], action: Callable[[Job], int], stop: StopSignal) -> int:
    with _heard_once():
        config, notes = load_config(argv)
        if config.job.print_config:
            print(to_toml(config), end="")
            return 0
    init_logging(color=not config.metrics.disable_color_printing)
    job = _join(config, notes, stop)
    code = action(job)
    leave_process_group()
    return code


@contextlib.contextmanager
def _heard_once() -> Iterator[None]:
    """Let only a rank that speaks write to stdout: all ranks have the same help and configuration to show."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if speaks() else nowhere):
        yield


def train(job: Job, trainer_class: type[Trainer]) -> int:
    """Build and train; returns 0. Collective."""
    if job.config.job.description:
        logger.info("Job: %s", job.config.job.description)
    _write_config(job.config)
    trainer = trainer_class(build_parts(job.config, job.args, job.tokenizer, job.device, job.stop))
    trainer.train()
    trainer.close()
    return 0


def _join(config: JobConfig, notes: Sequence[str], stop: StopSignal) -> Job:
    """Validate, so that a refusal is all that is shown; then note what has no effect, and join the job. Collective."""
    device = resolve_device()
    if device.type == "cpu":
        keep_freed_memory()
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    args = model_args(config, tokenizer)
    check(
        config,
        world_size=world_size_from_env(),
        ranks_per_node=ranks_per_node_from_env(),
        device_type=device.type,
        model=args,
    )
    for note in notes if speaks() else ():
        logger.warning("%s", note)
    set_determinism(config.debug.seed, config.debug.deterministic)
    init_process_group(device, config.comm.init_timeout_seconds)
    return Job(config, args, tokenizer, device, stop)


def _write_config(config: JobConfig) -> None:
    if dist.get_rank() == 0:
        folder = Path(config.job.dump_folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
