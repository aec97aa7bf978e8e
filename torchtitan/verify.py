"""Prove a layout: `python -m torchtitan.verify` with the options of training, alone or under torchrun.

The model is run forward and backward under the layout, as the trainer does it, and once more by rank 0 alone without
any parallelism, from the same weights and batch. Exit code 0: they agree within the tolerances.

Letters: B sequences, S tokens of each.
"""

import gc
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from torchtitan.attention.masks import AttentionMasks, LayerMask
from torchtitan.attention.work import count_attention_work
from torchtitan.batch import Batch
from torchtitan.build import DTYPES, build_parts, cp_choice
from torchtitan.components.loss import ChunkedCrossEntropy, mean_loss
from torchtitan.config.cp_method import AttentionShape, sent_bytes
from torchtitan.config.job import JobConfig
from torchtitan.data.loader import Microbatch
from torchtitan.distributed.collectives import count_traffic
from torchtitan.distributed.context_parallel import MaskPlanner, cp_rank_of, cp_unshard
from torchtitan.errors import option_error
from torchtitan.fingerprints import FingerprintRecorder, Fingerprints, fingerprints
from torchtitan.models import get_spec, resolve_vocab_size
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.init import initialise
from torchtitan.models.spec import ModelArgs
from torchtitan.runner import SingleStageRunner
from torchtitan.train import Job, start
from torchtitan.trainer import Trainer

_GIB = 1024**3
_WORST = 10  # gradients that are listed
_PATIENCE = timedelta(hours=6)  # of the ranks that wait for the one process
_LOSS_TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-3}
# Twice what either side was seen to be off fp64 in fp32 (1.8e-6, at 2 tokens); in bf16 some ten roundings.
_GRADIENT_TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 5e-2}
_SMALLEST_SCALE = 1e-3  # of the largest gradient: one that is 0 but for rounding has no scale of its own


def main(argv: Sequence[str] | None = None, trainer_class: type[Trainer] = Trainer) -> int:
    """Verify the layout of a command line; returns the exit code (0 proven, 1 not, 2 refused)."""
    return start(argv, partial(verify, trainer_class=trainer_class))


