"""How Llama 3 may be split, and how its weights start."""

from torchtitan.distributed.plan import ParallelPlan
from torchtitan.models.common.init import InitRule
from torchtitan.models.llama3.args import Llama3Args


def plan_llama3(args: Llama3Args) -> ParallelPlan:
    """Return the plan; tied embeddings belong to the root, which owns the shared weight once."""
    ends = () if args.tie_embeddings else ("tok_embeddings", "output")
    kept = () if args.tie_embeddings else ("output",)
    return ParallelPlan(
        blocks="layers.*",
        attention="layers.*.attention.inner_attention",
        fsdp_units=("layers.*", *ends),
        kept_gathered=kept,
    )


def init_rules_llama3(args: Llama3Args) -> tuple[InitRule, ...]:
    """Return N(0, 0.02) for matrices, with residual outputs scaled down by depth; the head by its width.

    Source: GPT-2's residual scaling 1 / sqrt(2 * layers), and a head of std dim ** -0.5 so that first logits are of
    size one. A tied embedding is the head.
    """
    residual = 0.02 / (2 * args.num_layers) ** 0.5
    head = args.dim**-0.5
    embedding = head if args.tie_embeddings else 1.0
    return (
        InitRule("*norm.weight", None),
        InitRule("tok_embeddings.weight", embedding),
        InitRule("output.weight", head),
        InitRule("layers.*.attention.wo.weight", residual),
        InitRule("layers.*.feed_forward.w2.weight", residual),
        InitRule("layers.*.weight", 0.02),
    )
