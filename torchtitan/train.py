"""Train a model: `python -m torchtitan.train --job.config_file=F`, alone or under torchrun."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from torchtitan.build import build_parts, model_args
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.config.job import JobConfig
from torchtitan.config.parse import load_config, to_toml
from torchtitan.config.validate import check
from torchtitan.distributed.determinism import set_determinism
from torchtitan.distributed.process_group import init_process_group, rank_from_env, world_size_from_env
from torchtitan.errors import ConfigError, TitanError
from torchtitan.tools.device import resolve_device
from torchtitan.tools.logging import init_logging
from torchtitan.tools.stop import StopSignal
from torchtitan.trainer import Trainer

logger = logging.getLogger(__name__)
