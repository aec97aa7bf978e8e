"""The picture of `show_layout`: who attends to what, who works how much, and what travels from whom to whom.

Letters: S tokens of a row, P ranks, N cells of a side of the drawn mask.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.attention.masks import AttentionMasks, MaskWork

MOST_CELLS = 512  # of a side of the drawn mask
# Paul Tol's "muted", which the colour-blind tell apart, with neighbours far from each other in hue and lightness.
_COLORS = ("#332288", "#88ccee", "#cc6677", "#44aa99", "#882255", "#ddcc77", "#117733", "#aa4499", "#999933")
_PALEST = 0.4  # share of the colour in a cell of which least is attended
_TINT = 0.1  # in one of which nothing is
_MOST_NUMBERS = 8  # ranks whose traffic is written into the heat map
_MOST_LINES = 40  # documents whose borders are drawn


@dataclass(frozen=True)
class Layout:
    """What one load balancer makes of a microbatch, by the plans of all ranks of the method; summed over the layers."""

    balancer: str
    order: np.ndarray  # int64 [B, S]: rank 0's tokens first
    work: MaskWork
    traffic: np.ndarray  # int64 [P, P]: tokens whose keys and values each rank (row) sends to each (column)
    pieces: tuple[int, ...]  # kernel calls of each rank's forward

    @property
    def shares(self) -> np.ndarray:
        """Return each rank's query-key pairs over the mean: float [P]."""
        pairs = self.work.pairs.numpy()
        return pairs / pairs.mean()

    @property
    def travelled(self) -> float | None:
        """Return which share of the remote keys and values travels; None: there are none."""
        remote = self.work.remote * len(self.traffic)
        return int(self.work.needed.sum()) / remote if remote else None


def mask_cells(masks: AttentionMasks, owner: np.ndarray, degree: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mask of row 0 in N x N cells: who holds most of a cell's seen pairs, and which share is seen.

    `owner` int [S] is the rank of each token. Where nothing is seen the owner is that of most of the cell's queries.
    A pair that only some layers see counts as their share. All is computed from runs of keys: no S x S numbers.
    """
    seq_len = len(owner)
    edges = np.arange(cells + 1) * seq_len // cells
    rows = np.searchsorted(edges, np.arange(seq_len), side="right") - 1  # the cell of each token
    holders = np.bincount(rows * degree + owner, minlength=cells * degree).reshape(cells, degree).argmax(1)
    cell_owner = np.repeat(holders[:, None], cells, axis=1)
    most, seen = np.zeros((cells, cells)), np.zeros((cells, cells))
    counts = Counter(masks.layer_kinds)
    firsts = {kind: sight.first[0] for kind, sight in masks.sights.items()}
    for rank in range(degree):
        queries = np.flatnonzero(owner == rank)
        pairs = np.zeros((cells, cells))
        for kind, count in counts.items():
            begun, ended = (_ramps(rows[queries], each, edges) for each in (firsts[kind][queries], queries + 1))
            pairs += count * np.diff(begun - ended, axis=1)
        cell_owner[pairs > most] = rank
        most = np.maximum(most, pairs)
        seen += pairs
    sizes = np.diff(edges)
    return cell_owner, seen / (len(masks.layer_kinds) * np.outer(sizes, sizes))


def _ramps(rows: np.ndarray, places: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return for each row of cells and each edge e the sum of max(e - place, 0) over the row's places: [N, N + 1]."""
    cells = len(edges) - 1
    index = rows * (cells + 2) + np.searchsorted(edges, places, side="right")  # the first edge beyond each place
    shape = (cells, cells + 2)
    count, total = (
        np.bincount(index, weights, minlength=shape[0] * shape[1]).reshape(shape).cumsum(1)[:, :-1]
        for weights in (None, places)
    )
    return edges * count - total


def rank_colors(degree: int) -> np.ndarray:
    """Return the colour of each rank: float [P, 3]."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    if degree <= len(_COLORS):
        return np.array([to_rgb(color) for color in _COLORS[:degree]])
    return colormaps["viridis"](np.linspace(0, 1, degree))[:, :3]


def draw(file: Path, masks: AttentionMasks, layouts: Sequence[Layout], title: str, ranks: str) -> None:
    """Write a PNG with a row of panels for each layout: the mask of row 0, work and traffic by rank.

    `ranks` says which ranks these are. Raises OSError where it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 0.9 + 4.4 * len(layouts)), layout="constrained")
    panels: Any = figure.subplots(len(layouts), 3, squeeze=False, width_ratios=(1.15, 1, 1.15))
    colors = rank_colors(len(layouts[0].traffic))
    most_pairs = max(int(layout.work.pairs.max()) for layout in layouts)
    most_traffic = max(1, *(int(layout.traffic.max()) for layout in layouts))
    num_layers = len(masks.layer_kinds)
    for layout, (mask_panel, work_panel, traffic_panel) in zip(layouts, panels, strict=True):
        _draw_mask(mask_panel, masks, layout, colors)
        _draw_work(work_panel, layout, colors, most_pairs, f"query-key pairs of one head, {num_layers} layers", ranks)
        image = _draw_traffic(traffic_panel, layout, most_traffic, ranks)
        figure.colorbar(image, ax=traffic_panel, label=f"tokens sent, sum over {num_layers} layers", format=_si())
    figure.suptitle(title, fontsize="large", wrap=True)
    figure.savefig(file, dpi=110, format="png")


