"""The training loop. Letters: B batch, S sequence."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtitan.attention.masks import AttentionMasks
from torchtitan.batch import IGNORED_LABEL, Batch, CPLayout
from torchtitan.components.checkpoint import Checkpointer
from torchtitan.components.loss import LossSum, mean_loss
from torchtitan.components.metrics import MetricsLogger
from torchtitan.data.loader import Microbatch, TrainLoader
from torchtitan.distributed.collectives import all_gather_rows, all_reduce_sum
from torchtitan.distributed.context_parallel import cp_shard
from torchtitan.distributed.grad_norm import clip_gradients, grad_norm, local_gradients
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.process_group import set_timeout
from torchtitan.errors import NonFiniteError, TitanError
from torchtitan.models.common.decoder import Decoder
from torchtitan.runner import SingleStageRunner
from torchtitan.tools.gc import ScheduledGC
from torchtitan.tools.profiling import Profiler
from torchtitan.tools.stop import StopSignal

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainerOptions:
    """The plain values that steer the loop."""

    steps: int
    seq_len: int
    global_batch_size: int
    num_microbatches: int  # per step and dp rank
    max_norm: float
    load_balancer: str
    check_same_data: bool  # at every step; else at the first of a run only
    init_timeout_s: int  # of collectives until the first step is done, and around checkpoints
    train_timeout_s: int
    create_seed_checkpoint: bool
    flops: Callable[[int, int], float]  # of a step, by its tokens and query-key pairs


@dataclass
class TrainerParts:
    """What `build` made; the trainer only brings the parts together."""

    model: Decoder
    runner: SingleStageRunner
    optimizer: Optimizer
    lr_scheduler: LambdaLR
    dataloader: TrainLoader
    checkpointer: Checkpointer
    metrics: MetricsLogger
    profiler: Profiler
    gc: ScheduledGC
    stop: StopSignal
    dims: ParallelDims
    device: torch.device
    options: TrainerOptions


@dataclass(frozen=True)
class StepSummary:
    """What all ranks know alike after the backward of a step."""

    loss: float  # mean over the step's valid tokens
    loss_max: float  # largest of the ranks' means
    stop: bool  # some rank was asked to stop
    pairs: int  # query-key pairs that the masks allow, of all sequences and layers
    attention_balance: float  # of these, the most of a rank over the mean
    kv_travelled: float | None  # share of other ranks' keys and values that travelled; None: not planned from masks


class Trainer:
    """Runs the steps; subclass it and pass the class to `torchtitan.train.main` to change one."""

    def __init__(self, parts: TrainerParts) -> None:
        self.parts = parts
        self.options = parts.options
        self.dims = parts.dims
        self.step = 0  # updates done
        self.tokens_seen = 0  # of all ranks, each token once
        self.first_step = True  # of this run
        parts.checkpointer.states["trainer"] = self

    def state_dict(self) -> dict[str, Any]:
        """Return the global counters."""
        return {"step": self.step, "tokens_seen": self.tokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the global counters."""
        self.step, self.tokens_seen = int(state["step"]), int(state["tokens_seen"])

    def train(self) -> None:
        """Run from the loaded step to the last, or to a stop signal."""
        self.parts.checkpointer.load()
        if self.options.create_seed_checkpoint:
            self.parts.checkpointer.save(0)
            return
        self.parts.metrics.truncate_after(self.step)
        microbatches = iter(self.parts.dataloader)
        stop = False
        while self.step < self.options.steps and not stop:
            stop = self.train_step(microbatches)
            self._after_step(last=stop or self.step == self.options.steps)
        if stop:
            logger.warning("Stopped after step %d of %d by a signal", self.step, self.options.steps)
        elif self.first_step:
            logger.warning("Nothing to do: step %d of %d is done already", self.step, self.options.steps)

    def close(self) -> None:
        """Flush reports and stop what runs beside the training."""
        self.parts.metrics.close()
        self.parts.profiler.close()
        self.parts.gc.close()

    def train_step(self, microbatches: Iterator[Microbatch]) -> bool:
        """Do one update; returns whether some rank wants to stop."""
        metrics, optimizer = self.parts.metrics, self.parts.optimizer
        metrics.start_step()
        with metrics.data_loading():
            raw = [next(microbatches) for _ in range(self.options.num_microbatches)]
        valid_tokens = self._count_valid_tokens(raw)
        optimizer.zero_grad()
        batches = [self.post_dataloading_process(microbatch) for microbatch in raw]
        losses = [self.parts.runner.forward_backward(batch, max(1, valid_tokens)) for batch in batches]
        gradients = local_gradients(self.parts.model.parameters())
        norm = grad_norm(gradients, self.dims.fsdp_mesh)
        summary = self._summarise(reduce(add, losses), batches, valid_tokens)
        self._check_finite(summary, norm)
        if self.options.max_norm > 0:
            clip_gradients(gradients, norm, self.options.max_norm)
        lr = float(self.parts.lr_scheduler.get_last_lr()[0])
        optimizer.step()
        self.parts.lr_scheduler.step()
        self._count(summary, norm, lr)
        return summary.stop

    def post_dataloading_process(self, microbatch: Microbatch) -> Batch:
        """Return the batch that the model gets: on the device, and this rank's tokens of each sequence.

        `microbatch` holds whole sequences, the same on all ranks of a cp group: input, labels (shifted) and positions,
        each [B, S], and masks where they are not plain causal.
        """
        device = self.parts.device
        masks: AttentionMasks | None = microbatch.get("masks")
        batch = Batch(
            microbatch["input"].to(device, non_blocking=True),
            microbatch["labels"].to(device, non_blocking=True),
            microbatch["positions"].to(device, non_blocking=True),
            None if masks is None else masks.to(device),
        )
        if self.dims.cp == 1:
            return batch
        if self.first_step or self.options.check_same_data:
            self._check_same_data(batch)
        balancer = self.options.load_balancer
        layout = CPLayout(self.dims.cp, balancer, batch.inputs.size(-1), self.dims.ulysses)
        whole = [batch.inputs, batch.labels, batch.positions]
        if batch.masks is None:
            return batch.cut(layout, cp_shard(self.dims.cp_mesh, whole, load_balancer=balancer))
        return batch.cut(layout, *cp_shard(self.dims.cp_mesh, whole, batch.masks, load_balancer=balancer))

    def _count_valid_tokens(self, raw: list[Microbatch]) -> int:
        local = sum(int((microbatch["labels"] != IGNORED_LABEL).sum()) for microbatch in raw)
        # Every rank of a cp group counted the same whole sequences.
        total = all_reduce_sum(local, self.dims.fsdp_mesh) // self.dims.cp
        if total == 0:
            logger.warning("Step %d has no valid token: its loss and gradients are 0", self.step + 1)
        return total

    def _check_same_data(self, batch: Batch) -> None:
        weights = torch.arange(1, batch.inputs.numel() + 1, device=batch.inputs.device)
        flat = [tensor.flatten().long() for tensor in (batch.inputs, batch.labels, batch.positions)]
        if batch.masks is not None:
            flat.append(batch.masks.document_starts.flatten().long().to(batch.inputs.device))
        digest = torch.stack([(part * weights).sum() for part in flat])
        first = self.dims.dp_rank * self.dims.cp
        ranks = range(first, first + self.dims.cp)  # of this rank's cp group
        rows = all_gather_rows(digest, self.dims.fsdp_mesh)[first : first + self.dims.cp]  # [cp, 3 or 4]
        different = [rank for rank, row in zip(ranks, rows, strict=True) if not torch.equal(row, rows[0])]
        if different:
            raise TitanError(
                f"step {self.step + 1}: ranks {ranks[0]} and {different[0]} are of one cp group but were fed different "
                "samples; the data loader must be keyed by the dp rank"
            )

    def _summarise(self, loss: LossSum, batches: list[Batch], valid_tokens: int) -> StepSummary:
        local_tokens = sum((batch.labels != IGNORED_LABEL).sum() for batch in batches)
        row = loss.row(local_tokens, bool(self.parts.stop), *self._attention_work(batches))
        rows = all_gather_rows(row, self.dims.fsdp_mesh)  # [ranks, 8]
        tokens, wishes, pairs, needed, remote = rows[:, 3:].unbind(1)
        means = [mean_loss(own.unsqueeze(0), int(count)) for own, count in zip(rows, tokens, strict=True) if count > 0]
        return StepSummary(
            loss=mean_loss(rows, max(1, valid_tokens)),
            loss_max=max(means, default=0.0),
            stop=bool(wishes.any()),
            pairs=int(pairs.sum()),
            attention_balance=float(pairs.max() / pairs.double().mean()),
            kv_travelled=float(needed.sum() / remote.sum()) if int(remote.sum()) else None,
        )

    def _attention_work(self, batches: list[Batch]) -> tuple[int, int, int]:
        """Return this rank's query-key pairs, and how many remote tokens it needs of how many, over all layers."""
        pairs = needed = remote = 0
        for batch in batches:
            if batch.masks is not None and batch.masks.work is not None:
                work = batch.masks.work
                rank = self.dims.cp_rank // self.dims.ulysses  # of the method; those of Ulysses share heads
                pairs += int(work.pairs[rank]) // self.dims.ulysses
                needed += int(work.needed[rank])
                remote += work.remote
            else:
                layout = batch.cp_layout or CPLayout(1, "none", batch.inputs.size(-1))
                layers = len(self.parts.model.layer_kinds)
                pairs += layers * batch.inputs.size(0) * layout.causal_pairs(self.dims.cp_rank)
        return pairs, needed, remote

    def _check_finite(self, summary: StepSummary, norm: float) -> None:
        for name, value in (("loss", summary.loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"step {self.step + 1}: the {name} is {value}; all ranks stop before the update, so the parameters "
                    f"are those after step {self.step}"
                )

    def _count(self, summary: StepSummary, norm: float, lr: float) -> None:
        tokens = self.options.global_batch_size * self.options.seq_len
        self.step += 1
        self.tokens_seen += tokens
        self.parts.metrics.log(
            self.step,
            loss=summary.loss,
            loss_max=summary.loss_max,
            grad_norm=norm,
            lr=lr,
            tokens=tokens,
            tokens_seen=self.tokens_seen,
            flops=self.options.flops(tokens, summary.pairs),
            attention_balance=summary.attention_balance,
            kv_travelled=summary.kv_travelled,
            last=summary.stop or self.step == self.options.steps,
        )

    def _after_step(self, *, last: bool) -> None:
        if self.first_step:
            self.first_step = False
            self._set_timeout(self.options.train_timeout_s)
        if self.parts.checkpointer.should_save(self.step, last=last):
            self._set_timeout(self.options.init_timeout_s)  # a slow disk on one rank is no hang
            self.parts.checkpointer.save(self.step)
            self._set_timeout(self.options.train_timeout_s)
        self.parts.gc.run(self.step)
        self.parts.profiler.step(self.step)

    def _set_timeout(self, seconds: int) -> None:
        set_timeout(seconds, self.dims.meshes())
