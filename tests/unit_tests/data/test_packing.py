"""Packing by best fit: nothing cut without need, nothing lost or doubled, and as full as the plain algorithm."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.data.conftest import token_file
from torchtitan.batch import IGNORED_LABEL
from torchtitan.data import packing
from torchtitan.data.packing import BestFitWindows, pack
from torchtitan.data.text import Window

PAD = 10**6


def runs(window: Window) -> list[tuple[list[int], list[int], list[int]]]:
    """Return inputs, labels and offsets of each document in a window, padding being one."""
    bounds = [*sorted(set(window.starts.tolist())), len(window.starts)]
    assert bounds[0] == 0
    parts = [slice(first, last) for first, last in pairwise(bounds)]
    for part in parts:
        assert set(window.starts[part].tolist()) == {part.start}
    return [
        (window.inputs[part].tolist(), window.labels[part].tolist(), window.offsets[part].tolist()) for part in parts
    ]


def best_fit(lengths: list[int], seq_len: int) -> list[list[int]]:
    """Return the lengths in each window, from one piece at a time put into the fullest window that it fits in."""
    windows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [window for window in windows if sum(window) + length <= seq_len]
        if not fitting:
            windows.append([])
        max(fitting or windows[-1:], key=sum).append(length)
    return windows


def first_fit(lengths: list[int], seq_len: int) -> int:
    """Return the number of windows that lengths take in their own order, each in the first window it fits in."""
    free: list[int] = []
    for length in lengths:
        index = next((index for index, slots in enumerate(free) if slots >= length), len(free))
        free[index:] = free[index:] or [seq_len]
        free[index] -= length
    return len(free)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30), seq_len=st.integers(1, 24), seed=st.integers(0, 9)
)
def test_an_epoch(lengths: list[int], seq_len: int, seed: int) -> None:
    """Each label once, each document whole or in as few pieces as it can be, the rest padding; twice."""
    documents = token_file([*lengths, 2])  # one has something to learn
    windows = BestFitWindows(documents, seq_len, seed, PAD)
    num_windows = int(windows.windows_per_epoch)
    is_first = np.isin(np.arange(len(documents.tokens)), documents.offsets[:-1])
    for epoch in range(2):
        found, num_padding = [], 0
        for index in range(epoch * num_windows, (epoch + 1) * num_windows):
            assert windows.epoch_of(index) == epoch
            assert not windows[index].crosses.any()
            for inputs, labels, offsets in runs(windows[index]):
                if PAD in inputs:
                    assert set(inputs) == {PAD} and set(labels) == {IGNORED_LABEL}
                    assert offsets == list(range(len(inputs)))
                    assert PAD in windows[index].inputs[-len(inputs) :], "padding is at the end"
                    num_padding += len(inputs)
                    continue
                assert labels == [token + 1 for token in inputs], "each place has its place as token"
                assert offsets == [offsets[0] + i for i in range(len(inputs))]
                assert offsets[0] % seq_len == 0, "cut at multiples of S only"
                document = int(np.searchsorted(documents.offsets, inputs[0], side="right")) - 1
                assert inputs[0] == documents.offsets[document] + offsets[0]
                assert len(inputs) == seq_len or labels[-1] + 1 == documents.offsets[document + 1]
                found += labels
        assert sorted(found) == np.flatnonzero(~is_first).tolist()
        assert num_padding == num_windows * seq_len - len(found)
        assert windows.padding_share == pytest.approx(num_padding / (num_windows * seq_len))


@settings(deadline=None)
@given(data=st.data(), seq_len=st.integers(1, 40))
def test_it_is_best_fit_decreasing(data: st.DataObject, seq_len: int) -> None:
    """As full, window by window: of equally full windows either may take a piece, so what is in them may differ."""
    lengths = sorted(data.draw(st.lists(st.integers(1, seq_len), min_size=1, max_size=60)), reverse=True)
    windows = pack(np.array(lengths), seq_len)
    slots = np.bincount(windows, weights=lengths).tolist()
    assert sorted(slots) == sorted(map(sum, best_fit(lengths, seq_len)))


def test_padding_is_at_most_that_of_first_fit() -> None:
    lengths = np.maximum(2, np.random.default_rng(0).lognormal(4, 1, 2000)).astype(int)
    windows = BestFitWindows(token_file(lengths.tolist()), 256, 0, PAD)
    pieces = [length for slots in lengths - 1 for length in [256] * (slots // 256) + [slots % 256] if length]
    assert windows.windows_per_epoch <= first_fit(pieces, 256)
    assert 0 < windows.padding_share < 0.005


def test_many_documents_take_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work goes with the different lengths, not with documents times windows: a million take a second."""
    rounds = []
    take_best = packing.OpenWindows.take_best

    def counted(self: packing.OpenWindows, length: int, count: int) -> tuple[int, np.ndarray]:
        rounds.append(length)
        return take_best(self, length, count)

    monkeypatch.setattr(packing.OpenWindows, "take_best", counted)
    lengths = np.sort(np.clip(np.random.default_rng(0).lognormal(6, 1.2, 300_000).astype(int), 1, 4096))[::-1]
    num_windows = pack(lengths, 4096).max() + 1
    assert num_windows < lengths.sum() / 4096 * 1.001
    assert len(rounds) < 4 * len(np.unique(lengths))


