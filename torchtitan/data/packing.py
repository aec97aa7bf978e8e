"""Windows that cut no document unless they must. Letters: S sequence.

Source: "Fewer Truncations Improve Language Modeling", section 3, arXiv:2404.10830.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from torchtitan.batch import IGNORED_LABEL
from torchtitan.data.cache import TokenFile
from torchtitan.data.text import Epochs, Window, epoch_keys


@dataclass(frozen=True)
class Pieces:
    """What the documents are cut into; every array is int64 [pieces]."""

    places: np.ndarray  # of the first token in the file
    offsets: np.ndarray  # of the first token in its document
    slots: np.ndarray  # inputs, 1 to S


@dataclass(frozen=True)
class EpochPacking:
    """The pieces in the order of one epoch, window by window."""

    pieces: np.ndarray  # int64 [pieces]
    bounds: np.ndarray  # int64 [windows + 1], where the pieces of each window begin


class BestFitWindows:
    """Documents packed into the windows of an epoch by best-fit decreasing; what stays free is padding.

    A document takes a slot for each token but its last, which is a label only. So every token but a document's first is
    a label exactly once per epoch. Which window has pieces of which lengths is the same in every epoch; the epoch
    decides which pieces those are, their order, and the order of the windows.
    """

    packing = "best_fit"

    def __init__(self, token_file: TokenFile, seq_len: int, seed: int, pad_id: int) -> None:
        self.token_file = token_file
        self.seq_len = seq_len
        self.seed = seed
        self.pad_id = pad_id
        document_offsets = np.asarray(token_file.offsets)
        self.max_position = int(np.diff(document_offsets).max()) - 2
        self._pieces = cut_pieces(document_offsets, seq_len)
        self._windows = pack(-np.sort(-self._pieces.slots), seq_len)
        self._num_windows = int(self._windows.max()) + 1
        self.windows_per_epoch = float(self._num_windows)
        self.padding_share = 1 - int(self._pieces.slots.sum()) / (self._num_windows * seq_len)
        self._epochs = Epochs(self._pack_epoch)

    def __getitem__(self, index: int) -> Window:
        """Return window `index`."""
        epoch, window = divmod(index, self._num_windows)
        packing = self._epochs[epoch]
        pieces = packing.pieces[packing.bounds[window] : packing.bounds[window + 1]]
        slots = self._pieces.slots[pieces]
        starts = np.repeat(np.cumsum(slots) - slots, slots)
        within = np.arange(len(starts)) - starts
        places = np.repeat(self._pieces.places[pieces], slots) + within
        offsets = np.repeat(self._pieces.offsets[pieces], slots) + within
        tokens, padding = self.token_file.tokens, (0, self.seq_len - len(starts))
        return Window(
            inputs=np.pad(tokens[places].astype(np.int64), padding, constant_values=self.pad_id),
            labels=np.pad(tokens[places + 1].astype(np.int64), padding, constant_values=IGNORED_LABEL),
            offsets=np.concatenate([offsets, np.arange(padding[1])]),
            starts=np.pad(starts, padding, constant_values=len(starts)),  # padding is a document of its own
            crosses=np.zeros(self.seq_len, bool),
        )

    def epoch_of(self, index: int) -> int:
        """Return the epoch of window `index`."""
        return index // self._num_windows

    def _pack_epoch(self, epoch: int) -> EpochPacking:
        num_pieces = len(self._windows)
        keys = epoch_keys(self.seed, epoch, 2 * num_pieces + self._num_windows)
        # Falling lengths, as in self._windows; equal ones are shuffled.
        by_length = np.lexsort((keys[:num_pieces], -self._pieces.slots))
        shuffled = np.empty(self._num_windows, np.int64)
        shuffled[np.argsort(keys[2 * num_pieces :], kind="stable")] = np.arange(self._num_windows)
        windows = shuffled[self._windows]
        # Shuffled within each window too: the longest is not to come first in all of them.
        order = np.lexsort((keys[num_pieces : 2 * num_pieces], windows))
        return EpochPacking(by_length[order], np.cumsum(np.bincount(windows + 1)))


def cut_pieces(document_offsets: np.ndarray, seq_len: int) -> Pieces:
    """Return the pieces of all documents: S slots each, and the rest of a document."""
    slots = np.maximum(np.diff(document_offsets) - 1, 0)  # of each document
    counts = -(-slots // seq_len)
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # within the document
    offsets = numbers * seq_len
    places = np.repeat(document_offsets[:-1], counts) + offsets
    return Pieces(places, offsets, np.minimum(np.repeat(slots, counts) - offsets, seq_len))


def pack(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the window of each piece, int64 [pieces]: each goes to the fullest window that it fits in.

    `lengths` are falling, 1 to S. All pieces of a length are placed together: a window that is the best fit for one of
    them stays it for the next until it holds no more. A window's free slots are at least halved each time, so there
    are O(lengths * log S) rounds for the different lengths, however many pieces.
    """
    windows = np.empty(len(lengths), np.int64)
    open_windows = OpenWindows(seq_len)
    different, counts = np.unique(lengths, return_counts=True)
    placed = 0
    for length, count in zip(different[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count > 0:
            free, found = open_windows.take_best(length, count)
            per_window = free // length
            num_full, remainder = divmod(min(count, per_window * len(found)), per_window)
            taken = num_full * per_window + remainder
            windows[placed : placed + taken] = np.repeat(found, per_window)[:taken]
            open_windows.put(free - per_window * length, found[:num_full])
            open_windows.put(free - remainder * length, found[num_full : num_full + 1])
            open_windows.put(free, found[num_full + 1 :])
            placed += taken
            count -= taken
    return windows


class OpenWindows:
    """The windows that have free slots, by their number."""

    def __init__(self, seq_len: int) -> None:
        self._seq_len = seq_len
        self._num_windows = 0
        self._free: list[int] = []  # the numbers of free slots that some window has, rising
        self._windows: dict[int, list[np.ndarray]] = {}

    def take_best(self, length: int, count: int) -> tuple[int, np.ndarray]:
        """Take out all windows with the least free slots that hold `length`, else new ones for `count` such pieces."""
        index = bisect_left(self._free, length)
        if index < len(self._free):
            free = self._free.pop(index)
            return free, np.concatenate(self._windows.pop(free))
        first = self._num_windows
        self._num_windows += -(-count // (self._seq_len // length))
        return self._seq_len, np.arange(first, self._num_windows)

    def put(self, free: int, windows: np.ndarray) -> None:
        """Add windows that have `free` free slots each."""
        if free == 0 or len(windows) == 0:
            return
        if free not in self._windows:
            insort(self._free, free)
            self._windows[free] = []
        self._windows[free].append(windows)
