"""Hugging Face `transformers`' Llama with the same weights as a model of this project."""

import torch
from torch import nn

from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.args import Llama3Args

_NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def rope_parameters(args: Llama3Args) -> dict[str, object]:
    """Return what transformers' configuration calls rope_parameters."""
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": args.rope_theta}
    if args.rope_scaling is None:
        return rope
    scaling = args.rope_scaling
    return rope | {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context_length,
    }


def build_transformers_llama(args: Llama3Args, attention: str = "eager") -> nn.Module:
    """Return transformers' model of the same shape in fp32, with weights of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=args.dim,
        intermediate_size=args.hidden_dim,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads,
        head_dim=args.width_per_head,
        vocab_size=args.vocab_size,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=4096,
        tie_word_embeddings=args.tie_embeddings,
        rope_parameters=rope_parameters(args),
        attn_implementation=attention,
        use_cache=False,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).float()


def our_name(name: str) -> str:
    """Return this project's name of a parameter of transformers'."""
    name = name.removeprefix("model.")
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def to_ours(name: str, tensor: torch.Tensor, args: Llama3Args) -> torch.Tensor:
    """Return a parameter (or gradient) of transformers' in this project's layout.

    Query and key rows: RoPE's pairs are halves there (i, i + E/2), neighbours here, as in Llama's own checkpoints.
    """
    heads = {"q_proj": args.num_heads, "k_proj": args.num_kv_heads}.get(name.split(".")[-2])
    return tensor if heads is None else tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def to_theirs(name: str, tensor: torch.Tensor, args: Llama3Args) -> torch.Tensor:
    """Return a parameter of this project's in transformers' layout; `name` is transformers'."""
    heads = {"q_proj": args.num_heads, "k_proj": args.num_kv_heads}.get(name.split(".")[-2])
    return tensor if heads is None else tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


@torch.no_grad()
def copy_weights(source: Decoder, target: nn.Module, args: Llama3Args) -> None:
    """Give transformers' model the weights of ours, in place."""
    ours = dict(source.named_parameters())
    theirs = dict(target.named_parameters())
    assert {our_name(name) for name in theirs} == ours.keys()
    for name, parameter in theirs.items():
        parameter.copy_(to_theirs(name, ours[our_name(name)], args))
