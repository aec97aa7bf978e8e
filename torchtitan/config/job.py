"""The whole configuration of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, get_type_hints

from torchtitan.config.sections import (
    ActivationCheckpoint,
    Checkpoint,
    Comm,
    Compile,
    Debug,
    Job,
    LRScheduler,
    Metrics,
    Model,
    Optimizer,
    Parallelism,
    Profiling,
    Training,
    Verify,
)


@dataclass(frozen=True)
class JobConfig:
    """All sections; only the entry points and `build` see it whole."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    profiling: Profiling = field(default_factory=Profiling)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)
    verify: Verify = field(default_factory=Verify)


SECTIONS: Mapping[str, type[Any]] = MappingProxyType(get_type_hints(JobConfig))

OPTIONS: Mapping[str, Any] = MappingProxyType(
    {f"{section}.{name}": kind for section, cls in SECTIONS.items() for name, kind in get_type_hints(cls).items()}
)
"""The type of every option, by its dotted name, in the order of the sections."""


def value_of(config: JobConfig, option: str) -> Any:
    """Return the value of an option by its dotted name."""
    return attrgetter(option)(config)
