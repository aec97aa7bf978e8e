"""What "auto" means, row by row, and the rules of Ulysses and gather with the text they are refused by."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit_tests.config.test_validate import config_of, refusal, run_check
from torchtitan.config.cp_method import choose_cp_method, exchanged_kv_heads, resolve_cp_method
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
    environment = {"device_type": "cuda", "num_heads": 8, "num_kv_heads": 2, "ranks_per_node": 8}
    choice = resolve_cp_method(config.parallelism, **environment)
    assert (choice.method, choice.ulysses_degree, choice.reason) == ("gather", 2, "")


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


def _cp(**options: Any) -> Any:
    values = {f"parallelism__context_parallel_{name}": value for name, value in options.items()}
    return config_of(training__seq_len=48, **values)


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
