"""Llama 3 against Hugging Face `transformers`: an oracle that nobody here wrote."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.tiny import T0, DenseAttention, error
from tests.helpers.transformers_llama import build_transformers_llama, copy_weights, our_name, to_ours
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.errors import ConfigError, TitanError
from torchtitan.models import get_args, get_spec, resolve_vocab_size
from torchtitan.models.common.init import InitRule, initialise
from torchtitan.models.common.rope import RoPEScaling
from torchtitan.models.llama3.args import FLAVORS, Llama3Args
from torchtitan.models.llama3.model import build_llama3
from torchtitan.models.llama3.plan import init_rules_llama3

_SCALING = RoPEScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32)
_CASES = {
    "plain": T0,
    "scaled": replace(T0, rope_scaling=_SCALING),
    "one kv head": replace(T0, num_kv_heads=1),
    "wide heads": replace(T0, head_dim=16),
    "tied": replace(T0, tie_embeddings=True),
}


@pytest.mark.parametrize("case", _CASES)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    """96 tokens: past the original context of the scaled case, so that stretched and kept frequencies both count."""
    args = _CASES[case]
    model = build_llama3(args)
    initialise(model, (InitRule("layers.*.attention.w*", 0.2), *init_rules_llama3(args)), seed=0)
    theirs = build_transformers_llama(args)
    copy_weights(model, theirs, args)
    tokens = torch.randint(0, args.vocab_size, (2, 97), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(96, dtype=torch.int32).expand(2, -1)

    expected = theirs(inputs).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    actual = model.logits(inputs, positions)
    ChunkedCrossEntropy(50)(model.output, model(inputs, positions), labels).total.backward()

    assert error(actual, expected) < 1e-5
    gradients = {our_name(name): to_ours(name, p.grad, args) for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        assert error(parameter.grad, gradients[name]) < 1e-4, name


def test_positions_decide_not_the_place_in_the_tensor() -> None:
    """Breaks when RoPE counts tokens itself: then a rank's tokens would be rotated by their local index."""
    model = build_llama3(T0)
    initialise(model, (InitRule("layers.*.attention.w*", 0.5), *init_rules_llama3(T0)), seed=0)  # sharp attention
    tokens = torch.randint(0, 97, (1, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(16, dtype=torch.int32)[None]
    plain, shifted, spread = (model.logits(tokens, p) for p in (positions, positions + 1000, positions * 2))
    assert error(shifted, plain) < 1e-4  # only differences of positions count
    assert error(spread, plain) > 1e-2


@pytest.mark.parametrize(
    ("flavor", "count"),
    [
        ("1B", 1_235_814_400),
        ("3B", 3_212_749_824),
        ("8B", 8_030_261_248),
        ("70B", 70_553_706_496),
        ("405B", 405_853_388_800),
    ],
)
def test_parameter_counts_are_the_published_ones(flavor: str, count: int) -> None:
    with torch.device("meta"):
        model = build_llama3(FLAVORS[flavor])
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def _counted_flops(args: Llama3Args, seq_len: int, *, dense: bool) -> float:
    """Return what torch counts for a row; it counts the CPU's attention kernel as 0, and dense attention in full."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build_llama3(args)
    initialise(model, init_rules_llama3(args), seed=0)
    if dense:
        for block in model.layers.values():
            block.attention.inner_attention = DenseAttention()
    tokens = torch.zeros(1, seq_len, dtype=torch.long)
    positions = torch.arange(seq_len, dtype=torch.int32)[None]
    with FlopCounterMode(display=False) as counter:
        model.logits(tokens, positions).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("args", [replace(T0, num_layers=3), replace(T0, head_dim=16), replace(T0, num_kv_heads=8)])
def test_flops_are_those_of_the_matrix_products_and_of_the_pairs_that_masks_allow(args: Llama3Args) -> None:
    """Dense attention makes a product for each of S x S pairs and layer; only those that are allowed count."""
    for seq_len in (32, 64):
        matrices = _counted_flops(args, seq_len, dense=False)
        attention = _counted_flops(args, seq_len, dense=True) - matrices
        causal, dense = seq_len * (seq_len + 1) // 2, seq_len**2
        assert args.flops(seq_len, args.num_layers * dense) == matrices + attention
        assert args.flops(seq_len, args.num_layers * causal) == matrices + attention * causal / dense
        assert args.flops(seq_len, 0) == matrices
        assert args.flops(3 * seq_len, 5) == 3 * matrices + attention * 5 / (args.num_layers * dense)


def test_a_parameter_without_a_rule_is_an_error() -> None:
    model = build_llama3(T0)
    with pytest.raises(TitanError, match=r"tok_embeddings\.weight has no rule of initialisation"):
        initialise(model, (InitRule("layers.*", 0.02),), seed=0)


def test_initial_weights_follow_seed_and_rules() -> None:
    models = [build_llama3(T0) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        initialise(model, init_rules_llama3(T0), seed)
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    weight = first["layers.0.attention.wq.weight"]
    assert not torch.equal(weight, other["layers.0.attention.wq.weight"])
    assert float(weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(weight.detach().abs().max()) <= 0.06
    assert float(first["layers.0.attention.wo.weight"].detach().std()) == pytest.approx(0.02 / 2, rel=0.05)
    assert torch.equal(first["norm.weight"], torch.ones(64))


def test_unknown_names_and_vocabularies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--model\.name=llama4: unknown model; did you mean llama3\?; known: llama3"):
        get_spec("llama4")
    with pytest.raises(
        ConfigError, match=r"--model\.flavor=8b: llama3 has no such flavor; .*known: debugmodel, 1B, 3B"
    ):
        get_args(get_spec("llama3"), "8b")
    with pytest.raises(ConfigError, match=r"its vocabulary is 128256, the tokenizer's is 200000"):
        resolve_vocab_size(FLAVORS["8B"], "8B", 200_000)
    assert resolve_vocab_size(FLAVORS["debugmodel"], "debugmodel", 4096).vocab_size == 4096
    assert resolve_vocab_size(FLAVORS["8B"], "8B", 4096).vocab_size == 128256