@dataclass
class Outcome:
    """One side's step: whole tensors in sequence order, on the CPU of rank 0."""

    loss: float  # as the trainer logs it
    token_losses: torch.Tensor  # [B, S]
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    peak_gib: list[float] = field(default_factory=list)  # growth of each rank's memory


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that are taken for rounding."""

    loss: float
    gradient: float


def verify(job: Job, trainer_class: type[Trainer]) -> int:
    """Compare the layout with one process and report; returns the exit code. Collective."""
    _check_memory(job.config, job.args)
    config = replace(job.config, checkpoint=replace(job.config.checkpoint, enable=False))
    trainer = trainer_class(build_parts(config, job.args, job.tokenizer, job.device, job.stop))
    waiting = dist.new_group(timeout=_PATIENCE, backend="gloo")
    raw = next(iter(trainer.parts.dataloader))
    whole = _whole_batch(raw, trainer)
    split = _split_outcome(trainer, raw)
    counts = None if config.compile.enable else _counts(config, job.args, trainer, raw)
    single = model = None
    if dist.get_rank() == 0:
        model = _single_model(config, job)
        single = _single_outcome(model, whole, config, job)
    dist.barrier(waiting)
    code, problem = 0, ""
    if single is not None:
        problem = _report(config, job.args, trainer, whole, split, single, counts)
    problem = _broadcast(problem, waiting)
    if problem:
        where = "; where it begins was not searched: the model is compiled"
        if not config.compile.enable:
            where = _find_divergence(trainer, raw, whole, model, _tolerances(config), waiting)
        if dist.get_rank() == 0:
            print(f"FAILED: {problem}{where}", flush=True)
        code = 1
    elif dist.get_rank() == 0:
        print("PASSED", flush=True)
    trainer.close()
    return code


def estimate_gib(config: JobConfig, args: ModelArgs) -> float:
    """Return roughly what the model in one process needs: weights, a copy in the compute dtype, gradients, activations.

    About 26 numbers of the width of the model per token and layer, the feed-forward's among them; logits in chunks.
    """
    with torch.device("meta"):
        model = get_spec(config.model.name).build(args, config.model.attn_type)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    itemsize = DTYPES[config.training.mixed_precision_param].itemsize
    tokens = config.training.local_batch_size * config.training.seq_len * max(1, _dp_degree(config))
    activations = tokens * args.num_layers * 26 * args.dim * itemsize
    return (parameters * (4 + 2 * itemsize + 8) + activations) / _GIB


def _dp_degree(config: JobConfig) -> int:
    return dist.get_world_size() // config.parallelism.context_parallel_degree


def _check_memory(config: JobConfig, args: ModelArgs) -> None:
    needed, limit = estimate_gib(config, args), config.verify.memory_limit_gib
    if needed <= limit:
        return
    flavors = get_spec(config.model.name).flavors
    estimates = {
        name: estimate_gib(config, resolve_vocab_size(smaller, name, args.vocab_size))
        for name, smaller in flavors.items()
    }
    fitting = [name for name, size in sorted(estimates.items(), key=lambda item: -item[1]) if size <= limit]
    remedy = "use a shorter --training.seq_len"
    if fitting:
        remedy = f"--model.flavor={fitting[0]} needs about {estimates[fitting[0]]:.1f} GiB"
    fact = f"{config.model.flavor} in one process needs about {needed:.1f} GiB at seq_len {config.training.seq_len}"
    rule = "verify compares with one process, and refuses what would not fit there"
    raise option_error("verify.memory_limit_gib", limit, fact, rule, f"raise it, or {remedy}")


def _tolerances(config: JobConfig) -> Tolerances:
    dtype, section = config.training.mixed_precision_param, config.verify
    return Tolerances(
        _LOSS_TOLERANCE[dtype] if section.loss_tolerance is None else section.loss_tolerance,
        _GRADIENT_TOLERANCE[dtype] if section.gradient_tolerance is None else section.gradient_tolerance,
    )


def _whole_batch(raw: Microbatch, trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the sequences of all dp ranks, in their order."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, raw)
    chosen = everyones[:: trainer.dims.cp]  # one rank of each cp group
    return {name: torch.cat([each[name] for each in chosen]) for name in raw if name != "masks"}


def _split_outcome(trainer: Trainer, raw: Microbatch) -> Outcome:
    """Run the step as the trainer does."""
    before = _peak(trainer.parts.device)
    valid_tokens = trainer._count_valid_tokens([raw])
    batch = trainer.post_dataloading_process(raw)
    loss = trainer.parts.runner.forward_backward(batch, max(1, valid_tokens))
    summary = trainer._summarise(loss, [batch], valid_tokens)
    token_losses = _in_order(trainer, batch, loss.token_losses.view(batch.labels.shape).unsqueeze(-1)).squeeze(-1)
    outcome = Outcome(summary.loss, token_losses)
    grown = [0.0] * dist.get_world_size()
    dist.all_gather_object(grown, (_peak(trainer.parts.device) - before) / _GIB)
    outcome.peak_gib = grown
    for name, parameter in trainer.parts.model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        if dist.get_rank() == 0:
            outcome.gradients[name] = whole.detach().cpu().clone()
    return outcome


def _in_order(trainer: Trainer, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of all tokens [B, S, N] in order, from those of this rank [B / dp, n, N]; on rank 0's CPU."""
    dims = trainer.dims
    if dims.cp > 1:
        (rows,) = cp_unshard(dims.cp_mesh, [rows], batch.masks, load_balancer=trainer.options.load_balancer)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, rows.cpu() if dims.cp_rank == 0 else None)
    return torch.cat([part for part in everyones if part is not None])


@dataclass(frozen=True)
class Counts:
    """What one step did, of every rank."""

    sent: list[int]  # bytes to other ranks, for attention
    planned: list[int]  # what they should be
    work: list[int]  # query-key pairs


def _counts(config: JobConfig, args: ModelArgs, trainer: Trainer, raw: Microbatch) -> Counts:
    trainer.parts.model.zero_grad()
    batch = trainer.post_dataloading_process(raw)
    with count_traffic() as traffic:
        loss = trainer.parts.runner.forward(batch)
        loss.total.backward()
    with torch.no_grad(), count_attention_work() as work:
        trainer.parts.runner.forward(batch)
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (traffic.bytes, _planned_bytes(config, args, trainer, batch), work.pairs))
    return Counts(*([row[column] for row in rows] for column in range(3)))


def _single_model(config: JobConfig, job: Job) -> Decoder:
    """Return the model without any parallelism: drawn in the stored dtype, then cast to the one it computes in."""
    spec = get_spec(config.model.name)
    with torch.device(job.device):
        model = spec.build(job.args, config.model.attn_type).to(DTYPES[config.training.dtype])
    initialise(model, spec.init_rules(job.args), config.debug.seed)
    return model.to(DTYPES[config.training.mixed_precision_param])


def _single_batch(model: Decoder, whole: dict[str, torch.Tensor], device: torch.device) -> Batch:
    masks = model.get_attention_masks(whole.get("document_starts"), whole["positions"])
    inputs, labels, positions = (whole[name].to(device) for name in ("input", "labels", "positions"))
    return Batch(inputs, labels, positions, None if masks is None else masks.to(device))


