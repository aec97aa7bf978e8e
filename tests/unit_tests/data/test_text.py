"""Windows of a stream against the plain definition: join the documents of all epochs, cut by seq_len."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.data.conftest import token_file
from torchtitan.data.cache import TokenFile
from torchtitan.data.text import StreamWindows, epoch_keys


def order_of(seed: int, epoch: int, num_documents: int) -> list[int]:
    """Return the documents in the order of an epoch."""
    return np.argsort(epoch_keys(seed, epoch, num_documents), kind="stable").tolist()


def naive_stream(documents: TokenFile, seed: int, num_epochs: int) -> list[tuple[int, int, int]]:
    """Return each token of some epochs, with how many documents came before its own, and its place in it."""
    stream: list[tuple[int, int, int]] = []
    number = 0
    for epoch in range(num_epochs):
        for document in order_of(seed, epoch, documents.num_documents):
            tokens = documents.tokens[documents.offsets[document] : documents.offsets[document + 1]].tolist()
            stream += [(token, number, place) for place, token in enumerate(tokens)]
            number += 1
    return stream


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    seq_len=st.integers(1, 20),
    seed=st.integers(0, 2**63 - 1),
    order=st.randoms(use_true_random=False),
)
def test_windows_equal_the_joined_epochs(lengths: list[int], seq_len: int, seed: int, order: object) -> None:
    windows = StreamWindows(token_file(lengths), seq_len, seed)
    indices = list(range(12))
    order.shuffle(indices)  # type: ignore[attr-defined]  # the answer must not depend on what was read before
    stream = naive_stream(windows.token_file, seed, 12 * seq_len // sum(lengths) + 2)
    for index in indices:
        start = index * seq_len
        tokens, numbers, places = zip(*stream[start : start + seq_len + 1], strict=True)
        window = windows[index]
        assert window.inputs.tolist() == list(tokens[:-1])
        assert window.labels.tolist() == list(tokens[1:])
        assert window.offsets.tolist() == list(places[:-1])
        assert window.starts.tolist() == [numbers.index(number) for number in numbers[:-1]]
        assert window.crosses.tolist() == [now != then for now, then in pairwise(numbers)]
        assert windows.epoch_of(index) == start // sum(lengths)
    labels = np.concatenate([windows[index].labels for index in range(12)])
    assert labels.tolist() == [token for token, _, _ in stream[1 : 12 * seq_len + 1]], "each but the first once"
    assert windows.max_position == max(place for _, _, place in stream)
    assert windows.windows_per_epoch == sum(lengths) / seq_len


def test_every_epoch_has_every_document_in_an_order_of_its_own() -> None:
    orders = {tuple(order_of(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_order_is_pinned() -> None:
    """Another order after an upgrade would make resumed runs repeat and miss documents in silence."""
    assert StreamWindows(token_file([1] * 8), 8, 0)[0].inputs.tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert StreamWindows(token_file([1] * 8), 8, 7)[3].inputs.tolist() == [7, 1, 6, 0, 4, 2, 3, 5]


def test_windows_of_a_tiny_data_set_wrap_over_many_epochs() -> None:
    window = StreamWindows(token_file([2]), 7, 0)[1]
    assert window.inputs.tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert window.labels.tolist() == [0, 1, 0, 1, 0, 1, 0]
