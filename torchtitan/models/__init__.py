"""The model families, by name."""

from torchtitan.errors import nearest, option_error
from torchtitan.models.llama3 import SPEC as _LLAMA3
from torchtitan.models.spec import ModelArgs, ModelSpec

_SPECS = {spec.name: spec for spec in (_LLAMA3,)}


def get_spec(name: str) -> ModelSpec:
    """Return the family of that name; raises ConfigError for an unknown one."""
    if name not in _SPECS:
        known = ", ".join(_SPECS)
        raise option_error("model.name", name, f"unknown model{nearest(name, _SPECS)}", f"known: {known}", "choose one")
    return _SPECS[name]


def get_args(spec: ModelSpec, flavor: str) -> ModelArgs:
    """Return the arguments of a flavour; raises ConfigError for an unknown one."""
    if flavor not in spec.flavors:
        fact = f"{spec.name} has no such flavor{nearest(flavor, spec.flavors)}"
        raise option_error("model.flavor", flavor, fact, f"known: {', '.join(spec.flavors)}", "choose one")
    return spec.flavors[flavor]


def resolve_vocab_size(args: ModelArgs, flavor: str, tokenizer_vocab_size: int) -> ModelArgs:
    """Return `args` with the tokenizer's vocabulary where the flavour leaves it open.

    Raises:
        ConfigError: the tokenizer makes ids that the model has no embedding for.
    """
    if args.vocab_size == 0:
        return args.with_vocab_size(tokenizer_vocab_size)
    if tokenizer_vocab_size > args.vocab_size:
        fact = f"its vocabulary is {args.vocab_size}, the tokenizer's is {tokenizer_vocab_size}"
        rule, remedy = "every token needs an embedding", "choose a tokenizer by --model.tokenizer_path that fits"
        raise option_error("model.flavor", flavor, fact, rule, remedy)
    return args