def _single_outcome(model: Decoder, whole: dict[str, torch.Tensor], config: JobConfig, job: Job) -> Outcome:
    before = _peak(job.device)
    batch = _single_batch(model, whole, job.device)
    valid_tokens = max(1, int((batch.labels >= 0).sum()))
    runner = SingleStageRunner(model, ChunkedCrossEntropy(config.training.loss_chunk_tokens))
    loss = runner.forward_backward(batch, valid_tokens)
    mean = mean_loss(loss.row().unsqueeze(0).cpu(), valid_tokens)
    outcome = Outcome(mean, loss.token_losses.view(batch.labels.shape).cpu())
    outcome.peak_gib = [(_peak(job.device) - before) / _GIB]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        outcome.gradients[name] = parameter.grad.detach().cpu()
    return outcome


def _report(
    config: JobConfig,
    args: ModelArgs,
    trainer: Trainer,
    whole: dict[str, torch.Tensor],
    split: Outcome,
    single: Outcome,
    counts: Counts | None,
) -> str:
    """Print the comparison; returns the first thing that is off, empty for none."""
    allowed, problems = _tolerances(config), []
    dims = trainer.dims
    print(
        f"verify: {config.model.name} {config.model.flavor}, seq_len {config.training.seq_len}, "
        f"dp_shard {dims.dp_shard} x cp {dims.cp} (ulysses {dims.ulysses}), against one process"
    )
    difference = abs(split.loss - single.loss) / (abs(single.loss) or 1.0)
    print(
        f"  loss           {split.loss!r}, one process {single.loss!r}: {difference:.1e} (allowed {allowed.loss:.0e})"
    )
    if not difference <= allowed.loss:
        problems.append(f"the loss is off by {difference:.1e}")
    problems += _report_tokens(split, single, trainer, whole, allowed)
    problems += _report_gradients(split, single, allowed)
    if counts is None:
        print("  bytes, work    not counted: the model is compiled")
    else:
        problems += _report_counts(args.num_layers, counts)
    peaks = " ".join(f"{peak:.2f}" for peak in split.peak_gib)
    print(f"  extra memory   {peaks} GiB per rank for the step; {single.peak_gib[0]:.2f} in one process")
    return problems[0] if problems else ""


def _report_tokens(
    split: Outcome, single: Outcome, trainer: Trainer, whole: dict[str, torch.Tensor], allowed: Tolerances
) -> list[str]:
    if torch.equal(split.token_losses, single.token_losses):
        print("  token losses   bitwise equal")
        return []
    distance = (split.token_losses - single.token_losses).abs()
    sequence, token = divmod(int(distance.argmax()), distance.size(1))
    largest = float(distance.max()) / (float(single.token_losses.abs().max()) or 1.0)
    where = f"sequence {sequence}, token {token}, on rank {_owner(trainer, whole, sequence, token)}"
    count = int((distance > 0).sum())
    print(f"  token losses   {count} of {distance.numel()} have other bits; largest {largest:.1e}, at {where}")
    if largest <= max(allowed.loss, allowed.gradient):
        return []
    return [f"a token's loss is off by {largest:.1e}, at {where}"]


def _report_gradients(split: Outcome, single: Outcome, allowed: Tolerances) -> list[str]:
    least = _SMALLEST_SCALE * max(float(gradient.abs().max()) for gradient in single.gradients.values())
    errors = {name: _error(split.gradients[name], gradient, least) for name, gradient in single.gradients.items()}
    worst = sorted(errors.items(), key=lambda item: -item[1] if item[1] == item[1] else float("-inf"))[:_WORST]
    print(f"  gradients      of {len(errors)} parameters, the worst (allowed {allowed.gradient:.0e}):")
    for name, error in worst:
        print(f"                 {error:.1e}  {name}")
    name, error = worst[0]
    return [] if error <= allowed.gradient else [f"the gradient of {name} is off by {error:.1e}"]


def _report_counts(layers: int, counts: Counts) -> list[str]:
    sent, planned = (" ".join(f"{number / layers:,.0f}" for number in row) for row in (counts.sent, counts.planned))
    print(f"  bytes sent     {sent} per layer, by rank; planned {'the same' if sent == planned else planned}")
    whole = sum(counts.work)
    shares = " ".join(f"{work * len(counts.work) / whole:.3f}" for work in counts.work)
    print(f"  attention work {shares} of an equal share, by rank")
    return [] if counts.sent == counts.planned else [f"attention sent {sent} bytes per layer, not {planned}"]


