"""What the rest of the trainer knows of a model family."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan.attention.masks import MaskKind
from torchtitan.distributed.plan import ParallelPlan
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.init import InitRule


class ModelArgs(Protocol):
    """What every family's arguments hold."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def width_per_head(self) -> int: ...
    @property
    def num_heads(self) -> int:
        """Query heads per layer."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def context_length(self) -> int:
        """The longest sequence the family's positions are made for, in tokens."""

    @property
    def layer_kinds(self) -> tuple[MaskKind, ...]:
        """How far the queries of each layer see back."""

    def flops(self, tokens: int, pairs: int) -> float:
        """Return model FLOPs (not hardware's) of forward and backward, for query-key pairs summed over the layers."""

    def with_vocab_size(self, vocab_size: int) -> "ModelArgs": ...
    def with_attention(self, *, window: int, chunk: int, full_attention_every: int) -> "ModelArgs":
        """Return the same model with other masks; see `layer_kinds`."""


@dataclass(frozen=True)
class ModelSpec:
    """A family: its flavours, and how to build, split and initialise one."""

    name: str
    flavors: dict[str, ModelArgs]  # the functions below take one of these
    build: Callable[[Any, str], Decoder]  # (arguments, model.attn_type), on the current default device
    plan: Callable[[Any], ParallelPlan]
    init_rules: Callable[[Any], tuple[InitRule, ...]]
