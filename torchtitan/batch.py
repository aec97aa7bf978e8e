"""The one type that flows through a step."""

from dataclasses import dataclass, replace

import torch

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


@dataclass(frozen=True)
class Batch:
    """One microbatch of this rank. B batch, S sequence (this rank's part of it once cut)."""

    inputs: torch.Tensor  # int64 [B, S]
    labels: torch.Tensor  # int64 [B, S], shifted already; IGNORED_LABEL adds nothing to the loss
    positions: torch.Tensor  # int32 [B, S], in the whole sequence, however it is cut
    cp_layout: CPLayout | None = None  # None: whole sequences

    def cut(self, layout: CPLayout, inputs: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> "Batch":
        """Return this rank's shard of the batch, as `layout` has it.

        Raises:
            TitanError: the batch is cut already, or the shards do not have the length of the layout.
        """
        self.check_uncut(layout.degree)
        for name, shard in (("inputs", inputs), ("labels", labels), ("positions", positions)):
            if shard.size(-1) != layout.local_seq_len:
                raise TitanError(f"{name} has local length {shard.size(-1)}, the cp layout {layout.local_seq_len}")
        return replace(self, inputs=inputs, labels=labels, positions=positions, cp_layout=layout)

    def check_uncut(self, degree: int) -> None:
        """Raise a TitanError where cutting by `degree` would cut a cut batch once more."""
        if self.cp_layout is not None:
            local = self.cp_layout.local_seq_len
            raise TitanError(
                f"the batch is cut over {self.cp_layout.degree} cp ranks already: its local length is {local}, "
                f"cutting it again over {degree} would leave {local // degree}"
            )