def _planned_bytes(config: JobConfig, args: ModelArgs, trainer: Trainer, batch: Batch) -> int:
    """Return what this rank must send for attention in a step; where a layer is recomputed, its forward sends twice.

    By the closed form for plain causal masks, else by the tables of the batch's own.
    """
    mode = config.activation_checkpoint
    every = {"none": 0, "full": 1}.get(mode.mode, 0)
    if mode.mode == "selective" and mode.selective_ac_option != "op":
        every = int(mode.selective_ac_option)
    total = 0
    for layer, kind in enumerate(args.layer_kinds):
        forward, backward = _layer_bytes(
            config, args, trainer, None if batch.masks is None else batch.masks.layers[kind]
        )
        total += forward * (2 if every and layer % every == 0 else 1) + backward
    return total


def _layer_bytes(config: JobConfig, args: ModelArgs, trainer: Trainer, mask: LayerMask | None) -> tuple[int, int]:
    compute, dims = DTYPES[config.training.mixed_precision_param], trainer.dims
    shape = AttentionShape(
        config.training.local_batch_size,
        config.training.seq_len,
        args.num_heads,
        args.num_kv_heads,
        args.width_per_head,
        compute.itemsize,
        max(4, compute.itemsize),
    )
    method = "gather" if mask is not None else cp_choice(config, args, trainer.parts.device).method
    return sent_bytes(
        shape,
        method=method,
        degree=dims.cp,
        ulysses_degree=dims.ulysses,
        keep_gathered=config.parallelism.context_parallel_keep_gathered,
        load_balancer=trainer.options.load_balancer,
        rank=dims.cp_rank,
        tokens=None if mask is None or not mask.counts.numel() else tuple(mask.counts.sum(1).tolist()),
    )


def _find_divergence(
    trainer: Trainer,
    raw: Microbatch,
    whole: dict[str, torch.Tensor],
    model: Decoder | None,
    allowed: Tolerances,
    waiting: dist.ProcessGroup,
) -> str:
    """Return where the two forwards part: the first module, token and rank; on rank 0."""
    batch = trainer.post_dataloading_process(raw)
    with torch.no_grad(), FingerprintRecorder(trainer.parts.model) as recorder:
        trainer.parts.runner.forward(batch)
    split = fingerprints(recorder.names, _in_order(trainer, batch, recorder.rows()))
    found = other_bits = None
    if model is not None:
        single_batch = _single_batch(model, whole, trainer.parts.device)
        with torch.no_grad(), FingerprintRecorder(model) as single_recorder:
            model(single_batch.inputs, single_batch.positions, single_batch.masks)
        single = fingerprints(single_recorder.names, single_recorder.rows())
        shared = [name for name in split.names if name in set(single.names)]
        split, single = _only(split, shared), _only(single, shared)
        found = split.first_divergence(single, max(allowed.loss, allowed.gradient))
        other_bits = split.first_other_bits(single)
    dist.barrier(waiting)
    if found is None:
        return "; every module's output agrees, so it lies in the labels, the loss or the backward"
    name, sequence, token = found
    owner = _owner(trainer, whole, sequence, token)
    text = f"; the first module that differs is {name}, at sequence {sequence}, token {token}, on rank {owner}"
    return text if other_bits == found or other_bits is None else f"{text} (in bits alone it is {other_bits[0]})"


def _only(prints: Fingerprints, names: list[str]) -> Fingerprints:
    columns = [prints.names.index(name) for name in names]
    return Fingerprints(
        names, prints.projections[..., columns], prints.norms[..., columns], prints.hashes[..., columns]
    )


def _owner(trainer: Trainer, whole: dict[str, torch.Tensor], sequence: int, token: int) -> int:
    """Return the rank that holds a token of the whole batch; without communication."""
    dims, options = trainer.dims, trainer.options
    rows = options.global_batch_size // options.num_microbatches // dims.dp_shard
    dp_rank, row = divmod(sequence, rows)
    own = {name: tensor[dp_rank * rows : (dp_rank + 1) * rows] for name, tensor in whole.items()}
    planner = MaskPlanner(trainer.parts.model.layer_kinds, dims.cp // dims.ulysses, 0, options.load_balancer)
    masks: AttentionMasks | None = planner(own).get("masks") if dims.cp > dims.ulysses else None
    cp_rank = cp_rank_of(token, options.seq_len, dims.cp_mesh, masks, load_balancer=options.load_balancer, row=row)
    return dp_rank * dims.cp + cp_rank


def _broadcast(text: str, waiting: dist.ProcessGroup) -> str:
    box = [text]
    dist.broadcast_object_list(box, group=waiting)
    return box[0]


def _error(actual: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """Return max|a - b| / max|b|, with `least` for a smaller denominator."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).abs().max()) / (max(float(expected.abs().max()), least) or 1.0)


def _peak(device: torch.device) -> int:
    """Return this process's largest memory so far, in bytes."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
