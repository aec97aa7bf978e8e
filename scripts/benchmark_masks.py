"""Time what document masks cost a step before it begins: the order of the tokens, and the tables of one rank.

    python scripts/benchmark_masks.py [--seq-len 131072] [--degree 8] [--balancers greedy,headtail] [--window 0]

Documents of log-normal lengths fill one row, for eight seeds each. All of it is done where microbatches are made, ahead
of the step. Times are medians on one core, memory is the largest that numpy allocated meanwhile; beside them what the
plan is worth: the most work of a rank over the mean, and the share of other ranks' keys and values that travel.
"""

import argparse
import statistics
import time
import tracemalloc

import numpy as np
import torch

from torchtitan.attention.masks import AttentionMasks, MaskKind
from torchtitan.attention.plan import plan_masks
from torchtitan.config.cp_method import LOAD_BALANCERS, seq_len_factor
from torchtitan.distributed.context_parallel import cp_order

_DOCUMENTS = ((1024, 1.0), (4096, 1.5), (32768, 1.0))  # median tokens, sigma of their logarithm
_SEEDS = range(8)
_HEADING = f"{'documents':>16} {'balancer':>13} {'order ms':>9} {'tables ms':>10} {'MiB':>6} {'work':>7} {'travels':>8}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=131072, help="tokens of the row")
    parser.add_argument("--degree", type=int, default=8, help="ranks of the method")
    parser.add_argument("--balancers", default="greedy,per_document,headtail,ptrr", help="separated by commas")
    parser.add_argument("--window", type=int, default=0, help="tokens that a query sees; 0: its document")
    args = parser.parse_args()
    balancers = args.balancers.split(",")
    for balancer in balancers:
        if balancer not in LOAD_BALANCERS:
            parser.error(f"--balancers={balancer}: unknown; allowed: {', '.join(LOAD_BALANCERS)}")
        if args.seq_len < 1 or args.degree < 1 or args.seq_len % seq_len_factor(args.degree, balancer):
            factor = seq_len_factor(args.degree, balancer)
            parser.error(f"--seq-len={args.seq_len}: {balancer} needs a multiple of {factor}")
    torch.set_num_threads(1)
    print(f"seq_len {args.seq_len:,}, {args.degree} ranks, window {args.window or 'none'}, {len(_SEEDS)} seeds")
    print(_HEADING)
    for median, sigma in _DOCUMENTS:
        for balancer in balancers:
            print(_line(median, sigma, balancer, args.seq_len, args.degree, args.window), flush=True)


def _line(median: int, sigma: float, balancer: str, seq_len: int, degree: int, window: int) -> str:
    ordering, planning, peak, works, travelled = [], [], 0, [], []
    for seed in _SEEDS:
        masks = document_masks(log_normal_lengths(seq_len, median, sigma, seed), window)
        start = time.perf_counter()
        order = cp_order(masks, degree, balancer)
        ordered = time.perf_counter()
        work = plan_masks(masks, order, degree, degree - 1).work
        ordering.append(1e3 * (ordered - start))
        planning.append(1e3 * (time.perf_counter() - ordered))
        assert work is not None
        works.append(float(work.pairs.max() / work.pairs.double().mean()))
        travelled.append(float(work.needed.sum()) / max(1, degree * work.remote))
    tracemalloc.start()  # in a run of its own: it slows the arithmetic down
    plan_masks(masks, cp_order(masks, degree, balancer), degree, degree - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    times = f"{statistics.median(ordering):9.1f} {statistics.median(planning):10.1f} {peak / 2**20:6.0f}"
    documents = f"{median:,} x e^{sigma}"
    return f"{documents:>16} {balancer:>13} {times} {max(works):7.4f} {100 * statistics.mean(travelled):7.1f}%"


def log_normal_lengths(seq_len: int, median: int, sigma: float, seed: int) -> list[int]:
    """Return documents of log-normal lengths that fill a row; the last is cut."""
    generator, lengths, left = np.random.default_rng(seed), [], seq_len
    while left > 0:
        lengths.append(min(left, max(1, int(generator.lognormal(np.log(median), sigma)))))
        left -= lengths[-1]
    return lengths


def document_masks(lengths: list[int], window: int) -> AttentionMasks:
    """Return the masks of one row, not planned yet."""
    firsts = np.cumsum(lengths) - lengths
    starts = torch.from_numpy(np.repeat(firsts, lengths).astype(np.int32)).unsqueeze(0)
    positions = torch.arange(starts.size(1), dtype=torch.int32) - starts
    return AttentionMasks(starts, positions, (MaskKind(window=window),), {})


if __name__ == "__main__":
    main()
