"""What a model learns of documents: positions, labels and starts, by hand for documents of given lengths."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit_tests.data.conftest import EOS, token_file
from torchtitan.batch import IGNORED_LABEL
from torchtitan.data.microbatch import Collation, unchanged
from torchtitan.data.packing import BestFitWindows
from torchtitan.data.text import StreamWindows, Windows
from torchtitan.errors import DataError

MASKED = Collation(document_masks=True, context_length=1000, restart_positions=False, prepare=unchanged)
PLAIN = replace(MASKED, document_masks=False)


def collate(windows: Windows, collation: Collation = MASKED, count: int = 1) -> dict[str, Any]:
    """Return the first rows as lists by name."""
    microbatch = collation.collate([windows[index] for index in range(count)])
    return {name: tensor.tolist() for name, tensor in microbatch.items()}


@pytest.mark.parametrize("lengths", [[7, 30, 27], [1, 1, 62], [63, 1], [64]])
def test_documents_in_a_row(lengths: list[int]) -> None:
    """A row is an epoch; the documents in it are whole, each ends in an ignored label, the last one too."""
    documents = token_file(lengths)
    windows = StreamWindows(documents, 64, 0)
    inputs = windows[0].inputs.tolist()
    order = np.argsort([inputs.index(token) for token in documents.offsets[:-1]])
    labels, positions, starts = [], [], []
    for length in [lengths[document] for document in order]:
        first = len(positions)
        labels += [*inputs[first + 1 : first + length], IGNORED_LABEL]
        positions += range(length)
        starts += [first] * length
    assert collate(windows) == {
        "input": [inputs],
        "labels": [labels],
        "positions": [positions],
        "document_starts": [starts],
    }


def test_a_document_over_several_rows() -> None:
    """10 tokens, then the 10 again, in rows of 4: positions go on over a cut, and it starts at its row's start."""
    x = IGNORED_LABEL
    assert collate(StreamWindows(token_file([10]), 4, 0), count=5) == {
        "input": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]],
        "labels": [[1, 2, 3, 4], [5, 6, 7, 8], [9, x, 1, 2], [3, 4, 5, 6], [7, 8, 9, x]],
        "positions": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]],
        "document_starts": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 2, 2], [0, 0, 0, 0], [0, 0, 0, 0]],
    }


def test_a_document_over_several_rows_by_best_fit() -> None:
    """A document of 9 slots and one of 2 in rows of 4: two whole pieces, and the rest beside the other document."""
    windows = BestFitWindows(token_file([10, 3]), 4, 0, EOS)
    found = collate(windows, count=3)
    rows = {row[0]: index for index, row in enumerate(found["input"])}
    x, mixed = IGNORED_LABEL, rows.get(8, rows.get(10, -1))
    assert found["positions"][rows[4]] == [4, 5, 6, 7] and found["labels"][rows[4]] == [5, 6, 7, 8]
    in_order = {8: [8, 10, 11, EOS], 10: [10, 11, 8, EOS]}
    assert found["input"][mixed] == in_order[found["input"][mixed][0]]
    by_first = {8: ([9, 11, 12, x], [8, 0, 1, 0], [0, 1, 1, 3]), 10: ([11, 12, 9, x], [0, 1, 8, 0], [0, 0, 2, 3])}
    names = ("labels", "positions", "document_starts")
    assert tuple(found[name][mixed] for name in names) == by_first[found["input"][mixed][0]]


def test_without_document_masks_nothing_is_told_of_documents() -> None:
    windows = StreamWindows(token_file([5]), 4, 0)
    assert collate(windows, PLAIN, count=2) == {
        "input": [[0, 1, 2, 3], [4, 0, 1, 2]],
        "labels": [[1, 2, 3, 4], [0, 1, 2, 3]],
        "positions": [[0, 1, 2, 3], [0, 1, 2, 3]],
    }
    x = IGNORED_LABEL
    assert collate(BestFitWindows(token_file([3]), 4, 0, EOS), PLAIN) == {
        "input": [[0, 1, EOS, EOS]],
        "labels": [[1, 2, x, x]],
        "positions": [[0, 1, 2, 3]],
    }


