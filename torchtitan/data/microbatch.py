"""From windows to microbatches. Letters: B batch, S sequence."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchtitan.batch import IGNORED_LABEL
from torchtitan.data.text import Window
from torchtitan.errors import DataError

Microbatch = dict[str, Any]  # tensors, and what `prepare` puts beside them


def unchanged(microbatch: Microbatch) -> Microbatch:
    """Return the microbatch itself."""
    return microbatch


@dataclass(frozen=True)
class Collation:
    """How windows become a microbatch."""

    document_masks: bool  # attention is confined to documents
    context_length: int  # of the model, in tokens: positions stay below it
    restart_positions: bool  # after context_length tokens of a document; else longer documents are refused
    prepare: Callable[[Microbatch], Microbatch]

    def collate(self, windows: list[Window]) -> Microbatch:
        """Return a microbatch of B windows, prepared."""
        inputs = np.stack([window.inputs for window in windows])  # [B, S], as all below
        labels = np.stack([window.labels for window in windows])
        if not self.document_masks:
            positions = np.tile(np.arange(inputs.shape[1]), (len(windows), 1))
            return self.prepare(_tensors(inputs, labels, positions=positions))
        labels[np.stack([window.crosses for window in windows])] = IGNORED_LABEL
        positions = np.stack([window.offsets for window in windows]) % self.context_length
        starts = np.stack([window.starts for window in windows])
        return self.prepare(_tensors(inputs, labels, positions=positions, document_starts=starts))

    def check_document(self, which: str, num_tokens: int, max_position: int) -> None:
        """Check that the positions of a document stay within the model's context.

        Raises:
            DataError: they do not, and are not to restart.
        """
        if not self.document_masks or self.restart_positions or max_position < self.context_length:
            return
        raise DataError(
            f"--model.attn_mask=document: {which} has {num_tokens} tokens, so positions up to {max_position}, and the "
            f"model's context is {self.context_length}; positions count from a document's beginning and stay below the "
            "context; give --training.position_overflow=restart, another --model.flavor, or --model.attn_mask=causal"
        )


def _tensors(inputs: np.ndarray, labels: np.ndarray, **places: np.ndarray) -> Microbatch:
    tensors = {"input": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
    return tensors | {name: torch.from_numpy(place.astype(np.int32)) for name, place in places.items()}
