"""What "auto" means, row by row, and the rules of Ulysses and gather with the text they are refused by."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit_tests.config.test_validate import config_of, refusal, run_check
from torchtitan.attention.masks import PLAIN, MaskKind
from torchtitan.config.cp_method import (
    LOAD_BALANCERS,
    MASK_BALANCERS,
    choose_cp_method,
    exchanged_kv_heads,
    resolve_cp_method,
    resolve_load_balancer,
)
from torchtitan.config.validate import ineffective

_CPU: dict[str, Any] = {
    "degree": 8,
    "ulysses_degree": 1,
    "device_type": "cpu",
    "num_heads": 32,
    "num_kv_heads": 8,
    "ranks_per_node": 8,
    "plain_causal": True,
}


_ENVIRONMENT: dict[str, Any] = {"device_type": "cuda", "num_heads": 8, "num_kv_heads": 2, "ranks_per_node": 8}
_DOCUMENTS = {"model__attn_mask": "document"}
_WINDOW, _CHUNK = MaskKind(window=16), MaskKind(chunk=16)


def _cp(**options: Any) -> Any:
    """Return a configuration; a name without a section is one of context parallelism."""
    values = {name if "__" in name else f"parallelism__context_parallel_{name}": options[name] for name in options}
    return config_of(**{"training__seq_len": 48, **values})


@pytest.mark.parametrize(
    ("changes", "method", "ulysses_degree", "reason"),
    [
        ({"plain_causal": False}, "gather", 1, "the mask is not plain causal"),
        ({"plain_causal": False, "device_type": "cuda"}, "gather", 1, "the mask is not plain causal"),
        ({}, "ring", 8, "all 8 ranks are on one node, share out 32 heads"),
        ({"device_type": "cuda"}, "ring", 8, "all 8 ranks are on one node, share out 32 heads"),
        ({"ranks_per_node": 16}, "ring", 8, "all 8 ranks are on one node"),
        ({"ranks_per_node": 4}, "gather", 1, "on a CPU gather is exact"),  # the group spans nodes
        ({"ranks_per_node": 12}, "gather", 1, "on a CPU gather is exact"),  # a group of 8 may
        ({"ranks_per_node": 4, "device_type": "cuda"}, "ring", 1, "on cuda the ring hides"),
        ({"num_heads": 12, "num_kv_heads": 4}, "gather", 1, "on a CPU gather is exact"),  # 8 does not divide 12
        # (1 + K'/H) against P K/H: 1 + 2/8 is not fewer than 2 x 2/8.
        ({"degree": 2, "num_heads": 8, "num_kv_heads": 2}, "gather", 1, "on a CPU gather is exact"),
        ({"degree": 2, "num_heads": 8, "num_kv_heads": 2, "device_type": "cuda"}, "ring", 1, "on cuda the ring hides"),
        ({"degree": 8, "num_heads": 8, "num_kv_heads": 2}, "gather", 1, "on a CPU gather is exact"),  # 1 + 1 = 8/4
        ({"degree": 4, "num_heads": 8, "num_kv_heads": 8}, "ring", 4, "all 4 ranks are on one node"),
        ({"ulysses_degree": 2}, "gather", 2, "on a CPU gather is exact"),  # given, so kept
        ({"ulysses_degree": 2, "device_type": "cuda"}, "ring", 2, "on cuda the ring hides"),
    ],
)
def test_every_row_of_auto(changes: dict[str, Any], method: str, ulysses_degree: int, reason: str) -> None:
    choice = choose_cp_method(**{**_CPU, **changes})
    assert (choice.method, choice.ulysses_degree) == (method, ulysses_degree)
    assert choice.reason.startswith(reason)


def test_a_method_that_is_given_is_taken() -> None:
    config = config_of(
        parallelism__context_parallel_degree=8,
        parallelism__context_parallel_method="gather",
        parallelism__context_parallel_ulysses_degree=2,
    )
    for plain_causal in (True, False):
        choice = resolve_cp_method(config.parallelism, **_ENVIRONMENT, plain_causal=plain_causal)
        assert (choice.method, choice.ulysses_degree, choice.reason) == ("gather", 2, "")


def test_auto_is_gather_for_masks() -> None:
    """Gather alone takes masks, on any device and over any part of Ulysses; Ulysses alone only where it is given."""
    for ulysses in (1, 2, 8):
        section = _cp(degree=8, method="auto", ulysses_degree=ulysses).parallelism
        choice = resolve_cp_method(section, **_ENVIRONMENT, plain_causal=False)
        assert (choice.method, choice.ulysses_degree) == ("gather", ulysses)
        assert choice.reason == "the mask is not plain causal, which gather alone knows"
    run_check(_cp(degree=2, method="auto", **_DOCUMENTS), world_size=2, device_type="cuda")


def test_auto_balances_masks_by_what_they_cost() -> None:
    section = _cp(degree=2).parallelism
    assert section.context_parallel_load_balancer == "auto"
    assert resolve_load_balancer(section, plain_causal=True) == "headtail"
    assert resolve_load_balancer(section, plain_causal=False) == "greedy"
    for given_one in LOAD_BALANCERS:
        section = _cp(degree=2, load_balancer=given_one).parallelism
        for plain_causal in (True, False):
            assert resolve_load_balancer(section, plain_causal=plain_causal) == given_one


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))
def test_key_value_heads_are_repeated_just_enough(num_kv_heads: int, group: int, degree: int) -> None:
    num_heads = num_kv_heads * group
    if num_heads % degree:
        return
    heads = exchanged_kv_heads(num_heads, num_kv_heads, degree)
    assert heads % num_kv_heads == heads % degree == num_heads % heads == 0
    fewer = range(num_kv_heads, heads, num_kv_heads)
    assert not [count for count in fewer if count % degree == 0 and num_heads % count == 0]
    if num_kv_heads % degree == 0:
        assert heads == num_kv_heads
    elif degree % num_kv_heads == 0:
        assert heads == degree


def test_ulysses_needs_a_part_of_the_ranks_and_of_the_heads() -> None:
    assert refusal(_cp(degree=6, ulysses_degree=4), world_size=6) == (
        "--parallelism.context_parallel_ulysses_degree=4: 4 does not divide context_parallel_degree 6; it is a part of "
        "the cp ranks; use 1 or 2"
    )
    assert refusal(_cp(degree=6, ulysses_degree=3), world_size=6) == (
        "--parallelism.context_parallel_ulysses_degree=3: the model's 8 query heads cannot be shared out over 3 ranks; "
        "each rank gets as many heads; use 1 or 2"
    )
    assert "0 is no number of ranks" in refusal(_cp(degree=2, ulysses_degree=0), world_size=2)
    run_check(_cp(degree=6, ulysses_degree=2), world_size=6)


def test_length_under_ulysses() -> None:
    config = config_of(
        training__seq_len=20,
        parallelism__context_parallel_degree=8,
        parallelism__context_parallel_ulysses_degree=4,
    )
    assert refusal(config, world_size=8) == (
        "--training.seq_len=20: 20 is not a multiple of 8; head-tail balancing cuts a sequence in 2 x 2 equal chunks "
        "(context_parallel_degree 8 / ulysses 4), and 8 ranks get equal parts; use 16 or 24, or another "
        "--parallelism.context_parallel_degree"
    )


def test_gather_moves_heads_that_exist() -> None:
    assert refusal(_cp(degree=2, method="gather", gather_kv_heads=3), world_size=2) == (
        "--parallelism.context_parallel_gather_kv_heads=3: the model has 2 key/value heads; it is how many of them "
        "travel at a time; use at most 2, 0 for all, or auto"
    )


_RING_REMEDY = "use gather or auto, or Ulysses on all cp ranks"


@pytest.mark.parametrize(
    ("options", "layer_kinds", "named"),
    [
        (_DOCUMENTS, (PLAIN,), "--model.attn_mask=document is"),
        ({"model__sliding_window": 16}, (_WINDOW,), "--model.sliding_window=16 is"),
        ({"model__attention_chunk_size": 16}, (_CHUNK,), "--model.attention_chunk_size=16 is"),
        (
            {"model__sliding_window": 16, "model__full_attention_every": 2},
            (_WINDOW, PLAIN),
            "--model.sliding_window=16",
        ),
        (
            {**_DOCUMENTS, "model__sliding_window": 16, "model__attention_chunk_size": 32},
            (MaskKind(16, 32),),
            "--model.attn_mask=document and --model.sliding_window=16 and --model.attention_chunk_size=32 is",
        ),
        ({}, (PLAIN, _WINDOW), "debugmodel is"),  # a flavour with windows of its own
    ],
)
@pytest.mark.parametrize("cp", [{"degree": 2}, {"degree": 4, "ulysses_degree": 2}])
def test_the_ring_refuses_masks_by_name(
    options: dict[str, Any], layer_kinds: tuple[MaskKind, ...], named: str, cp: dict[str, int]
) -> None:
    """Else every rank would attend by the plain causal mask, without a word."""
    world = cp["degree"]
    message = refusal(_cp(**cp, **options), world_size=world, layer_kinds=layer_kinds)
    assert message.startswith(f"--parallelism.context_parallel_method=ring: {named}")
    assert message.endswith(f" is not the plain causal mask; the ring knows no other; {_RING_REMEDY}")
    for method in ("gather", "auto"):
        run_check(_cp(**cp, **options, method=method), world_size=world, layer_kinds=layer_kinds)
    run_check(_cp(**{**cp, "ulysses_degree": world}, **options), world_size=world, layer_kinds=layer_kinds)
    run_check(_cp(**options), layer_kinds=layer_kinds)  # one rank has no method


@pytest.mark.parametrize("attn_type", ["flex", "varlen"])
def test_the_ring_is_made_of_sdpa(attn_type: str) -> None:
    options = {"degree": 2, "model__attn_type": attn_type}
    assert refusal(_cp(**options), world_size=2) == (
        f"--parallelism.context_parallel_method=ring: --model.attn_type={attn_type} is not torch's SDPA; the ring is "
        f"made of SDPA's kernels; use --model.attn_type=sdpa, or {_RING_REMEDY}"
    )
    run_check(_cp(**options, method="gather"), world_size=2)
    run_check(_cp(**options, ulysses_degree=2), world_size=2)
    run_check(_cp(model__attn_type=attn_type))


@pytest.mark.parametrize("balancer", MASK_BALANCERS)
def test_the_ring_refuses_balancers_of_masks(balancer: str) -> None:
    options = {"degree": 2, "load_balancer": balancer, "training__seq_len": 512}
    assert refusal(_cp(**options), world_size=2) == (
        f"--parallelism.context_parallel_load_balancer={balancer}: torch's ring knows head-tail and plain order only; "
        f"{balancer} deals the tokens out by their masks, in any order; use headtail, or "
        "--parallelism.context_parallel_method=gather"
    )
    for documents in ({}, _DOCUMENTS):
        run_check(_cp(**options, **documents, method="gather"), world_size=2)


@pytest.mark.parametrize("balancer", ["auto", *LOAD_BALANCERS])
def test_ulysses_on_all_ranks_takes_every_mask_and_balancer(balancer: str) -> None:
    """Each rank has whole sequences then, so neither is read by the method."""
    for options, kinds in ((_DOCUMENTS, (PLAIN,)), ({"model__sliding_window": 16}, (_WINDOW, PLAIN)), ({}, (_CHUNK,))):
        for method in ("ring", "gather", "auto"):
            config = _cp(degree=2, ulysses_degree=2, load_balancer=balancer, method=method, **options)
            run_check(config, world_size=2, layer_kinds=kinds)
            run_check(config, world_size=2, layer_kinds=kinds, device_type="cuda")


@pytest.mark.parametrize(
    ("cp", "seq_len", "factor", "text"),
    [
        ({"degree": 2}, 384, 256, "use 256 or 512, or --parallelism.context_parallel_load_balancer=none, or another"),
        ({"degree": 2}, 130, 256, "use 256, or --parallelism.context_parallel_load_balancer=none, or another"),
        ({"degree": 4, "ulysses_degree": 2}, 128, 256, "use 256, or "),
        ({"degree": 2}, 385, 256, "use 256 or 512, or another --parallelism.context_parallel_degree"),
    ],
)
def test_ptrr_deals_out_whole_blocks(cp: dict[str, int], seq_len: int, factor: int, text: str) -> None:
    options = {**cp, "method": "gather", "load_balancer": "ptrr"}
    message = refusal(_cp(**options, training__seq_len=seq_len), world_size=cp["degree"])
    assert message.startswith(
        f"--training.seq_len={seq_len}: {seq_len} is not a multiple of {factor}; ptrr deals out blocks of 128 tokens, "
        f"as many to each of 2 ranks; {text}"
    )
    run_check(_cp(**options, training__seq_len=2 * factor), world_size=cp["degree"])


@pytest.mark.parametrize("balancer", ["per_document", "greedy"])
def test_balancers_of_masks_take_any_length_that_the_ranks_divide(balancer: str) -> None:
    options = {"degree": 2, "method": "gather", "load_balancer": balancer}
    run_check(_cp(**options, training__seq_len=62), world_size=2)
    assert "63 is not a multiple of 2; context parallelism cuts a sequence in 2 equal chunks; use 62 or 64" in refusal(
        _cp(**options, training__seq_len=63), world_size=2
    )


def test_a_compiled_ring_is_balanced() -> None:
    config = config_of(
        compile__enable=True,
        compile__backend="aot_eager",
        parallelism__context_parallel_degree=2,
        parallelism__context_parallel_load_balancer="none",
    )
    assert "use headtail, or --parallelism.context_parallel_method=gather" in refusal(config, world_size=2)


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(compile__enable=True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert "use --compile.backend=aot_eager" in refusal(config).replace("or use", "use")
    run_check(config, device_type="cuda")


@pytest.mark.parametrize("option", ["0", "-1", "ops", "", "1.5"])
def test_selective_is_op_or_a_count(option: str) -> None:
    config = config_of(activation_checkpoint__mode="selective", activation_checkpoint__selective_ac_option=option)
    assert f"--activation_checkpoint.selective_ac_option={option}: " in refusal(config)


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"degree": 2, "method": "gather", "rotate_method": "alltoall"}, "rotate_method"),
        ({"degree": 2, "keep_gathered": True}, "keep_gathered"),
        ({"degree": 2, "ulysses_degree": 2, "load_balancer": "none"}, "load_balancer"),
        ({"ulysses_degree": 1, "gather_kv_heads": 1}, "gather_kv_heads"),
    ],
)
def test_what_another_method_reads_has_no_effect(options: dict[str, Any], idle: str) -> None:
    lines = [line for line in ineffective(_cp(**options)) if "context_parallel" in line]
    assert len(lines) == 1 and f"context_parallel_{idle}" in lines[0]
