"""What context parallelism's methods cost, and which one `context_parallel_method = "auto"` means.

Letters: P ranks, R of the method, U of Ulysses (P = R U), B batch, S tokens, H query heads, K key/value heads, E head
dim.
"""

import math
from dataclasses import dataclass

from torchtitan.config.sections import Parallelism

CAUSAL_BALANCERS = ("headtail", "none")  # known to every method
MASK_BALANCERS = ("per_document", "ptrr", "greedy")  # of gather, which takes the tokens in any order
LOAD_BALANCERS = (*CAUSAL_BALANCERS, *MASK_BALANCERS)
_PTRR_BLOCK = 128  # tokens: the block of torch's BlockMask


@dataclass(frozen=True)
class AttentionShape:
    """One layer's attention over whole sequences."""

    batch_size: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    itemsize: int  # bytes of an element of q, k and v
    grad_itemsize: int  # bytes of an element that gradients of k and v are summed in


@dataclass(frozen=True)
class CPChoice:
    """The method of this run, and why it is this one."""

    method: str  # "ring" or "gather"
    ulysses_degree: int
    reason: str  # empty: it was given


def seq_len_factor(degree: int, load_balancer: str, *, ulysses_degree: int = 1) -> int:
    """Return what a sequence's length must be a multiple of, to be cut over `degree` ranks."""
    rounds = degree // ulysses_degree
    chunks = {"headtail": 2, "ptrr": _PTRR_BLOCK}.get(load_balancer, 1)  # per rank of the method
    return math.lcm(chunks * rounds, degree) if rounds > 1 else degree


def exchanged_kv_heads(num_heads: int, num_kv_heads: int, degree: int) -> int:
    """Return to how many key/value heads K must be repeated so that `degree` ranks can share them out.

    The least multiple of K that divides by the degree and still groups the query heads evenly; H must divide by it.
    """
    counts = range(num_kv_heads, num_heads + 1, num_kv_heads)
    return next(count for count in counts if count % degree == 0 and num_heads % count == 0)


def sent_bytes(
    shape: AttentionShape,
    *,
    method: str,
    degree: int,
    ulysses_degree: int = 1,
    keep_gathered: bool = False,
    load_balancer: str = "headtail",
    rank: int = 0,
    tokens: tuple[int, int] | None = None,
) -> tuple[int, int]:
    """Return the bytes that `rank` of the cp group sends to others in one layer's attention, forward and backward.

    Only what gather sends differs from rank to rank, as early tokens are seen by more. `tokens` are those that it sends
    and that it receives, of all sequences, under masks that are not plain causal.
    """
    rounds, elements = degree // ulysses_degree, shape.batch_size * shape.head_dim
    kv_heads, exchanged = shape.num_kv_heads, 0
    if ulysses_degree > 1:
        kv_heads = exchanged_kv_heads(shape.num_heads, kv_heads, ulysses_degree)
        local = elements * (shape.seq_len // degree) * (2 * shape.num_heads + 2 * kv_heads)
        exchanged = local * shape.itemsize * (ulysses_degree - 1) // ulysses_degree
    if rounds == 1:
        return exchanged, exchanged
    per_token = 2 * elements * (kv_heads // ulysses_degree)  # elements of keys and values
    local_len = shape.seq_len // rounds
    if method == "gather":
        sent, received = _seen_tokens(local_len, rounds, rank // ulysses_degree, load_balancer)
        if tokens is not None:
            per_token //= shape.batch_size
            sent, received = tokens
        forward, summed = sent * per_token * shape.itemsize, received * per_token * shape.grad_itemsize
        return exchanged + forward, exchanged + (0 if keep_gathered else forward) + summed
    forward = (rounds - 1) * local_len * per_token * shape.itemsize
    # torch's ring brings the gradients of keys and values home by one more hop, in fp32 at least.
    return exchanged + forward, exchanged + forward + rounds * local_len * per_token * shape.grad_itemsize


def _seen_tokens(local_len: int, ranks: int, rank: int, load_balancer: str) -> tuple[int, int]:
    """Return how many tokens a rank sends to others that see them, and how many of others it sees.

    Head-tail: all others see its head, and those before it its tail.
    """
    if load_balancer == "none":
        return (ranks - 1 - rank) * local_len, rank * local_len
    return (ranks - 1 + rank) * (local_len // 2), (2 * (ranks - 1) - rank) * (local_len // 2)


def resolve_load_balancer(parallelism: Parallelism, *, plain_causal: bool) -> str:
    """Return the load balancer that is given, or the one that "auto" means."""
    if parallelism.context_parallel_load_balancer != "auto":
        return parallelism.context_parallel_load_balancer
    return "headtail" if plain_causal else "greedy"


def resolve_cp_method(
    parallelism: Parallelism,
    *,
    device_type: str,
    num_heads: int,
    num_kv_heads: int,
    ranks_per_node: int,
    plain_causal: bool,
) -> CPChoice:
    """Return the method that is given, or the one that "auto" means."""
    method, degree = parallelism.context_parallel_method, parallelism.context_parallel_degree
    given = parallelism.context_parallel_ulysses_degree
    if method != "auto":
        return CPChoice(method, given, "")
    return choose_cp_method(
        degree=degree,
        ulysses_degree=given,
        device_type=device_type,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ranks_per_node=ranks_per_node,
        plain_causal=plain_causal,
    )


def choose_cp_method(
    *,
    degree: int,
    ulysses_degree: int,
    device_type: str,
    num_heads: int,
    num_kv_heads: int,
    ranks_per_node: int,
    plain_causal: bool,
) -> CPChoice:
    """Return what "auto" means: gather for other masks, Ulysses where it is cheapest, else by the device."""
    if not plain_causal:
        return CPChoice("gather", ulysses_degree, "the mask is not plain causal, which gather alone knows")
    if ulysses_degree == 1 and _ulysses_is_cheapest(degree, num_heads, num_kv_heads, ranks_per_node):
        reason = f"all {degree} ranks are on one node, share out {num_heads} heads, and send less than in a ring"
        return CPChoice("ring", degree, reason)
    if device_type == "cpu":
        return CPChoice("gather", ulysses_degree, "on a CPU gather is exact and as fast as the ring")
    return CPChoice("ring", ulysses_degree, f"on {device_type} the ring hides what it sends behind its work")


def _ulysses_is_cheapest(degree: int, num_heads: int, num_kv_heads: int, ranks_per_node: int) -> bool:
    if degree == 1 or ranks_per_node % degree or num_heads % degree:
        return False
    shape = AttentionShape(1, degree, num_heads, num_kv_heads, 1, 1, 1)
    ulysses, _ = sent_bytes(shape, method="ring", degree=degree, ulysses_degree=degree)
    ring, _ = sent_bytes(shape, method="ring", degree=degree)
    return ulysses < ring
