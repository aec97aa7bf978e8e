"""Windows against the plain definition: join the documents of all epochs, cut by seq_len. No token lost or doubled."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.data.cache import TokenFile
from torchtitan.data.text import Windows, epoch_order


def token_file(lengths: list[int]) -> TokenFile:
    """Return documents of these lengths with a different token at every place."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return TokenFile(Path("none"), np.arange(offsets[-1], dtype=np.uint16), offsets, "fingerprint")


def naive_stream(documents: TokenFile, seed: int, num_epochs: int) -> np.ndarray:
    """Return the tokens of some epochs, joined one document at a time."""
    parts = []
    for epoch in range(num_epochs):
        for document in epoch_order(seed, epoch, documents.num_documents):
            parts.append(documents.tokens[documents.offsets[document] : documents.offsets[document + 1]])
    return np.concatenate(parts)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=6),
    seq_len=st.integers(1, 20),
    seed=st.integers(0, 2**63 - 1),
    order=st.randoms(use_true_random=False),
)
def test_windows_equal_the_joined_epochs(lengths: list[int], seq_len: int, seed: int, order: object) -> None:
    documents = token_file(lengths)
    windows = Windows(documents, seq_len, seed)
    indices = list(range(12))
    order.shuffle(indices)  # type: ignore[attr-defined]  # the answer must not depend on what was read before
    num_epochs = 12 * seq_len // sum(lengths) + 2
    stream = naive_stream(documents, seed, num_epochs)
    for index in indices:
        start = index * seq_len
        assert windows[index].tolist() == stream[start : start + seq_len + 1].tolist()
        assert windows.epoch_of(index) == start // sum(lengths)
    labels = np.concatenate([windows[index][1:] for index in range(12)])
    assert labels.tolist() == stream[1 : 12 * seq_len + 1].tolist(), "every token but the first is a label once"


def test_every_epoch_has_every_document_in_an_order_of_its_own() -> None:
    orders = {tuple(epoch_order(seed, epoch, 50)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_order_is_pinned() -> None:
    """Another order after an upgrade would make resumed runs repeat and miss documents in silence."""
    assert epoch_order(0, 0, 8).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert epoch_order(7, 3, 8).tolist() == [7, 1, 6, 0, 4, 2, 3, 5]


def test_windows_of_a_tiny_data_set_wrap_over_many_epochs() -> None:
    documents = token_file([2])
    assert Windows(documents, 7, 0)[1].tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
