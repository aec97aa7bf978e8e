"""Documents to token windows. Letters: S sequence.

Documents lie in one endless stream: those of epoch 0 in their order, then those of epoch 1 in another, and so on.
Window w is the S + 1 tokens from w * S on, so every token but the first is a label exactly once, and an epoch's
remainder is the beginning of the next epoch's first window. Nothing here knows of ranks.
"""

from dataclasses import dataclass

import numpy as np

from torchtitan.data.cache import TokenFile


@dataclass(frozen=True)
class EpochOrder:
    """The documents in the order of one epoch."""

    documents: np.ndarray  # int64 [documents]
    ends: np.ndarray  # int64 [documents], where each ends in the epoch


class Windows:
    """The windows of a token file, by index; a function of (seed, epoch) alone."""

    def __init__(self, token_file: TokenFile, seq_len: int, seed: int) -> None:
        self.token_file = token_file
        self.seq_len = seq_len
        self.seed = seed
        self.tokens_per_epoch = int(token_file.offsets[-1])
        self._orders: dict[int, EpochOrder] = {}  # the last two: a window may reach over an epoch's end

    def __getitem__(self, index: int) -> np.ndarray:
        """Return window `index`, int64 [S + 1]."""
        return self.read(index * self.seq_len, self.seq_len + 1)

    def epoch_of(self, index: int) -> int:
        """Return the epoch in which window `index` begins."""
        return index * self.seq_len // self.tokens_per_epoch

    def read(self, start: int, count: int) -> np.ndarray:
        """Return `count` tokens of the stream from `start` on, int64 [count]."""
        parts = []
        while count > 0:
            epoch, first = divmod(start, self.tokens_per_epoch)
            last = min(first + count, self.tokens_per_epoch)
            parts.append(self._read_in_epoch(epoch, first, last))
            start += last - first
            count -= last - first
        return np.concatenate(parts)

    def _read_in_epoch(self, epoch: int, first: int, last: int) -> np.ndarray:
        order = self._order(epoch)
        low, high = np.searchsorted(order.ends, [first, last - 1], side="right")
        documents, ends = order.documents[low : high + 1], order.ends[low : high + 1]
        # From places in the epoch to places in the file: one shift per document.
        shifts = self.token_file.offsets[documents + 1] - ends
        counts = np.diff(np.minimum(ends, last), prepend=first)
        places = np.arange(first, last) + np.repeat(shifts, counts)
        return np.asarray(self.token_file.tokens[places], np.int64)

    def _order(self, epoch: int) -> EpochOrder:
        if epoch not in self._orders:
            while len(self._orders) >= 2:
                self._orders.pop(min(self._orders))
            documents = epoch_order(self.seed, epoch, self.token_file.num_documents)
            lengths = np.diff(self.token_file.offsets)
            self._orders[epoch] = EpochOrder(documents, np.cumsum(lengths[documents]))
        return self._orders[epoch]


def epoch_order(seed: int, epoch: int, num_documents: int) -> np.ndarray:
    """Return the documents in the order of an epoch, int64 [num_documents].

    From raw bits of the generator: unlike its `permutation`, these stay the same over versions of numpy.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_documents)
    return np.argsort(keys, kind="stable")
