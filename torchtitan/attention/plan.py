"""From documents to the tables of `LayerMask`, for one rank of those that share the sequences.

All of it is arithmetic on the CPU, the same on every rank, and made ahead of the step.
Letters: B batch, S tokens of whole sequences, P ranks, n = S / P tokens per rank, W keys in a rank's buffer.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from torchtitan.attention.masks import PLAIN, AttentionMasks, LayerMask, MaskKind, MaskWork, Sight
from torchtitan.errors import TitanError

KEY_SPLIT = 512  # columns that the CPU kernel walks at a time; a row's bits depend on where its splits lie


def plan_masks(masks: AttentionMasks, order: np.ndarray, degree: int, rank: int) -> AttentionMasks:
    """Return the masks with the tables of `rank`.

    `order` [B, S] has the tokens of rank 0 first, then those of rank 1, and so on.
    """
    layers, pairs, needed = {}, np.zeros(degree, np.int64), np.zeros(degree, np.int64)
    for kind, count in Counter(masks.layer_kinds).items():
        sight = masks.sights[kind]
        layers[kind], kind_needed = plan_layer(sight, kind.window, order, degree, rank)
        needed += count * kind_needed
        pairs += count * np.take_along_axis(sight.pairs, order, 1).reshape(-1, degree, order.shape[1] // degree).sum(
            (0, 2)
        )
    remote = len(masks.layer_kinds) * order.size // degree * (degree - 1)
    work = MaskWork(torch.from_numpy(pairs), torch.from_numpy(needed), remote)
    return replace(masks, layers=layers, order=torch.from_numpy(order), work=work, planned_for=(degree, rank))


def plan_layer(sight: Sight, window: int, order: np.ndarray, degree: int, rank: int) -> tuple[LayerMask, np.ndarray]:
    """Return the tables of `rank` for one kind of mask, and how many remote tokens each rank needs, int64 [P]."""
    batch, seq_len = order.shape
    tokens = order.reshape(batch, degree, -1)  # [B, P, n]
    row, owner, query, lengths = _runs(tokens, sight)
    first = tokens[row, owner, query]
    needed = _needed(row, owner, sight.first[row, first], first + lengths, (batch, degree, seq_len))  # [B, P, S]
    own = owner == rank
    row, query, lengths, first = row[own], query[own], lengths[own], first[own]
    place = np.cumsum(needed[:, rank], axis=1) - 1  # of each needed token among them, [B, S]
    start, seen = sight.starts[row, first], sight.first[row, first]
    skipped = (seen - start) // KEY_SPLIT * KEY_SPLIT  # whole splits before what is seen
    first_key = place[row, seen] - (seen - start - skipped)
    through = -(-(first + lengths - start) // KEY_SPLIT) * KEY_SPLIT
    end_key = first_key + np.minimum(sight.ends[row, first] - start, through) - skipped
    lead = max(0, -int(first_key.min()))  # keys before the first needed one that a split begins with; never seen
    width = lead + max(int(end_key.max()), int(needed[:, rank].sum(1).max()))
    rows = np.ones_like(row)
    if batch > 1 and all((each == each[:1]).all() for each in (order, sight.first, sight.starts, sight.ends)):
        kept = row == 0
        row, query, lengths, first, start, skipped, first_key, end_key, rows = (
            each[kept] for each in (row, query, lengths, first, start, skipped, first_key, end_key, rows * batch)
        )
    columns = (row, rows, query, lengths, first_key + lead, end_key + lead, first - start - skipped)
    pieces = torch.from_numpy(np.stack(columns, axis=1).astype(np.int64))
    none = torch.empty(0, dtype=torch.int64)
    remote = needed.sum((0, 2)) - batch * (seq_len // degree)
    if degree == 1:
        return LayerMask(window, pieces, none, none, none, none), remote
    return LayerMask(window, pieces, *_exchange(tokens, needed, place + lead, width, rank)), remote


def _runs(tokens: np.ndarray, sight: Sight) -> tuple[np.ndarray, ...]:
    """Return (row, rank, first local token, length) of the runs of consecutive tokens of one segment: int64 [runs]."""
    batch, degree, local_len = tokens.shape
    segments = np.take_along_axis(sight.starts, tokens.reshape(batch, -1), 1).reshape(tokens.shape)
    breaks = np.ones(tokens.shape, bool)
    breaks[..., 1:] = (np.diff(tokens, axis=2) != 1) | (np.diff(segments, axis=2) != 0)
    flat = np.flatnonzero(breaks)
    row, rest = np.divmod(flat, degree * local_len)
    owner, query = np.divmod(rest, local_len)
    return row, owner, query, np.diff(flat, append=breaks.size)


def _needed(
    row: np.ndarray, owner: np.ndarray, first: np.ndarray, end: np.ndarray, shape: tuple[int, ...]
) -> np.ndarray:
    """Return which tokens the queries of each rank see, own ones among them: bool [B, P, S]."""
    batch, degree, seq_len = shape
    steps = np.zeros((batch, degree, seq_len + 1), np.int32)
    np.add.at(steps, (row, owner, first), 1)
    np.add.at(steps, (row, owner, end), -1)
    return np.cumsum(steps, axis=2, dtype=np.int32)[..., :seq_len] > 0


def _exchange(
    tokens: np.ndarray, needed: np.ndarray, place: np.ndarray, width: int, rank: int
) -> tuple[torch.Tensor, ...]:
    """Return the tables `take`, `slots`, `send` and `counts`."""
    batch, _, local_len = tokens.shape
    each_row = np.arange(batch)[:, None]
    own = tokens[:, rank]  # [B, n]
    wanted = needed[each_row, :, own].transpose(2, 0, 1)  # [P, B, n]: which ranks see my tokens
    wanted[rank] = False
    by_rank = tokens.transpose(1, 0, 2)  # [P, B, n]
    coming = needed[each_row, rank, by_rank]  # which of their tokens I see
    coming[rank] = False
    _, row, _ = np.nonzero(coming)
    token = by_rank[coming]
    row = np.concatenate([np.repeat(np.arange(batch), local_len), row])
    slots = row * width + place[row, np.concatenate([own.ravel(), token])]
    take = np.full(batch * width, len(slots), np.int64)  # a row of zeros, behind all others
    take[slots] = np.arange(len(slots))
    _, row, local = np.nonzero(wanted)
    counts = np.stack([wanted.sum((1, 2)), coming.sum((1, 2))])
    tables = (take.reshape(batch, width), slots, row * local_len + local, counts)
    return tuple(torch.from_numpy(table.astype(np.int64)) for table in tables)


def whole_masks(
    document_starts: torch.Tensor | None, positions: torch.Tensor, layer_kinds: Sequence[MaskKind]
) -> AttentionMasks | None:
    """Return the masks of whole sequences for a device that holds them, or None where all layers are plain causal.

    `document_starts` int [B, S] and `positions` int [B, S] are those of `AttentionMasks`; None: each row is one
    document.

    Raises:
        TitanError: the two do not describe documents.
    """
    kinds = tuple(layer_kinds)
    if document_starts is None and set(kinds) <= {PLAIN}:
        return None
    positions = positions.cpu()
    starts = torch.zeros_like(positions) if document_starts is None else document_starts.cpu()
    _check(starts, positions)
    masks = AttentionMasks(starts, positions, kinds, {})
    order = np.broadcast_to(np.arange(starts.size(1)), tuple(starts.shape)).copy()
    return replace(plan_masks(masks, order, 1, 0), order=None)


def _check(starts: torch.Tensor, positions: torch.Tensor) -> None:
    if starts.shape != positions.shape or starts.ndim != 2 or starts.numel() == 0:
        raise TitanError(
            f"document starts are {list(starts.shape)}, positions {list(positions.shape)}; both are [B, S], not empty"
        )
    tokens = torch.arange(starts.size(1))
    begins = starts == tokens
    begun = torch.where(begins, tokens, 0).cummax(1).values
    if not torch.equal(begun, starts.long()):
        row, token = ((begun != starts).nonzero()[0]).tolist()
        raise TitanError(
            f"row {row}: token {token} is said to be of the document that starts at token {int(starts[row, token])}, "
            f"but the last document before it starts at {int(begun[row, token])}"
        )


def plain_layer(order: np.ndarray, batch: int, degree: int, rank: int) -> LayerMask:
    """Return the tables of plain causal attention, of `batch` sequences that all lie as `order` int64 [S] says."""
    shape = (batch, len(order))
    tokens = np.broadcast_to(np.arange(len(order)), shape)
    sight = Sight(np.zeros(shape, np.int64), tokens, PLAIN)
    return plan_layer(sight, 0, np.broadcast_to(order, shape), degree, rank)[0]
