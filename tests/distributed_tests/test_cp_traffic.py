"""Every option takes its own path: collectives, bytes and work are counted and compared with closed forms."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import CPU, Case, build_split_model, dense_mask, document_tensors, local_batch
from torchtitan.attention.masks import PLAIN, MaskKind
from torchtitan.attention.plan import whole_masks
from torchtitan.attention.work import count_attention_work
from torchtitan.config.cp_method import AttentionShape, sent_bytes
from torchtitan.distributed.collectives import count_traffic
from torchtitan.distributed.context_parallel import apply_cp, cp_shard
from torchtitan.distributed.parallel_dims import build_parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention


def _counted(case: Case) -> dict[str, int]:
    model, dims = build_split_model(case)
    batch = local_batch(case, dims)
    model(batch.inputs, batch.positions)  # FSDP's own first-time calls
    counts = {}
    block = model.layers["0"].attention.inner_attention
    q, k, v = (torch.randn(1, heads, case.seq_len // case.cp, 8, requires_grad=True) for heads in (8, 2, 2))
    with CommDebugMode() as forward:
        out = block(q, k, v)
    with CommDebugMode() as backward:
        out.sum().backward()
    for phase, mode in (("forward", forward), ("backward", backward)):
        for op, count in mode.get_comm_counts().items():
            counts[f"{phase} {str(op).rpartition('.')[2]}"] = count
    return counts


def test_each_rotate_method_makes_its_own_collectives() -> None:
    """cp 4: one gather of K and V, or three hops; the gradients of K and V always travel by hops, one more to home."""
    gathered, rotated = (
        run_ranks(4, _counted, Case(cp=4, rotate_method=method))[0] for method in ("allgather", "alltoall")
    )
    assert gathered == {
        "forward all_gather_into_tensor": 1,
        "backward all_gather_into_tensor": 1,
        "backward all_to_all_single": 4,
    }
    assert rotated == {"forward all_to_all_single": 3, "backward all_to_all_single": 3 + 4}


_BATCH = 3
_SHAPE = AttentionShape(_BATCH, 64, 8, 2, 16, 0, 0)  # of every traffic test; bytes per element follow from the dtype
# Every method, by the arguments of `sent_bytes` without the degree, and what `apply_cp` is told beside.
_METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ring": ({"method": "ring"}, {}),
    "ring, rotated, contiguous": ({"method": "ring"}, {"rotate_method": "alltoall", "load_balancer": "none"}),
    "gather": ({"method": "gather"}, {}),
    "gather, strided, contiguous": ({"method": "gather", "load_balancer": "none"}, {"gather_kv_heads": 1}),
    "gather, kept": ({"method": "gather", "keep_gathered": True}, {"keep_gathered": True}),
    "ulysses": ({"method": "ring", "ulysses_degree": 0}, {}),
    "ulysses 2 over ring": ({"method": "ring", "ulysses_degree": 2}, {}),
    "ulysses 2 over gather": ({"method": "gather", "ulysses_degree": 2}, {}),
}


def _mesh(ulysses: int) -> DeviceMesh:
    cp = dist.get_world_size()
    return build_parallel_dims(CPU, dp_shard=1, cp=cp, ulysses=ulysses).cp_mesh


def _hooked(name: str, seq_len: int = _SHAPE.seq_len) -> tuple[ScaledDotProductAttention, dict[str, Any]]:
    """Return a module under a method, and the method's arguments of `sent_bytes`."""
    form, options = dict(_METHODS[name][0]), _METHODS[name][1]
    if "ulysses_degree" in form:
        form["ulysses_degree"] = form["ulysses_degree"] or dist.get_world_size()
    if "load_balancer" in form:
        options = {**options, "load_balancer": form["load_balancer"]}
    module = ScaledDotProductAttention()
    apply_cp([module], _mesh(form.get("ulysses_degree", 1)), seq_len=seq_len, method=form["method"], **options)
    return module, {"degree": dist.get_world_size(), "rank": dist.get_rank(), **form}


def _sent(dtypes: list[torch.dtype]) -> list[tuple[str, torch.dtype, tuple[int, int], tuple[int, int]]]:
    results = []
    for name in _METHODS:
        for dtype in dtypes:
            module, form = _hooked(name)
            local = _SHAPE.seq_len // dist.get_world_size()
            qkv = [torch.randn(_BATCH, heads, local, 16).to(dtype).requires_grad_() for heads in (8, 2, 2)]
            with count_traffic() as forward:
                out = module(*qkv)
            with count_traffic() as backward:
                out.sum().backward()
            shape = replace(_SHAPE, itemsize=dtype.itemsize, grad_itemsize=max(4, dtype.itemsize))
            results.append((name, dtype, (forward.bytes, backward.bytes), sent_bytes(shape, **form)))
    return results


