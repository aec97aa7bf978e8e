"""The tables of masks: every query meets exactly the keys that it sees, and only those travel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit_tests.distributed.test_balance import _cut, _masks
from torchtitan.attention.masks import PLAIN, AttentionMasks, LayerMask, MaskKind, layer_kinds
from torchtitan.attention.pieces import pieces_of
from torchtitan.attention.plan import KEY_SPLIT, plan_masks, whole_masks
from torchtitan.config.cp_method import seq_len_factor
from torchtitan.distributed.context_parallel import cp_order
from torchtitan.errors import TitanError

_KINDS = (PLAIN, MaskKind(window=1), MaskKind(window=7), MaskKind(chunk=5), MaskKind(window=4, chunk=9))


def _keys(plans: list[AttentionMasks], kind: MaskKind, rank: int) -> np.ndarray:
    """Return which token of its row lies at each place of a rank's buffer, int64 [B, W]; -1: none."""
    masks = plans[rank]
    assert masks.order is not None
    batch, degree = masks.order.size(0), len(plans)
    tokens = masks.order.view(batch, degree, -1)
    local_len, mask = tokens.size(2), masks.layers[kind]
    rows = tokens[:, rank].flatten()
    came = []
    for source, plan in enumerate(plans):  # what each sends here, by its own table
        sent = plan.layers[kind].send.split(plan.layers[kind].counts[0].tolist())[rank]
        came.append(tokens[:, source].flatten()[sent])
        assert len(sent) == mask.counts[1, source] and (source != rank or len(sent) == 0)
    whole = torch.cat([rows, *came, torch.tensor([-1])])
    assert len(rows) == batch * local_len
    return whole[mask.take].numpy()


@given(
    st.sampled_from(["none", "headtail", "per_document", "greedy"]),
    st.integers(2, 4),
    st.integers(1, 12),
    st.lists(st.integers(0, 10_000), max_size=6),
    st.lists(st.integers(0, 10_000), max_size=6),
    st.sampled_from(_KINDS),
    st.integers(0, 30),
)
@settings(deadline=None, database=None, max_examples=150)
def test_every_query_meets_the_keys_that_it_sees(
    balancer: str, degree: int, per_rank: int, cuts: list[int], others: list[int], kind: MaskKind, cut_before: int
) -> None:
    """By the tables alone: pieces of queries, where their keys lie in the buffer, and what comes from other ranks."""
    seq_len = per_rank * seq_len_factor(degree, balancer)
    masks = _masks([_cut(seq_len, cuts), _cut(seq_len, others)], [kind])
    first = masks.document_starts == 0
    masks = AttentionMasks(masks.document_starts, masks.positions + cut_before * first, (kind,), {})
    order = cp_order(masks, degree, balancer)
    plans = [plan_masks(masks, order, degree, rank) for rank in range(degree)]
    starts, positions = masks.document_starts.numpy(), masks.positions.numpy()
    for rank, plan in enumerate(plans):
        mask, tokens = plan.layers[kind], order.reshape(2, degree, -1)[:, rank]
        keys = _keys(plans, kind, rank)
        met = 0
        for piece in pieces_of(mask.pieces):
            for row in range(piece.row, piece.row + piece.rows):
                for place in range(piece.length):
                    query = int(tokens[row, piece.query + place])
                    own = piece.first_key + piece.start + place
                    low = max(piece.first_key, own - kind.window + 1) if kind.window else piece.first_key
                    expected = [
                        key
                        for key in range(query + 1)
                        if starts[row, key] == starts[row, query]
                        and (not kind.window or query - key < kind.window)
                        and (not kind.chunk or positions[row, key] // kind.chunk == positions[row, query] // kind.chunk)
                    ]
                    assert keys[row, low : own + 1].tolist() == expected
                    met += 1
            assert piece.first_key >= 0 and piece.end_key <= keys.shape[1]
        assert met == 2 * seq_len // degree
        assert plan.work is not None and int(mask.counts[1].sum()) == int(plan.work.needed[rank])


def test_a_buffer_begins_and_ends_at_whole_splits_of_its_segment() -> None:
    """Kernels walk keys in splits from the first key given: those must lie the same for every rank."""
    kind = MaskKind(window=100)
    masks = _masks([[300, 3796]], [kind])
    order = cp_order(masks, 4, "greedy")
    for rank in range(4):
        mask = plan_masks(masks, order, 4, rank).layers[kind]
        for piece in pieces_of(mask.pieces):
            token = int(order.reshape(4, -1)[rank, piece.query])
            segment, end = (0, 300) if token < 300 else (300, 4096)
            begin = token - piece.start  # the token at first_key, were it there
            assert (begin - segment) % KEY_SPLIT == 0
            assert piece.start < kind.window + KEY_SPLIT  # no split is kept that no query sees
            last = begin + piece.end_key - piece.first_key
            assert last == end or (last - segment) % KEY_SPLIT == 0


def test_rows_that_are_alike_are_computed_together() -> None:
    mask = _one(_masks([[40, 24]] * 3))
    assert [piece.rows for piece in pieces_of(mask.pieces)] == [3, 3]
    mask = _one(_masks([[40, 24], [40, 24], [64]]))
    assert [piece.rows for piece in pieces_of(mask.pieces)] == [1] * 5


def _one(masks: AttentionMasks) -> LayerMask:
    whole = whole_masks(masks.document_starts, masks.positions, [PLAIN])
    assert whole is not None
    return whole.layers[PLAIN]


def test_plain_causal_layers_need_no_masks() -> None:
    positions = torch.arange(8, dtype=torch.int32).expand(2, -1)
    assert whole_masks(None, positions, [PLAIN, PLAIN]) is None
    assert whole_masks(None, positions, [PLAIN, MaskKind(window=2)]) is not None


@pytest.mark.parametrize("starts", [[[0, 0, 1, 2]], [[0, 0, 2, 0]], [[1, 1, 2, 3]], [[0, 0, 3, 3]]])
def test_starts_that_describe_no_documents_are_refused(starts: list[list[int]]) -> None:
    """Each names the row and the token; a mask by them would not be that of any documents."""
    with pytest.raises(TitanError, match=r"row 0: token \d is said to be"):
        whole_masks(torch.tensor(starts), torch.zeros(1, 4, dtype=torch.int64), [PLAIN])


def test_every_nth_layer_is_full() -> None:
    window = MaskKind(window=16)
    assert layer_kinds(6, window, 3) == (window, window, PLAIN, window, window, PLAIN)
    assert layer_kinds(2, window, 0) == (window, window)
