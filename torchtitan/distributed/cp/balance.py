"""Load balancers: in which order the ranks hold the tokens, so that attention is equal work for all.

An order is int64 [S], or [B, S] where rows differ: the tokens of rank 0, then those of rank 1, and so on, n = S / P for
each of P ranks. Letters: B batch, S sequence, P ranks, N blocks of a row.
"""

from collections.abc import Sequence

import numpy as np

from torchtitan.attention.masks import Sight
from torchtitan.distributed.cp.torch_private import ptrr_groups

# Of `greedy`: tokens of a block at most, and blocks per rank at least where a rank has so many tokens.
GREEDY_BLOCK, GREEDY_BLOCKS = 1024, 16
# Swaps of a row: so many at most, and so few of many blocks that looking for them takes no longer.
_GREEDY_SWAPS, _GREEDY_CHANGES = 40, 40 * 256**2
_GREEDY_SLACK = 1.008  # times the mean: the most that a rank may get where that saves traffic
PTRR_BLOCK = 128  # tokens: the block of torch's BlockMask


def head_tail(seq_len: int, degree: int) -> np.ndarray:
    """Return the order in which rank r of P has chunks r and 2P - 1 - r of 2P; P = 1: the sequence's own."""
    if degree == 1:
        return np.arange(seq_len)
    chunks = np.arange(seq_len).reshape(2 * degree, -1)
    return np.stack([chunks[:degree], chunks[: degree - 1 : -1]], axis=1).ravel()


def balanced_order(
    load_balancer: str, document_starts: np.ndarray, layers: Sequence[tuple[Sight, int]], degree: int
) -> np.ndarray:
    """Return an order int64 [B, S] for documents [B, S]; `layers` has each kind of mask and its number of layers."""
    batch, seq_len = document_starts.shape
    if load_balancer in ("none", "headtail") or degree == 1:
        row = head_tail(seq_len, degree if load_balancer == "headtail" else 1)
        return np.broadcast_to(row, (batch, seq_len)).copy()
    if load_balancer == "per_document":
        return np.stack([_per_document(row, degree) for row in document_starts])
    if load_balancer == "ptrr":
        return _ptrr(layers, degree)
    cost = np.sum([count * sight.pairs for sight, count in layers], axis=0)
    return _greedy(cost, [sight.first for sight, _ in layers], degree)


def _per_document(starts: np.ndarray, degree: int) -> np.ndarray:
    """Return head-tail inside each document of a row; tokens that do not divide go round the ranks."""
    firsts = np.unique(starts)
    lengths = np.diff(firsts, append=len(starts))[:, None]  # [documents, 1]
    left = lengths % degree
    turn = np.cumsum(left, axis=0) - left
    sizes = lengths // degree + ((np.arange(degree) - turn) % degree < left)  # [documents, P]
    heads = (sizes + 1) // 2
    parts = np.concatenate([heads, (sizes - heads)[:, ::-1]], axis=1)  # [documents, 2P], as they lie in the document
    places = firsts[:, None] + np.cumsum(parts, axis=1) - parts
    runs = [
        (np.stack([places[:, rank], places[:, -1 - rank]], 1), np.stack([parts[:, rank], parts[:, -1 - rank]], 1))
        for rank in range(degree)
    ]
    return np.concatenate([expand_runs(first.ravel(), length.ravel()) for first, length in runs])


