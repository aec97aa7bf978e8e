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
from torchtitan.data.cache import TokenFile, open_or_build
from torchtitan.data.documents import HUB, find_documents
from torchtitan.data.microbatch import Collation, Microbatch, unchanged
from torchtitan.data.packing import BestFitWindows
from torchtitan.data.text import StreamWindows, Windows
from torchtitan.errors import DataError, option_error

logger = logging.getLogger(__name__)


class TrainLoader(Protocol):
    """Gives microbatches without end: input and labels int64 [B, S], labels shifted already; positions int32 [B, S].

    Where attention is confined to documents also document_starts int32 [B, S]: for every input, the index in its row of
    the first token there that is of its document. Positions count from a document's beginning then.
    """

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
    packing: str,
    document_masks: bool,
    context_length: int,
    restart_positions: bool,
    local_batch_size: int,
    global_batch_size: int,
    dp_rank: int,
    dp_degree: int,
    seed: int,
    num_workers: int,
    cache_folder: Path,
    build_cache: bool,
    barrier: Callable[[], None],
    prepare: Callable[[Microbatch], Microbatch] = unchanged,
) -> TrainLoader:
    """Return the loader of one dp rank; collective, as local data passes `barrier` once.

    `build_cache` is true on one rank of those that share `cache_folder`: it tokenises local data, the others wait.
    `packing` is "stream" or "best_fit". With `document_masks`, `restart_positions` says what becomes of documents that
    are longer than the model's context. `prepare` gets each microbatch where it is made, in a worker if there are any.

    Raises:
        ConfigError: on every rank alike: there is no such data, or it cannot be packed so.
        DataError: on every rank alike: its files are unusable, a document is longer than the model's context, or the
            hub cannot be reached.
    """
    collation = Collation(document_masks, context_length, restart_positions, prepare)
    if dataset == HUB:
        from torchtitan.data.stream import StreamLoader, open_c4

        _check_packing_of_hub(packing)
        return StreamLoader(
            open_c4, HUB, text_field, tokenizer, seq_len, collation, local_batch_size, dp_rank, dp_degree, num_workers
        )
    documents = find_documents(dataset, dataset_path, text_field)
    token_file = open_or_build(documents, tokenizer, cache_folder, build=build_cache, barrier=barrier)
    windows = _build_windows(packing, token_file, seq_len, seed, tokenizer.eos_id)
    longest = int(np.diff(token_file.offsets).max())
    collation.check_document(f"the longest document of {documents.name}", longest, windows.max_position)
    logger.info(
        "Data: %s, %d documents, %d tokens; an epoch is %.1f steps of %d windows of %d tokens",
        documents.name,
        token_file.num_documents,
        len(token_file.tokens),
        windows.windows_per_epoch / global_batch_size,
        global_batch_size,
        seq_len,
    )
    return WindowLoader(windows, collation, local_batch_size, dp_rank, dp_degree, num_workers)


def _check_packing_of_hub(packing: str) -> None:
    if packing != StreamWindows.packing:
        raise option_error(
            "training.packing",
            packing,
            f"{HUB} is streamed, and its documents are joined as they come",
            "this packing sorts all documents of an epoch by length",
            f"give {StreamWindows.packing}, or download the data and train on the files by --training.dataset_path",
        )


def _build_windows(packing: str, token_file: TokenFile, seq_len: int, seed: int, pad_id: int) -> Windows:
    if packing == StreamWindows.packing:
        return StreamWindows(token_file, seq_len, seed)
    windows = BestFitWindows(token_file, seq_len, seed, pad_id)
    message = "Data: packing by best fit: %d windows an epoch, %.2f %% of their tokens are padding"
    logger.info(message, windows.windows_per_epoch, 100 * windows.padding_share)
    return windows


class WindowLoader:
    """Reads windows by index; its state is of the whole run, so any number of ranks and workers can go on from it.

    Microbatch m of rank r has windows base + m * dp_degree * B + r * B + [0, B): a global batch is one run of windows.
    """

    def __init__(
        self,
        windows: Windows,
        collation: Collation,
        local_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        num_workers: int,
    ) -> None:
        self.windows = windows
        self.collation = collation
        self.local_batch_size = local_batch_size
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.num_workers = num_workers
        self.windows_consumed = 0  # by all ranks together

    def __iter__(self) -> Iterator[Microbatch]:
        per_microbatch = self.local_batch_size * self.dp_degree
        starts = _Starts(self.windows_consumed + self.dp_rank * self.local_batch_size, per_microbatch)
        dataset = _Microbatches(self.windows, self.collation, self.local_batch_size)
        for microbatch in build_stateful_loader(dataset, self.num_workers, sampler=starts):
            self.windows_consumed += per_microbatch
            yield microbatch

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the same on every rank.

        Loading a checkpoint fills a new loader's state with the keys that it holds. One from when streams were the only
        packing holds no packing: it is a stream then, whatever this run's is, which means nothing at position 0 anyway.
        """
        return {
            "epoch": self.windows.epoch_of(self.windows_consumed),
            "windows": self.windows_consumed,
            "seq_len": self.windows.seq_len,
            "seed": self.windows.seed,
            "packing": self.windows.packing if self.windows_consumed > 0 else StreamWindows.packing,
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
        windows = self.windows
        saved = {"packing": StreamWindows.packing, **saved}  # it was the only one once
        flags = {"training.seq_len": windows.seq_len, "debug.seed": windows.seed, "training.packing": windows.packing}
        for flag, given in flags.items():
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

    def __init__(self, windows: Windows, collation: Collation, local_batch_size: int) -> None:
        self.windows = windows
        self.collation = collation
        self.local_batch_size = local_batch_size

    def __getitem__(self, start: int) -> Microbatch:
        indices = range(start, start + self.local_batch_size)
        return self.collation.collate([self.windows[index] for index in indices])


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
