"""The one type that flows through a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from torchtitan.attention.masks import AttentionMasks
from torchtitan.errors import TitanError

IGNORED_LABEL = -100


@dataclass(frozen=True)
class CPLayout:
    """How a sequence lies on the ranks of the cp axis."""

    degree: int
    load_balancer: str
    seq_len: int  # of the whole sequence, in tokens
    ulysses_degree: int = 1

    @property
    def local_seq_len(self) -> int:
        """Return the tokens per rank."""
        return self.seq_len // self.degree

    def causal_pairs(self, rank: int) -> int:
        """Return the query-key pairs of `rank` in one sequence under the plain causal mask, for all heads' mean."""
        if self.load_balancer != "none":
            return self.seq_len * (self.seq_len + 1) // 2 // self.degree
        tokens = self.local_seq_len * self.ulysses_degree  # of each rank of the method
        before = rank // self.ulysses_degree * tokens
        return (before * tokens + tokens * (tokens + 1) // 2) // self.ulysses_degree


@dataclass(frozen=True)
class Batch:
    """One microbatch of this rank. B batch, S sequence (this rank's part of it once cut)."""

    inputs: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], shifted already; IGNORED_LABEL adds nothing to the loss
    positions: torch.Tensor  # int32 [B, S], in the whole sequence or document, however it is cut
    masks: AttentionMasks | None = None  # None: plain causal
    cp_layout: CPLayout | None = None  # None: whole sequences

    def cut(self, layout: CPLayout, shards: Sequence[torch.Tensor], masks: AttentionMasks | None = None) -> "Batch":
        """Return this rank's shard of the batch, as `layout` has it: inputs, labels, positions, and their masks.

        Raises:
            TitanError: the batch is cut already, or the shards do not have the length of the layout.
        """
        self.check_uncut(layout.degree)
        inputs, labels, positions = shards
        for name, shard in (("inputs", inputs), ("labels", labels), ("positions", positions)):
            if shard.size(-1) != layout.local_seq_len:
                raise TitanError(f"{name} has local length {shard.size(-1)}, the cp layout {layout.local_seq_len}")
        return replace(self, inputs=inputs, labels=labels, positions=positions, masks=masks, cp_layout=layout)

    def check_uncut(self, degree: int) -> None:
        """Raise a TitanError where cutting by `degree` would cut a cut batch once more."""
        if self.cp_layout is not None:
            local = self.cp_layout.local_seq_len
            raise TitanError(
                f"the batch is cut over {self.cp_layout.degree} cp ranks already: its local length is {local}, "
                f"cutting it again over {degree} would leave {local // degree}"
            )
