"""Report what one rank of a training step would need at its peak, without allocating any of it.

    python scripts/estimate_memory.py [--flavor 8B] [--seq-len 65536] [--degree 8]

One process plays rank 0 of a cp group: the model is split by the trainer's own code over a fake process group, and the
step runs on fake tensors, whose live bytes torch's memory tracker adds up. Each line is one way to make logits: for
all local tokens at once, or chunk by chunk. Beside stand what the gather's opaque operator needs within, by its formula
(at another moment than the loss, so it is no addend where that is the peak), and the optimizer's state (two fp32
numbers per parameter); kernels' workspaces are not known here. A CPU without bf16 kernels needs more than is told.
"""

import argparse
import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.batch import Batch
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.distributed.cp.gather import AUTO_BYTES
from torchtitan.distributed.parallel_dims import build_parallel_dims
from torchtitan.distributed.parallelize import SplitOptions, parallelize
from torchtitan.models import get_args, get_spec
from torchtitan.models.spec import ModelArgs
from torchtitan.runner import SingleStageRunner

_GIB = 2**30
_DEBUG_VOCABULARY = 4096  # of a flavour that takes its tokenizer's


def main(argv: list[str]) -> int:
    """Print the table; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="8B", help="of Llama 3")
    parser.add_argument("--seq-len", type=int, default=65536, help="tokens of the whole sequence")
    parser.add_argument("--degree", type=int, default=8, help="cp ranks")
    parser.add_argument("--method", default="gather", choices=("gather", "ring"))
    parser.add_argument("--activation-checkpoint", default="full", choices=("none", "selective", "full"))
    parser.add_argument("--chunks", default="0,2048,256", help="tokens whose logits exist at one time; 0: all")
    args = parser.parse_args(argv)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.degree)
    model_args = get_args(get_spec("llama3"), args.flavor)
    model_args = model_args.with_vocab_size(model_args.vocab_size or _DEBUG_VOCABULARY)
    print(f"llama3 {args.flavor}, {args.seq_len:,} tokens over {args.degree} ranks, {args.method}, bf16 on fp32, ")
    print(f"activation checkpointing {args.activation_checkpoint}; GiB per rank at the peak of forward and backward:")
    print("logits of tokens at once     step    inside gather  + optimizer's state")
    inside = gather_bytes(model_args, args.seq_len, args.degree) if args.method == "gather" else 0
    for chunk in map(int, args.chunks.split(",")):
        peak, parameters = step_bytes(args, model_args, chunk)
        name = f"{chunk:,}" if chunk else f"all {args.seq_len // args.degree:,}"
        print(f"{name:<24}  {peak / _GIB:7.2f}  {inside / _GIB:15.2f}  {parameters * 8 / _GIB:19.2f}", flush=True)
    dist.destroy_process_group()
    return 0


def step_bytes(args: argparse.Namespace, model_args: ModelArgs, chunk_tokens: int) -> tuple[int, int]:
    """Return the peak of a step in bytes, parameters and gradients included, and the parameters of one rank."""
    spec, device = get_spec("llama3"), torch.device("cpu")
    dims = build_parallel_dims(device, dp_shard=1, cp=args.degree)
    options = SplitOptions(
        seq_len=args.seq_len,
        cp_method=args.method,
        activation_checkpoint=args.activation_checkpoint,
        param_dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = spec.build(model_args, "sdpa")
    parallelize(model, spec.plan(model_args), dims, options)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=device)
        local = args.seq_len // args.degree
        tokens = torch.zeros(1, local, dtype=torch.long)
        batch = Batch(tokens, tokens.clone(), torch.zeros(1, local, dtype=torch.int32))
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            SingleStageRunner(model, ChunkedCrossEntropy(chunk_tokens)).forward_backward(batch, local)
    (peaks,) = [peaks for place, peaks in tracker.get_tracker_snapshot("peak").items() if place.type == "cpu"]
    parameters = sum(parameter.to_local().numel() for parameter in model.parameters())
    return int(peaks["Total"]), parameters


def gather_bytes(model_args: ModelArgs, seq_len: int, degree: int) -> int:
    """Return the most that the gather holds inside its operator, in the backward, for the heads of one step.

    Of the rank that sees all: keys and values in order and the next heads' on their way (bf16), their gradients (fp32)
    in order, by token, as they are sent and as they come back, and copies of the local queries, outputs and their
    gradients (bf16).
    """
    if degree == 1:
        return 0
    head = 2 * seq_len * model_args.width_per_head
    heads = min(model_args.num_kv_heads, max(1, AUTO_BYTES // (head * 2)))
    local = seq_len // degree * model_args.num_heads * model_args.width_per_head
    return heads * head * (2 * 2 + 4 * 4) + 3 * local * 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