@pytest.mark.parametrize("collation", [MASKED, PLAIN])
@pytest.mark.parametrize("count", [1, 2])
def test_dtypes_and_memory(collation: Collation, count: int) -> None:
    """Labels do not lie in the inputs' memory: masking one in place must not change an input."""
    windows = StreamWindows(token_file([7]), 4, 0)
    microbatch = collation.collate([windows[index] for index in range(count)])
    assert {name: tensor.dtype for name, tensor in microbatch.items()} == {
        "input": torch.int64, "labels": torch.int64, **dict.fromkeys(list(microbatch)[2:], torch.int32)
    }  # fmt: skip
    assert all(tensor.is_contiguous() and tensor.shape == (count, 4) for tensor in microbatch.values())
    before = microbatch["input"].tolist()
    for name in list(microbatch)[1:]:
        microbatch[name].fill_(-1)
    assert microbatch["input"].tolist() == before == [windows[index].inputs.tolist() for index in range(count)]


def test_ids_are_no_boundaries() -> None:
    """A text of nothing but the id that ends documents: only the file's offsets say where one ends."""
    documents = token_file([6, 2])
    windows = StreamWindows(replace(documents, tokens=documents.tokens * 0 + EOS), 8, 0)
    found = collate(windows)
    assert found["input"] == [[EOS] * 8]
    first = {0: 6, 5: 6, 2: 2}[found["document_starts"][0][5]]
    assert found["positions"] == [[*range(first), *range(8 - first)]]
    assert found["document_starts"] == [[0] * first + [first] * (8 - first)]
    assert [index for index, label in enumerate(found["labels"][0]) if label == IGNORED_LABEL] == [first - 1, 7]


@pytest.mark.parametrize("make", [StreamWindows, lambda *arguments: BestFitWindows(*arguments, EOS)])
def test_positions_restart_at_the_context(make: Any) -> None:
    """The document stays one: its starts are the row's."""
    found = collate(make(token_file([9]), 8, 0), replace(MASKED, context_length=3, restart_positions=True))
    assert found["positions"] == [[0, 1, 2, 0, 1, 2, 0, 1]]
    assert found["document_starts"] == [[0] * 8]
    assert found["labels"] == [[1, 2, 3, 4, 5, 6, 7, 8]]


def test_paddings_positions_stay_in_the_context() -> None:
    found = collate(BestFitWindows(token_file([3]), 8, 0, EOS), replace(MASKED, context_length=4))
    assert found["positions"] == [[0, 1, 0, 1, 2, 3, 0, 1]]


@pytest.mark.parametrize(
    ("make", "fitting"), [(StreamWindows, 20), (lambda *arguments: BestFitWindows(*arguments, EOS), 21)]
)
def test_documents_beyond_the_context_are_refused(make: Any, fitting: int) -> None:
    """A stream has every token as an input, best fit all but a document's last: so it fits one token more."""
    short = replace(MASKED, context_length=20)
    for length in (fitting, fitting + 1):
        windows = make(token_file([3, length, 4]), 8, 0)
        positions = [windows[index].offsets.max() for index in range(20)]
        assert max(positions) == windows.max_position == 19 + length - fitting
        for allowed in (PLAIN, replace(short, restart_positions=True)):
            allowed.check_document("it", length, windows.max_position)
        if length == fitting:
            short.check_document("it", length, windows.max_position)
            continue
        message = (
            f"^--model.attn_mask=document: it has {length} tokens, so positions up to 20, and the model's context is "
            "20; .*; give --training.position_overflow=restart, another --model.flavor, or --model.attn_mask=causal$"
        )
        with pytest.raises(DataError, match=message):
            short.check_document("it", length, windows.max_position)
