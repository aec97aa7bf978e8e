"""Documents to token windows. Letters: S sequence.

A window is a row of a microbatch: S inputs, their labels, and where the documents lie in it. A packing decides which
tokens are in which window; the windows are one endless sequence, those of epoch 0, then those of epoch 1, and so on.
Nothing here knows of ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from torchtitan.data.cache import TokenFile

Order = TypeVar("Order")


@dataclass(frozen=True)
class Window:
    """S inputs and what belongs to each of them; every array is [S]."""

    inputs: np.ndarray  # int64
    labels: np.ndarray  # int64, the token behind each input, IGNORED_LABEL at padding
    offsets: np.ndarray  # int64, the place of each input in its document
    starts: np.ndarray  # int64, the place in the window where the document of each input begins, or goes on from a cut
    crosses: np.ndarray  # bool, whether the label is of another document than the input


class Windows(Protocol):
    """The windows of a token file, by index; a function of (seed, epoch) alone."""

    packing: str
    token_file: TokenFile
    seq_len: int
    seed: int
    windows_per_epoch: float
    max_position: int  # the largest offset of an input in its document

    def __getitem__(self, index: int) -> Window:
        """Return window `index`."""

    def epoch_of(self, index: int) -> int:
        """Return the epoch in which window `index` begins."""


class StreamWindows:
    """Documents joined into one endless stream, cut wherever a window ends.

    Window w has the S + 1 tokens from w * S on, so every token but the first is a label exactly once, and an epoch's
    remainder is the beginning of the next epoch's first window.
    """

    packing = "stream"

    def __init__(self, token_file: TokenFile, seq_len: int, seed: int) -> None:
        self.token_file = token_file
        self.seq_len = seq_len
        self.seed = seed
        self.tokens_per_epoch = int(token_file.offsets[-1])
        self.windows_per_epoch = self.tokens_per_epoch / seq_len
        self.max_position = int(np.diff(token_file.offsets).max()) - 1
        self._orders = Epochs(self._order)

    def __getitem__(self, index: int) -> Window:
        """Return window `index`."""
        return cut_window(*self._read(index * self.seq_len, self.seq_len + 1))

    def epoch_of(self, index: int) -> int:
        """Return the epoch in which window `index` begins."""
        return index * self.seq_len // self.tokens_per_epoch

    def _read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` tokens of the stream from `start` on, and their offsets in their documents, int64 [count]."""
        tokens, offsets = [], []
        while count > 0:
            epoch, first = divmod(start, self.tokens_per_epoch)
            last = min(first + count, self.tokens_per_epoch)
            places, starts = self._find_in_epoch(epoch, first, last)
            tokens.append(np.asarray(self.token_file.tokens[places], np.int64))
            offsets.append(places - starts)
            start += last - first
            count -= last - first
        return np.concatenate(tokens), np.concatenate(offsets)

    def _find_in_epoch(self, epoch: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return where the file has the tokens [first, last) of an epoch, and where their documents begin in it."""
        order = self._orders[epoch]
        low, high = np.searchsorted(order.ends, [first, last - 1], side="right")
        documents, ends = order.documents[low : high + 1], order.ends[low : high + 1]
        # From places in the epoch to places in the file: one shift per document.
        shifts = self.token_file.offsets[documents + 1] - ends
        counts = np.diff(np.minimum(ends, last), prepend=first)
        places = np.arange(first, last) + np.repeat(shifts, counts)
        return places, np.repeat(self.token_file.offsets[documents], counts)

    def _order(self, epoch: int) -> "EpochOrder":
        documents = np.argsort(epoch_keys(self.seed, epoch, self.token_file.num_documents), kind="stable")
        lengths = np.diff(self.token_file.offsets)
        return EpochOrder(documents, np.cumsum(lengths[documents]))


@dataclass(frozen=True)
class EpochOrder:
    """The documents in the order of one epoch."""

    documents: np.ndarray  # int64 [documents]
    ends: np.ndarray  # int64 [documents], where each ends in the epoch


class Epochs(Generic[Order]):
    """What is made of an epoch, by epoch; the last two are kept, as a microbatch may reach over an epoch's end."""

    def __init__(self, make: Callable[[int], Order]) -> None:
        self._make = make
        self._kept: dict[int, Order] = {}

    def __getitem__(self, epoch: int) -> Order:
        if epoch not in self._kept:
            while len(self._kept) >= 2:
                self._kept.pop(min(self._kept))
            self._kept[epoch] = self._make(epoch)
        return self._kept[epoch]


def cut_window(tokens: np.ndarray, offsets: np.ndarray) -> Window:
    """Return the window of S + 1 tokens of joined documents; `offsets` are their places in them, both int64 [S + 1]."""
    begins = offsets == 0
    starts = np.maximum.accumulate(np.where(begins[:-1], np.arange(len(begins) - 1), 0))
    return Window(tokens[:-1], tokens[1:], offsets[:-1], starts, begins[1:])


def epoch_keys(seed: int, epoch: int, count: int) -> np.ndarray:
    """Return the keys that an epoch is shuffled by, uint64 [count].

    Raw bits of the generator: unlike its `permutation`, these stay the same over versions of numpy.
    """
    return np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(count)
