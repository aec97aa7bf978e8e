"""Microbatches of a data-parallel rank, and the position in the data that a checkpoint keeps.

Letters: B batch, S sequence.
"""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan.components.tokenizer import Tokenizer
from torchtitan.data.cache import open_or_build
from torchtitan.data.documents import HUB, find_documents
from torchtitan.data.text import Windows
from torchtitan.errors import DataError, option_error

logger = logging.getLogger(__name__)

Microbatch = dict[str, torch.Tensor]


class TrainLoader(Protocol):
    """Gives microbatches without end: input and labels int64 [B, S], labels shifted already; positions int32 [B, S]."""

    def __iter__(self) -> Iterator[Microbatch]:
        """Go on from the present position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last microbatch that was handed out, whatever workers prepared."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position for the next call of iter."""


def build_dataloader(
    *,
    dataset: str,
    dataset_path: str,
    text_field: str,
    tokenizer: Tokenizer,
    seq_len: int,
    local_batch_size: int,
    global_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    seed: int,
    num_workers: int,
    cache_folder: Path,
    build_cache: bool,
    barrier: Callable[[], None],
) -> TrainLoader:
    """Return the loader of one dp rank; collective, as local data passes `barrier` once.

    `build_cache` is true on one rank of those that share `cache_folder`: it tokenises local data, the others wait.

    Raises:
        ConfigError: on every rank alike: there is no such data.
        DataError: on every rank alike: its files are unusable, or the hub cannot be reached.
    """
    if dataset == HUB:
        from torchtitan.data.stream import StreamLoader, open_c4

        return StreamLoader(
            open_c4, HUB, text_field, tokenizer, seq_len, local_batch_size, dp_rank, dp_degree, num_workers
        )
    documents = find_documents(dataset, dataset_path, text_field)
    token_file = open_or_build(documents, tokenizer, cache_folder, build=build_cache, barrier=barrier)
    windows = Windows(token_file, seq_len, seed)
    logger.info(
        "Data: %s, %d documents, %d tokens; an epoch is %.1f steps of %d windows of %d tokens",
        documents.name,
        token_file.num_documents,
        windows.tokens_per_epoch,
        windows.tokens_per_epoch / seq_len / global_batch_size,
        global_batch_size,
        seq_len,
    )
    return WindowLoader(windows, local_batch_size, dp_rank, dp_degree, num_workers)


class WindowLoader:
    """Reads windows by index; its state is of the whole run, so any number of ranks and workers can go on from it.

    Microbatch m of rank r has windows base + m * dp_degree * B + r * B + [0, B): a global batch is one run of windows.
    """

    def __init__(self, windows: Windows, local_batch_size: int, dp_rank: int, dp_degree: int, num_workers: int) -> None:
        self.windows = windows
        self.local_batch_size = local_batch_size
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.num_workers = num_workers
        self.windows_consumed = 0  # by all ranks together

    def __iter__(self) -> Iterator[Microbatch]:
        per_microbatch = self.local_batch_size * self.dp_degree
        starts = _Starts(self.windows_consumed + self.dp_rank * self.local_batch_size, per_microbatch)
        dataset = _Microbatches(self.windows, self.local_batch_size)
        for microbatch in build_stateful_loader(dataset, self.num_workers, sampler=starts):
            self.windows_consumed += per_microbatch
            yield microbatch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank."""
        return {
            "epoch": self.windows.epoch_of(self.windows_consumed),
            "windows": self.windows_consumed,
            "seq_len": self.windows.seq_len,
            "seed": self.windows.seed,
            "data_fingerprint": self.windows.token_file.fingerprint,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position.

        Raises:
            ConfigError: it counts windows of another sequence of tokens, so going on would repeat some and miss others.
        """
        if state_dict["windows"] > 0:  # position 0 is the beginning of any data
            self._check_same_stream(state_dict)
        self.windows_consumed = int(state_dict["windows"])

    def _check_same_stream(self, saved: dict[str, Any]) -> None:
        rule = f"the checkpoint stands at window {saved['windows']} of that order, which means nothing in another"
        remedy = "or take the weights alone by --checkpoint.initial_load_path"
        for flag, given in (("training.seq_len", self.windows.seq_len), ("debug.seed", self.windows.seed)):
            then = saved[flag.split(".")[1]]
            if then != given:
                raise option_error(flag, given, f"the checkpoint was made with {then}", rule, f"give {then}, {remedy}")
        then, now = saved["data_fingerprint"], self.windows.token_file.fingerprint
        if then != now:
            raise DataError(
                f"the training data have fingerprint {now[:16]}, those of the checkpoint {then[:16]}: other files, "
                f"another Python's standard library, or another tokenizer; {rule}; bring the data back, {remedy}"
            )


class _Microbatches(Dataset[Microbatch]):
    """Microbatches by the index of their first window."""

    def __init__(self, windows: Windows, local_batch_size: int) -> None:
        self.windows = windows
        self.local_batch_size = local_batch_size

    def __getitem__(self, start: int) -> Microbatch:
        indices = range(start, start + self.local_batch_size)
        return shift(np.stack([self.windows[index] for index in indices]))


class _Starts(Sampler[int]):
    """The first window of each microbatch of a rank, without end."""

    def __init__(self, first: int, step: int) -> None:
        self.first = first
        self.step = step

    def __iter__(self) -> Iterator[int]:
        start = self.first
        while True:
            yield start
            start += self.step


def shift(windows: np.ndarray) -> Microbatch:
    """Return inputs, labels and positions of windows int64 [B, S + 1]: the label of token i is token i + 1."""
    tokens = torch.from_numpy(windows)
    # Copies: of a single row both slices are contiguous, and masking a label in place would change the inputs.
    inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    positions = torch.arange(inputs.size(1), dtype=torch.int32).expand_as(inputs).contiguous()
    return {"input": inputs, "labels": labels, "positions": positions}


def build_stateful_loader(dataset: Dataset[Any], num_workers: int, sampler: Sampler[int] | None) -> StatefulDataLoader:
    """Return torchdata's loader of a data set whose items are microbatches already."""
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.11 and later call deprecated.
        warnings.filterwarnings("ignore", message=".*set_vital", category=Warning)
        return StatefulDataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=num_workers,
            generator=torch.Generator(),  # its seed for workers is not to be drawn from the run's own generator
            worker_init_fn=_heed_own_rank_only,
        )


def _heed_own_rank_only(worker: int) -> None:
    """Let a worker outlive a signal to all processes, as Ctrl-C and SLURM send it: its rank wants to end the step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_exit_on_rank_wish, daemon=True).start()


def _exit_on_rank_wish() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