def test_it_is_a_function_of_seed_and_epoch() -> None:
    """Read in any order, by any number of readers; each epoch and seed has an order of its own."""
    lengths = [5, 9, 5, 5, 2, 30, 5, 9]
    num_windows = int(BestFitWindows(token_file(lengths), 16, 0, PAD).windows_per_epoch)
    orders = set()
    for seed in range(3):
        forth, back = (BestFitWindows(token_file(lengths), 16, seed, PAD) for _ in range(2))
        there = [forth[index].inputs.tolist() for index in range(3 * num_windows)]
        assert [back[index].inputs.tolist() for index in reversed(range(3 * num_windows))] == there[::-1]
        epochs = [there[epoch * num_windows : (epoch + 1) * num_windows] for epoch in range(3)]
        orders |= {str(epoch) for epoch in epochs}
        assert len({tuple(sorted(map(tuple, epoch))) for epoch in epochs}) == 3, "not only the windows are shuffled"
    assert len(orders) == 9


def test_equal_lengths_change_places() -> None:
    """Of three documents of 4 and three of 2, any pair shares a window in some epoch, in any order."""
    windows = BestFitWindows(token_file([5, 5, 5, 3, 3, 3]), 6, 0, PAD)
    pairs = {tuple(inputs[0] for inputs, _, _ in runs(windows[index])) for index in range(3 * 40)}
    starts = ([0, 5, 10], [15, 18, 21])
    assert pairs == {pair for long in starts[0] for short in starts[1] for pair in ((long, short), (short, long))}


def test_the_packing_is_pinned() -> None:
    """Another one after an upgrade would make resumed runs repeat and miss documents in silence."""
    windows = BestFitWindows(token_file([4, 4, 3, 3, 8]), 5, 7, 99)
    assert [windows[index].inputs.tolist() for index in range(8)] == [
        [19, 20, 99, 99, 99], [11, 12, 4, 5, 6], [14, 15, 16, 17, 18], [0, 1, 2, 8, 9],
        [14, 15, 16, 17, 18], [8, 9, 0, 1, 2], [4, 5, 6, 11, 12], [19, 20, 99, 99, 99],
    ]  # fmt: skip


def test_documents_without_a_slot_are_left_out() -> None:
    windows = BestFitWindows(token_file([1, 0, 3, 1]), 4, 0, PAD)
    assert windows.windows_per_epoch == 1
    assert windows[5].inputs.tolist() == [1, 2, PAD, PAD]
    assert windows[5].labels.tolist() == [2, 3, IGNORED_LABEL, IGNORED_LABEL]
