"""Load balancers: equal tokens always, equal work where that is possible, and little that travels."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan.attention.masks import PLAIN, AttentionMasks, MaskKind
from torchtitan.attention.plan import plan_masks
from torchtitan.config.cp_method import LOAD_BALANCERS, seq_len_factor
from torchtitan.distributed.context_parallel import cp_order
from torchtitan.distributed.cp.balance import head_tail
from torchtitan.distributed.cp.torch_private import head_tail_indices


def _masks(rows: Sequence[Sequence[int]], kinds: Sequence[MaskKind] = (PLAIN,)) -> AttentionMasks:
    """Return the masks of rows of documents, by their lengths."""
    lengths = [np.asarray(row) for row in rows]
    firsts = [np.cumsum(row) - row for row in lengths]
    starts = torch.from_numpy(
        np.stack([np.repeat(first, row) for first, row in zip(firsts, lengths, strict=True)]).astype(np.int32)
    )
    positions = torch.arange(starts.size(1), dtype=torch.int32) - starts
    return AttentionMasks(starts, positions, tuple(kinds), {})


def _work(masks: AttentionMasks, degree: int, balancer: str) -> AttentionMasks:
    return plan_masks(masks, cp_order(masks, degree, balancer), degree, 0)


def _cut(total: int, cuts: list[int]) -> list[int]:
    edges = sorted({0, total, *(cut % total for cut in cuts)})
    return [end - start for start, end in pairwise(edges)]


@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_head_tail_is_torchs(degree: int) -> None:
    expected = torch.arange(48) if degree == 1 else head_tail_indices(48, degree, torch.device("cpu"), restore=False)
    assert head_tail(48, degree).tolist() == expected.tolist()


@given(
    st.sampled_from(LOAD_BALANCERS),
    st.integers(1, 5),
    st.integers(1, 40),
    st.lists(st.integers(0, 10_000), max_size=9),
    st.lists(st.integers(0, 10_000), max_size=9),
    st.sampled_from([PLAIN, MaskKind(window=7), MaskKind(chunk=5)]),
)
@settings(deadline=None, database=None, max_examples=150)
def test_every_rank_gets_as_many_tokens_each_once(
    balancer: str, degree: int, per_rank: int, cuts: list[int], others: list[int], kind: MaskKind
) -> None:
    """Any length that divides by what validation asks for, with splits that differ from row to row."""
    seq_len = per_rank * seq_len_factor(degree, balancer)
    order = cp_order(_masks([_cut(seq_len, cuts), _cut(seq_len, others)], [kind, PLAIN]), degree, balancer)
    assert order.shape == (2, seq_len)
    assert (np.sort(order, axis=1) == np.arange(seq_len)).all()


@pytest.mark.parametrize(
    ("balancer", "pairs"), [("greedy", [44, 44]), ("per_document", [44, 44]), ("headtail", [52, 36])]
)
def test_documents_4_and_12_on_two_ranks(balancer: str, pairs: list[int]) -> None:
    masks = _work(_masks([[4, 12]]), 2, balancer)
    assert masks.work is not None and masks.work.pairs.tolist() == pairs


def test_per_document_is_head_tail_inside_each() -> None:
    """Lengths that divide: chunks r and 2P - 1 - r of each document; the rest goes round, and tokens stay equal."""
    order = cp_order(_masks([[8, 16]]), 2, "per_document")[0].reshape(2, -1).tolist()
    assert order[0] == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    order = cp_order(_masks([[7, 30, 27]]), 4, "per_document")[0].reshape(4, -1)
    sizes = [[((row >= start) & (row < end)).sum() for row in order] for start, end in ((0, 7), (7, 37), (37, 64))]
    assert all(max(size) - min(size) <= 1 for size in sizes)


def _lengths(seq_len: int, median: int, sigma: float, seed: int) -> list[int]:
    """Return documents of log-normal lengths that fill a row; the last is cut."""
    generator, lengths = np.random.default_rng(seed), []
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, max(1, int(generator.lognormal(np.log(median), sigma)))))
    return lengths


@pytest.mark.parametrize(("median", "sigma", "most"), [(1024, 1.0, 0.20), (4096, 1.5, 0.64), (32768, 1.0, 0.86)])
def test_greedy_is_balanced_and_keeps_documents_together(median: int, sigma: float, most: float) -> None:
    """131,072 tokens on 8 ranks: work within 1 % of the mean for each of eight seeds, and their mean traffic."""
    travelled = []
    for seed in range(8):
        work = _work(_masks([_lengths(131_072, median, sigma, seed)]), 8, "greedy").work
        assert work is not None
        assert float(work.pairs.max() / work.pairs.double().mean()) < 1.01
        travelled.append(float(work.needed.sum()) / (8 * work.remote))
    assert np.mean(travelled) <= most


def test_greedy_uses_what_a_single_document_and_a_window_allow() -> None:
    """One document: head-tail, of which a quarter stays at home. A window: runs of neighbours, of which most does."""
    for kinds, most in (((PLAIN,), 0.75), ((MaskKind(window=1024),), 0.02)):
        work = _work(_masks([[131_072]], kinds), 8, "greedy").work
        assert work is not None
        assert float(work.pairs.max() / work.pairs.double().mean()) < 1.02
        assert float(work.needed.sum()) / (8 * work.remote) <= most


def test_greedy_evens_out_over_the_rows_of_a_batch() -> None:
    """What one row leaves uneven, the next takes into account: the sum over rows is what the ranks wait for."""
    rows = [[16 - short, short] for short in (1, 2, 3, 5)]
    together = _work(_masks(rows), 4, "greedy").work
    assert together is not None
    apart = torch.stack([work.pairs for row in rows if (work := _work(_masks([row]), 4, "greedy").work)]).sum(0)
    assert together.pairs.max() <= apart.max()


def test_work_counts_every_layer() -> None:
    """Pairs are summed over the layers: two with a window and one without."""
    kinds = [MaskKind(window=4), MaskKind(window=4), PLAIN]
    work = _work(_masks([[64]], kinds), 2, "none").work
    assert work is not None
    window, full = 4 * 64 - 6, 64 * 65 // 2
    assert int(work.pairs.sum()) == 2 * window + full
    assert work.needed.tolist() == [0, 2 * 3 + 32] and work.remote == 3 * 32