def _si(places: int | None = None) -> Any:
    """Return a formatter of large numbers, 12 k or 3.5 M, with so many decimals or as many as there are."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(places=places, sep=" ")


def _short(tokens: int) -> str:
    return str(_si(places=1)(tokens)) if tokens >= 1000 else str(tokens)


def _draw_mask(panel: Any, masks: AttentionMasks, layout: Layout, colors: np.ndarray) -> None:
    degree, seq_len = len(layout.traffic), layout.order.shape[1]
    owner = np.empty(seq_len, np.int64)
    owner[layout.order[0]] = np.repeat(np.arange(degree), seq_len // degree)
    cell_owner, seen = mask_cells(masks, owner, degree, min(seq_len, MOST_CELLS))
    strength = np.where(seen > 0, _PALEST + (1 - _PALEST) * seen, _TINT)[..., None]
    panel.imshow(1 - strength + strength * colors[cell_owner], extent=(0, seq_len, seq_len, 0), interpolation="nearest")
    borders = np.unique(masks.document_starts[0].numpy())[1:]
    for border in borders if len(borders) < _MOST_LINES else ():
        panel.plot([border, border, seq_len], [0, border, border], color="black", linewidth=0.4, alpha=0.4)
    panel.set_title(f"{layout.balancer}: who attends to what (row 0)", fontweight="bold", fontsize="medium")
    panel.set_xlabel("key, token")
    panel.set_ylabel("query, token (colour: its rank)")


def _draw_work(panel: Any, layout: Layout, colors: np.ndarray, most: int, label: str, ranks: str) -> None:
    pairs = layout.work.pairs.numpy()
    panel.bar(range(len(pairs)), pairs, color=colors)
    panel.axhline(pairs.mean(), color="black", linestyle="--", linewidth=1, label="the mean")
    panel.set_ylim(0, 1.25 * most)
    panel.yaxis.set_major_formatter(_si())
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend(loc="upper right", frameon=False)
    panel.set_title(f"work: the most is {layout.shares.max():.3f} x the mean", fontsize="medium")
    panel.set_xlabel(ranks)
    panel.set_ylabel(label)


def _draw_traffic(panel: Any, layout: Layout, most: int, ranks: str) -> Any:
    """Draw the heat map; returns the image that a colour bar explains."""
    traffic = layout.traffic
    between = np.ma.array(traffic, mask=np.eye(len(traffic), dtype=bool))
    image = panel.imshow(between, cmap="Blues", vmin=0, vmax=most)
    panel.set_facecolor("#dddddd")  # of the diagonal
    for axis in (panel.xaxis, panel.yaxis):
        axis.get_major_locator().set_params(integer=True)
    if len(traffic) <= _MOST_NUMBERS:
        for (row, column), tokens in np.ndenumerate(traffic):
            if row != column:
                color = "white" if tokens > 0.6 * most else "black"
                panel.text(column, row, _short(tokens), ha="center", va="center", color=color, fontsize="small")
    share = "no remote K/V" if layout.travelled is None else f"{100 * layout.travelled:.1f} % of remote K/V travels"
    panel.set_title(share, fontsize="medium")
    panel.set_xlabel(f"to {ranks}")
    panel.set_ylabel(f"from {ranks}")
    return image
