"""T0 of the cases: a tiny Llama, its batch, and the same step in one process and under any layout.

The oracle shares no code with the trainer's attention, loss or parallelism: dense masked softmax, torch's mean-free
cross-entropy, one process.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan.attention.masks import MaskKind
from torchtitan.attention.plan import whole_masks
from torchtitan.batch import IGNORED_LABEL, Batch, CPLayout
from torchtitan.components.loss import ChunkedCrossEntropy
from torchtitan.config.cp_method import MASK_BALANCERS
from torchtitan.distributed.context_parallel import cp_shard, cp_unshard
from torchtitan.distributed.parallel_dims import ParallelDims, build_parallel_dims
from torchtitan.distributed.parallelize import SplitOptions, parallelize
from torchtitan.distributed.plan import InnerAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.init import initialise
from torchtitan.models.llama3.args import Llama3Args
from torchtitan.models.llama3.model import build_llama3
from torchtitan.models.llama3.plan import init_rules_llama3, plan_llama3
from torchtitan.runner import SingleStageRunner

T0 = Llama3Args(dim=64, num_layers=2, num_heads=8, num_kv_heads=2, hidden_dim=128, vocab_size=97)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One step's input, and how it is laid out; `dp` ranks share the rows of the batch."""

    args: Llama3Args = T0
    batch_size: int = 2
    seq_len: int = 64
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None  # None: dtype
    dp: int = 1
    cp: int = 1
    method: str = "ring"
    ulysses: int = 1
    rotate_method: str = "allgather"
    load_balancer: str = "headtail"
    gather_kv_heads: int | str = "auto"
    keep_gathered: bool = False
    activation_checkpoint: str = "none"
    selective_ac_option: str = "op"
    compile_backend: str = ""
    ignored: tuple[tuple[int, int], ...] = ()  # spans of positions without a label
    documents: tuple[tuple[int, ...], ...] = ()  # lengths in each row; none: each row is one, and masks are causal
    cut_before: int = 0  # tokens of each row's first document that are in the row before
    attn_type: str = "sdpa"
    updates: int = 0

    def on(self, **changes: Any) -> "Case":
        """Return the case with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Result:
    """What a step left: whole tensors, in sequence order."""

    loss: float
    token_losses: torch.Tensor  # [B, S]
    grads: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]
    grad_norm: float


def make_batch(case: Case) -> Batch:
    """Return T0's whole batch: fixed random tokens, labels shifted by one."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, case.args.vocab_size, (case.batch_size, case.seq_len + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for start, end in case.ignored:
        labels[:, start:end] = IGNORED_LABEL
    starts, positions = document_tensors(case)
    if case.documents:
        ends = torch.cat([starts[:, 1:] == torch.arange(1, case.seq_len), torch.zeros(case.batch_size, 1).bool()], 1)
        labels[ends] = IGNORED_LABEL
    masks = whole_masks(starts if case.documents else None, positions, case.args.layer_kinds)
    return Batch(tokens[:, :-1].contiguous(), labels, positions, masks)


def document_tensors(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return document starts and positions of the case's rows: int32 [B, S] both."""
    rows = case.documents or ((case.seq_len,),) * case.batch_size
    starts, positions = [], []
    for lengths in rows:
        assert sum(lengths) == case.seq_len
        firsts = [sum(lengths[:index]) for index in range(len(lengths))]
        starts.append([first for first, length in zip(firsts, lengths, strict=True) for _ in range(length)])
        before = [case.cut_before if case.documents else 0] + [0] * (len(lengths) - 1)
        positions.append([cut + token for cut, length in zip(before, lengths, strict=True) for token in range(length)])
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32)


def build_model(case: Case) -> Decoder:
    """Return T0 with its seeded weights, on one device, without any parallelism."""
    model = build_llama3(case.args, case.attn_type).to(case.dtype)
    initialise(model, init_rules_llama3(case.args), seed=1)
    return model


class DenseAttention(InnerAttention):
    """Softmax over explicit [S, S] scores: the oracle's attention, under a mask of its own."""

    def __init__(self, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.mask = mask  # bool, broadcasts to [B, H, S, S]; None: causal

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: object = None) -> torch.Tensor:
        """Return attention by the definition: [B, H, S, E]."""
        group = q.size(1) // k.size(1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mask = torch.ones(q.size(2), q.size(2), dtype=torch.bool).tril() if self.mask is None else self.mask
        scores = (q @ k.transpose(-1, -2)) * q.size(-1) ** -0.5
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def dense_mask(case: Case, kind: MaskKind) -> torch.Tensor:
    """Return which keys each query sees, by the definition: bool [B, 1, S, S]."""
    starts, positions = document_tensors(case)
    distance = torch.arange(case.seq_len)[:, None] - torch.arange(case.seq_len)
    mask = (distance >= 0) & (starts[:, :, None] == starts[:, None, :])
    if kind.window:
        mask &= distance < kind.window
    if kind.chunk:
        chunks = positions // kind.chunk
        mask &= chunks[:, :, None] == chunks[:, None, :]
    return mask.unsqueeze(1)