@pytest.mark.parametrize("cp", [2, 4])
def test_sent_bytes_are_those_of_the_closed_forms(cp: int) -> None:
    """Breaks when K and V are expanded to all heads before they travel, or cast; and when a collective is one too many.

    At cp 4 Ulysses must repeat two key/value heads, and no more than twice. What gather sends differs by rank; over all
    of them it is 3/4 (head-tail) or 1/2 (contiguous) of what all keys and values to all ranks would be.
    """
    dtypes = [torch.bfloat16, torch.float32, torch.float64]
    ranks = run_ranks(cp, _sent, dtypes)
    for index, rank in enumerate(ranks):
        for name, dtype, counted, expected in rank:
            assert counted == expected, (name, dtype, index)
    for name, share in (("gather", 3 / 4), ("gather, kept", 3 / 4), ("gather, strided, contiguous", 1 / 2)):
        for dtype in dtypes:
            counts = [each[2] for rank in ranks for each in rank if each[:2] == (name, dtype)]
            everything = _BATCH * (cp - 1) * (_SHAPE.seq_len // cp) * 2 * 2 * 16  # elements of K and V, from each rank
            gathered, summed = dtype.itemsize * everything * share, max(4, dtype.itemsize) * everything * share
            assert sum(forward for forward, _ in counts) / cp == gathered, (name, dtype)
            again = 0 if name == "gather, kept" else gathered
            assert sum(backward for _, backward in counts) / cp == again + summed, (name, dtype)


def test_closed_forms_by_hand() -> None:
    """The formulas of the documentation with numbers in: P 4, n 16, h 128, g 1/4, b 2, batch 3."""
    shape = replace(_SHAPE, itemsize=2, grad_itemsize=4)
    one_way = 3 * (4 - 1) * 16 * 2 * 128 // 4
    assert sent_bytes(shape, method="ring", degree=4) == (one_way * 2, one_way * 2 + 3 * 4 * 16 * 2 * 128 // 4 * 4)
    # Of gather, tokens to and from others: half of n is 8; a token's K and V are 3 x 2 x 32 elements.
    token = 3 * 2 * 32
    # Rank r with head-tail: its head to the 3 others, its tail to the r before it; K and V of the others' heads, and of
    # the tails of those behind it.
    tokens = {"headtail": [(3 * 8, 6 * 8), (4 * 8, 5 * 8), (5 * 8, 4 * 8), (6 * 8, 3 * 8)]}
    tokens["none"] = [(3 * 16, 0), (2 * 16, 16), (16, 2 * 16), (0, 3 * 16)]
    for balancer, by_rank in tokens.items():
        for rank, (to_others, from_others) in enumerate(by_rank):
            forward, back = to_others * token * 2, from_others * token * 4
            layout: dict[str, Any] = {"method": "gather", "degree": 4, "load_balancer": balancer, "rank": rank}
            assert sent_bytes(shape, **layout) == (forward, forward + back)
            assert sent_bytes(shape, **layout, keep_gathered=True) == (forward, back)
    sums = [sum(sent_bytes(shape, method="gather", degree=4, rank=rank)[0] for rank in range(4))]
    sums += [sum(sent_bytes(shape, method="gather", degree=4, rank=r, load_balancer="none")[0] for r in range(4))]
    assert sums == [4 * one_way * 2 * 3 // 4, 4 * one_way * 2 // 2]
    # Under masks the tokens of all sequences are counted: 5 that it sends and 7 that come.
    assert sent_bytes(shape, method="gather", degree=4, tokens=(5, 7)) == (5 * 64 * 2, 5 * 64 * 2 + 7 * 64 * 4)
    # Ulysses over 2 of 4 ranks: gather over 2, of 32 tokens each, with one of two kv heads; ranks 2, 3 are its rank 1.
    half = 3 * 16 * (2 * 128 + 2 * 2 * 16) * 2 // 2
    for rank, (to_others, from_others) in enumerate([(16, 32), (16, 32), (32, 16), (32, 16)]):
        forward, back = to_others * token // 2 * 2, from_others * token // 2 * 4
        found = sent_bytes(shape, method="gather", degree=4, ulysses_degree=2, rank=rank)
        assert found == (half + forward, half + forward + back)
    exchanged = 3 * 3 * 16 * (2 * 128 + 2 * 4 * 16) * 2 // 4  # two kv heads repeated to four
    assert sent_bytes(shape, method="ring", degree=4, ulysses_degree=4) == (exchanged, exchanged)
    assert sent_bytes(shape, method="gather", degree=1) == (0, 0)


_DOCUMENTS = ((7, 30, 27), (1, 1, 62))
_MASKS = (
    (Case(documents=_DOCUMENTS), PLAIN),
    (Case(), MaskKind(window=10)),
    (Case(documents=_DOCUMENTS, cut_before=5), MaskKind(window=20, chunk=12)),
)


def _sent_under_masks(balancers: list[str]) -> list[tuple[Any, int, int]]:
    """Return what is compared, and the bytes that were sent forward and backward in bf16."""
    results = []
    size, rank = dist.get_world_size(), dist.get_rank()
    for (case, kind), balancer, kept in product(_MASKS, balancers, (False, True)):
        module = ScaledDotProductAttention()
        apply_cp([module], _mesh(1), seq_len=64, method="gather", load_balancer=balancer, keep_gathered=kept)
        starts, positions = document_tensors(case)
        masks = whole_masks(starts, positions, [kind])
        assert masks is not None
        (own,), masks = cp_shard(_mesh(1), [torch.arange(64).expand(2, 64)], masks, load_balancer=balancer)
        owns: list[Any] = [None] * size
        dist.all_gather_object(owns, own)
        # By the definition: (row, rank that sees, token), of tokens that are another's.
        seen = torch.stack([dense_mask(case, kind)[row, 0] for row in range(2)])
        remote = torch.zeros(2, size, 64, dtype=torch.bool)
        holds = torch.zeros(2, size, 64, dtype=torch.bool)
        for row, each in product(range(2), range(size)):
            tokens = owns[each][row]
            remote[row, each] = seen[row, tokens].any(0)
            remote[row, each, tokens] = False
            holds[row, each, tokens] = True
        token = 2 * 2 * 8  # elements of its K and V
        came = int(remote[:, rank].sum()) * token
        left = int((remote & holds[:, rank].unsqueeze(1)).sum()) * token
        qkv = [torch.randn(2, heads, 64 // size, 8).bfloat16().requires_grad_() for heads in (8, 2, 2)]
        with count_traffic() as forward:
            out = module(*qkv, masks.layers[kind])
        with count_traffic() as backward:
            out.sum().backward()
        results.append(((kind, balancer, kept, "forward"), forward.bytes, left * 2))
        results.append(((kind, balancer, kept, "backward"), backward.bytes, came * 4 + (0 if kept else left * 2)))
    return results


@pytest.mark.parametrize("cp", [2, 4])
def test_masks_let_nothing_travel_that_nobody_sees(cp: int) -> None:
    """Every token that some query of a rank sees travels to it once, and no other; its gradient comes back once."""
    ranks = run_ranks(cp, _sent_under_masks, ["none", "headtail", "per_document", "greedy"])
    for index, rank in enumerate(ranks):
        for what, counted, expected in rank:
            assert counted == expected, (index, what)


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def _on_the_wire(names: list[str]) -> list[tuple[str, int, int]]:
    results = []
    for name in names:
        module, _ = _hooked(name, seq_len=8192)
        qkv = [torch.randn(1, heads, 8192 // dist.get_world_size(), 64).requires_grad_() for heads in (4, 4, 4)]
        transmitted = []
        for _ in range(4):  # what others on the machine send can only add to it
            dist.barrier()
            before = _loopback_bytes()
            with count_traffic() as traffic:
                module(*qkv).sum().backward()
            dist.barrier()
            transmitted.append(_loopback_bytes() - before)
        total = torch.tensor(traffic.bytes)
        dist.all_reduce(total)
        results.append((name, min(transmitted), int(total)))
    return results


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="reads Linux's counters")
def test_the_loopback_interface_sent_what_was_counted() -> None:
    """Breaks with a collective that sends more than it says: gloo's reduce-scatter sends twice as much."""
    names = ["ring, rotated, contiguous", "gather", "ulysses"]
    for name, transmitted, counted in run_ranks(2, _on_the_wire, names)[0]:
        assert transmitted == pytest.approx(counted, rel=0.02), name


def _pairs(names: list[str]) -> list[int]:
    """Return the (query, key) pairs that each method's kernels are called for on this rank."""
    results = []
    for name in names:
        module, _ = _hooked(name, seq_len=1024)
        qkv = [torch.randn(1, heads, 1024 // dist.get_world_size(), 8) for heads in (8, 2, 2)]
        with count_attention_work() as work:
            module(*qkv)
        results.append(work.pairs)
    return results


def test_head_tail_gives_every_rank_equal_work() -> None:
    """Closed form: exactly 1 with head-tail for every method, up to 2 - 1/P contiguous."""
    names = list(_METHODS)
    ranks = run_ranks(4, _pairs, names)
    share = 8 * 1024 * 1025 // 2 / 4
    for index, name in enumerate(names):
        work = [rank[index] for rank in ranks]
        assert sum(work) == 4 * share, name
        if "contiguous" in name:
            assert work == sorted(work) and work[-1] / share == pytest.approx(2 - 1 / 4, rel=0.02), name
        else:
            assert set(work) == {share}, name