def expand_runs(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the numbers of runs of consecutive ones."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) + np.repeat(first - (ends - lengths), lengths)


def _ptrr(layers: Sequence[tuple[Sight, int]], degree: int) -> np.ndarray:
    """Return torch's order for block masks: by the blocks that each block of queries sees, round and back."""
    orders = []
    for row in range(layers[0][0].first.shape[0]):
        blocks = np.arange(layers[0][0].first.shape[1] // PTRR_BLOCK)
        seen = sum(count * (blocks - sight.first[row, ::PTRR_BLOCK] // PTRR_BLOCK + 1) for sight, count in layers)
        groups = ptrr_groups(seen, degree).ravel()
        orders.append((groups[:, None] * PTRR_BLOCK + np.arange(PTRR_BLOCK)).ravel())
    return np.stack(orders)


def _greedy(cost: np.ndarray, firsts: Sequence[np.ndarray], degree: int) -> np.ndarray:
    """Return an order in which each rank has as many blocks of a row, its load as near to the mean as they allow.

    A row starts from the order that lets least travel of those that are balanced: the sequence's own, head-tail, and
    the heaviest block first, each to the least loaded rank. Then blocks change places where that saves traffic and
    costs no balance. What a row leaves uneven, the next evens out.
    """
    batch, seq_len = cost.shape
    per_rank = seq_len // degree
    count = max(min(GREEDY_BLOCKS, per_rank), -(-per_rank // GREEDY_BLOCK))  # blocks per rank
    size, longer = divmod(per_rank, count)  # so many blocks of each rank are longer by a token
    lengths = np.tile(np.repeat([size + 1, size], [longer, count - longer]), degree)
    starts = np.cumsum(lengths) - lengths
    load, orders = np.zeros(degree), []
    for row in range(batch):
        costs = np.add.reduceat(cost[row], starts).astype(float)
        seen = [np.searchsorted(starts, first[row, starts], side="right") - 1 for first in firsts]
        owner = _start(costs, lengths, seen, load)
        load += np.bincount(owner, costs, degree)
        _save_traffic(owner, costs, lengths, seen, load)
        blocks = np.argsort(owner, kind="stable")
        orders.append(expand_runs(starts[blocks], lengths[blocks]))
    return np.stack(orders)


def _start(costs: np.ndarray, lengths: np.ndarray, seen: list[np.ndarray], load: np.ndarray) -> np.ndarray:
    """Return the rank of each block, int64 [N], before any swap."""
    degree = len(load)
    count = len(costs) // degree
    heaviest = _heaviest_first(costs, lengths, load)
    choices = [np.repeat(np.arange(degree), count)]
    if count % 2 == 0:
        halves = np.arange(2 * degree)
        choices.append(np.repeat(np.minimum(halves, 2 * degree - 1 - halves), count // 2))
    loads = [load + np.bincount(choice, costs, degree) for choice in (heaviest, *choices)]
    allowed = max(_GREEDY_SLACK * loads[0].mean(), loads[0].max())
    balanced = [choice for choice, found in zip(choices, loads[1:], strict=True) if found.max() <= allowed]
    return min([*balanced, heaviest], key=lambda owner: sum(_covered(owner, each, degree).sum() for each in seen))


def _heaviest_first(costs: np.ndarray, lengths: np.ndarray, load: np.ndarray) -> np.ndarray:
    load = load.copy()
    free = {length: np.full(len(load), (lengths == length).sum() // len(load)) for length in np.unique(lengths)}
    owner = np.empty(len(costs), np.int64)
    for block in np.argsort(-costs, kind="stable"):
        left = free[lengths[block]]
        rank = int(np.argmin(np.where(left > 0, load, np.inf)))
        owner[block] = rank
        left[rank] -= 1
        load[rank] += costs[block]
    return owner


def _covers(owner: np.ndarray, seen: np.ndarray, degree: int) -> np.ndarray:
    """Return how many blocks of each rank see each block: int64 [P, N]."""
    steps = np.zeros((degree, len(owner) + 1), np.int64)
    np.add.at(steps, (owner, seen), 1)
    np.add.at(steps, (owner, np.arange(len(owner)) + 1), -1)
    return np.cumsum(steps, axis=1)[:, :-1]


def _covered(owner: np.ndarray, seen: np.ndarray, degree: int) -> np.ndarray:
    return _covers(owner, seen, degree) > 0


def _save_traffic(
    owner: np.ndarray, costs: np.ndarray, lengths: np.ndarray, seen: list[np.ndarray], load: np.ndarray
) -> None:
    """Swap blocks of equal length between ranks, in place, while fewer travel and no rank gets too much."""
    cap = max(_GREEDY_SLACK * load.mean(), load.max())
    swappable = lengths[:, None] == lengths
    moved = costs - costs[:, None]  # what the rank of x gains when x and y change places: [x, y]
    for _ in range(min(_GREEDY_SWAPS, _GREEDY_CHANGES // len(owner) ** 2)):
        change = np.sum([_change(owner, each, len(load)) for each in seen], axis=0)
        fits = (load[owner][:, None] + moved <= cap) & (load[owner] - moved <= cap)
        change[~(fits & swappable) | (owner[:, None] == owner)] = 0
        x, y = divmod(int(change.argmin()), len(owner))
        if change[x, y] >= 0:
            return
        load[owner[x]] += moved[x, y]
        load[owner[y]] -= moved[x, y]
        owner[x], owner[y] = owner[y], owner[x]


def _change(owner: np.ndarray, seen: np.ndarray, degree: int) -> np.ndarray:
    """Return how many more blocks travel once blocks x and y change places: int64 [N, N].

    Its rank needs no longer what x alone saw there, but what y sees and nothing there did, or x alone did.
    """
    covers, blocks = _covers(owner, seen, degree), np.arange(len(owner))
    once, never = (np.pad(np.cumsum(covers == times, axis=1), ((0, 0), (1, 0))) for times in (1, 0))
    freed = once[owner, blocks + 1] - once[owner, seen]
    added = (never[:, blocks + 1] - never[:, seen])[owner]  # [x, y]: y goes to the rank of x
    low, high = np.maximum(seen[:, None], seen), np.minimum(blocks[:, None], blocks) + 1
    high = np.maximum(low, high)
    still = once[owner[:, None], high] - once[owner[:, None], low]  # seen by x alone, and by y
    change = added - freed[:, None] + still
    return change + change.T