def oracle(case: Case) -> Result:
    """Return the case's step in one process: no CP, FSDP, fused loss or flash kernel."""
    model = build_model(case)
    if case.compute_dtype is not None and case.compute_dtype != case.dtype:
        raise AssertionError("the oracle computes in the parameters' dtype")
    for block in model.layers.values():
        block.attention.inner_attention = DenseAttention(dense_mask(case, block.attention.kind))
    batch = make_batch(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for update in range(case.updates + 1):
        optimizer.zero_grad()
        logits = model.logits(batch.inputs, batch.positions, batch.masks).to(
            torch.promote_types(case.dtype, torch.float32)
        )
        token_losses = F.cross_entropy(
            logits.transpose(1, 2), batch.labels, reduction="none", ignore_index=IGNORED_LABEL
        )
        loss = token_losses.sum() / (batch.labels != IGNORED_LABEL).sum().clamp(min=1)
        loss.backward()
        if update < case.updates:
            optimizer.step()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = torch.stack([grad.double().square().sum() for grad in grads.values()]).sum().sqrt()
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Result(float(loss.detach()), token_losses.detach(), grads, parameters, float(norm))


def build_split_model(case: Case) -> tuple[Decoder, ParallelDims]:
    """Return T0 split as the case says, from a meta-device build, as the trainer does it."""
    dims = build_parallel_dims(CPU, dp_shard=case.dp, cp=case.cp, ulysses=case.ulysses)
    with torch.device("meta"):
        model = build_llama3(case.args, case.attn_type).to(case.dtype)
    compute = case.compute_dtype or case.dtype
    options = SplitOptions(
        seq_len=case.seq_len,
        cp_method=case.method,
        cp_rotate_method=case.rotate_method,
        cp_load_balancer=case.load_balancer,
        cp_gather_kv_heads=case.gather_kv_heads,
        cp_keep_gathered=case.keep_gathered,
        activation_checkpoint=case.activation_checkpoint,
        selective_ac_option=case.selective_ac_option,
        compile_backend=case.compile_backend,
        param_dtype=compute,
        reduce_dtype=case.dtype,
    )
    parallelize(model, plan_llama3(case.args), dims, options)
    model.to_empty(device=CPU)
    initialise(model, init_rules_llama3(case.args), seed=1)
    return model, dims


def local_batch(case: Case, dims: ParallelDims) -> Batch:
    """Return this rank's part of the whole batch: its rows, then its tokens."""
    whole = make_batch(case)
    rows = slice(dims.dp_rank * case.batch_size // dims.dp_shard, (dims.dp_rank + 1) * case.batch_size // dims.dp_shard)
    batch = Batch(whole.inputs[rows], whole.labels[rows], whole.positions[rows])
    starts = document_tensors(case)[0][rows]
    masked = case.documents or case.load_balancer in MASK_BALANCERS
    masks = whole_masks(starts if masked else None, batch.positions, case.args.layer_kinds)
    if case.cp == 1:
        return replace(batch, masks=masks)
    layout = CPLayout(case.cp, case.load_balancer, case.seq_len, case.ulysses)
    tensors = [batch.inputs, batch.labels, batch.positions]
    if masks is None:
        return batch.cut(layout, cp_shard(dims.cp_mesh, tensors, load_balancer=case.load_balancer))
    return batch.cut(layout, *cp_shard(dims.cp_mesh, tensors, masks, load_balancer=case.load_balancer))


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of which a DTensor holds a shard."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def split_step(case: Case) -> Result:
    """Return the case's step under its layout; run it on dp x cp ranks."""
    from torchtitan.distributed.grad_norm import grad_norm, local_gradients

    model, dims = build_split_model(case)
    batch = local_batch(case, dims)
    num_tokens = max(1, int((make_batch(case).labels != IGNORED_LABEL).sum()))
    runner = SingleStageRunner(model, ChunkedCrossEntropy(chunk_tokens=24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for update in range(case.updates + 1):
        optimizer.zero_grad()
        total = runner.forward_backward(batch, num_tokens).total
        if update < case.updates:
            optimizer.step()
    torch.distributed.all_reduce(total)
    norm = grad_norm(local_gradients(model.parameters()), dims.fsdp_mesh)
    grads = {name: full(parameter.grad) for name, parameter in model.named_parameters()}
    parameters = {name: full(parameter) for name, parameter in model.named_parameters()}
    # Last: a forward leaves the root's parameters gathered.
    return Result(float(total) / num_tokens, _token_losses(case, model, dims, batch), grads, parameters, norm)


def _token_losses(case: Case, model: Decoder, dims: ParallelDims, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        logits = model.logits(batch.inputs, batch.positions, batch.masks)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).transpose(1, 2)
        losses = F.cross_entropy(wide, batch.labels, reduction="none", ignore_index=IGNORED_LABEL)
    rows = losses
    if case.cp > 1:
        (rows,) = cp_unshard(dims.cp_mesh, [losses], batch.masks, load_balancer=case.load_balancer)
    everyones = [torch.empty_like(rows) for _ in range(case.dp * case.cp)]
    torch.distributed.all_gather(everyones, rows.contiguous())
    return torch.cat(everyones[:: case.cp])  # one rank of each cp group


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return max|a - b| / max|b|."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
