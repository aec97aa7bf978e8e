"""Which tokens attend to which, as tables that every layer of a microbatch shares.

Attention is causal. A *segment* is what a query sees before itself at most: its document, or its chunk of it; a window
limits that further. So each query sees one run of consecutive tokens that ends at itself, and no mask of S x S numbers
is ever needed. Letters: B batch, S tokens of whole sequences, L layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch


@dataclass(frozen=True, order=True)
class MaskKind:
    """How far a layer's queries see back within their document; 0: no limit."""

    window: int = 0  # tokens, the query's own among them
    chunk: int = 0  # tokens; a query sees those of its chunk, counted by positions in the document


PLAIN = MaskKind()


def layer_kinds(num_layers: int, kind: MaskKind, full_every: int) -> tuple[MaskKind, ...]:
    """Return the kind of each layer: `kind`, but every `full_every`-th is without limits (0: none is)."""
    return tuple(PLAIN if full_every and layer % full_every == 0 else kind for layer in range(1, num_layers + 1))


class LayerMask(NamedTuple):
    """One kind of mask, as the tables that an attention module computes it by; see `attention.plan`."""

    window: int  # 0: none
    pieces: torch.Tensor  # int64 [pieces, 7], on the CPU: runs of queries, see `Piece`
    take: torch.Tensor  # int64 [B, W]: where each key of this rank's buffer comes from; empty where all is local
    slots: torch.Tensor  # int64 [rows]: where each local and received row lies in the buffer
    send: torch.Tensor  # int64 [rows]: local tokens that other ranks see, rank by rank
    counts: torch.Tensor  # int64 [2, ranks], on the CPU: rows that are sent to and received from each rank

    def to(self, device: torch.device) -> "LayerMask":
        """Return the mask with the tables that move data on `device`."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("take", "slots", "send")}
        return self._replace(**moved)


class Piece(NamedTuple):
    """Consecutive queries of one segment that lie side by side on this rank."""

    row: int  # first sequence of the batch
    rows: int  # sequences that share it
    query: int  # first query, among the rank's tokens
    length: int  # queries
    first_key: int  # among the keys of the rank's buffer
    end_key: int
    start: int  # place of the first query among those keys


@dataclass(frozen=True)
class MaskWork:
    """What attention costs, summed over the layers; of all ranks, by rank."""

    pairs: torch.Tensor  # int64 [ranks]: query-key pairs, of one head
    needed: torch.Tensor  # int64 [ranks]: tokens of other ranks whose keys and values travel here
    remote: int  # tokens of other ranks, of each rank


class Sight:
    """What each token sees under one kind of mask; all fields int64 [B, S]."""

    def __init__(self, document_starts: np.ndarray, positions: np.ndarray, kind: MaskKind) -> None:
        tokens = np.arange(document_starts.shape[1])
        begins = document_starts == tokens
        if kind.chunk:
            begins |= positions % kind.chunk == 0
        begins[:, 0] = True
        self.starts = np.maximum.accumulate(np.where(begins, tokens, 0), axis=1)  # of each token's segment
        later = np.where(begins, tokens, len(tokens))[:, 1:]
        later = np.concatenate([later, np.full((len(later), 1), len(tokens))], axis=1)
        self.ends = np.minimum.accumulate(later[:, ::-1], axis=1)[:, ::-1]
        self.first = self.starts  # the first token that it sees
        if kind.window:
            self.first = np.maximum(self.starts, tokens - kind.window + 1)
        self.pairs = tokens - self.first + 1  # how many it sees


@dataclass(frozen=True)
class AttentionMasks:
    """The masks of one microbatch, for every kind of layer: documents are the same for all."""

    document_starts: torch.Tensor  # int32 [B, S], on the CPU: in its row, the first token of each token's document
    positions: torch.Tensor  # int32 [B, S], on the CPU: in the document
    layer_kinds: tuple[MaskKind, ...]  # of each layer
    layers: Mapping[MaskKind, LayerMask]  # empty until planned
    order: torch.Tensor | None = None  # int64 [B, S]: tokens in the order in which the cp ranks hold them
    work: MaskWork | None = None
    planned_for: tuple[int, int] = (1, 0)  # ranks that share the sequences, and which of them

    @cached_property
    def sights(self) -> dict[MaskKind, Sight]:
        """Return what each token sees, by kind, in the order of the layers."""
        starts, positions = self.document_starts.numpy(), self.positions.numpy()
        return {kind: Sight(starts, positions, kind) for kind in dict.fromkeys(self.layer_kinds)}

    def to(self, device: torch.device) -> "AttentionMasks":
        """Return the masks with the tables that move data on `device`."""
        return replace(self, layers={kind: mask.to(device) for kind, mask in self.layers.items()})
