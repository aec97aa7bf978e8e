"""Data of the Hugging Face hub, streamed: split by document over the dp ranks, tokenised and joined on the fly."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset

from torchtitan.components.tokenizer import Tokenizer
from torchtitan.data.loader import build_stateful_loader
from torchtitan.data.microbatch import Collation, Microbatch
from torchtitan.data.text import cut_window
from torchtitan.errors import ConfigError, DataError, option_error

if TYPE_CHECKING:
    import datasets

OpenStream = Callable[[], "datasets.IterableDataset"]


def open_c4() -> "datasets.IterableDataset":
    """Return the English part of C4, streamed."""
    import datasets

    return datasets.load_dataset("allenai/c4", "en", split="train", streaming=True)


class StreamLoader:
    """Streams the documents of one dp rank; its state is this rank's and fits no other number of ranks or workers."""

    def __init__(
        self,
        open_stream: OpenStream,
        name: str,
        text_field: str,
        tokenizer: Tokenizer,
        seq_len: int,
        collation: Collation,
        local_batch_size: int,
        dp_rank: int,
        dp_degree: int,
        num_workers: int,
    ) -> None:
        open_pass = _split(open_stream, name, dp_rank, dp_degree)
        _check_workers(num_workers, open_pass().num_shards, name, dp_rank)
        self._microbatches = _StreamedMicrobatches(
            open_pass, name, text_field, tokenizer, seq_len, collation, local_batch_size
        )
        self._loader = build_stateful_loader(self._microbatches, num_workers, sampler=None)
        self._layout = {"dp_degree": dp_degree, "num_workers": num_workers}
        self._tokenizer = tokenizer.fingerprint
        self._key = f"dp_rank_{dp_rank}"

    def __iter__(self) -> Iterator[Microbatch]:
        for item in self._loader:
            if isinstance(item, DataError):  # raised in a worker, it would come with the worker's traceback
                raise item
            yield item

    def state_dict(self) -> dict[str, Any]:
        """Return the layout, and this rank's position under a key of its own."""
        return {**self._layout, "tokenizer": self._tokenizer, self._key: json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position.

        Raises:
            ConfigError: it was saved with another number of dp ranks or workers, or another tokenizer.
        """
        _check_layout(state_dict, self._layout)
        if state_dict["tokenizer"] != self._tokenizer:
            raise ConfigError("the checkpoint's tokenizer is another one; give the same by --model.tokenizer_path")
        self._loader.load_state_dict(json.loads(state_dict[self._key]))


class _StreamedMicrobatches(IterableDataset[Microbatch | DataError]):
    """Joins documents, each BOS + text + EOS, and cuts windows of S from them; passes over the stream without end."""

    def __init__(
        self,
        open_pass: OpenStream,
        name: str,
        text_field: str,
        tokenizer: Tokenizer,
        seq_len: int,
        collation: Collation,
        local_batch_size: int,
    ) -> None:
        self._open_pass = open_pass
        self._stream = open_pass()
        self._name = name
        self._text_field = text_field
        self._tokenizer = tokenizer
        self._collation = collation
        self._shape = (local_batch_size, seq_len)
        self._num_documents = 0  # read since the start of this process
        self._rest: list[int] = []  # tokens that are in no window yet, but for the first
        self._rest_offsets: list[int] = []  # the place of each in its document

    def __iter__(self) -> Iterator[Microbatch | DataError]:
        idle_passes = 0  # one is right where a state is loaded that was saved behind a pass's last document
        try:
            while idle_passes < 2:
                before = self._num_documents
                yield from self._one_pass()
                idle_passes = idle_passes + 1 if self._num_documents == before else 0
                # A new one, as a stream whose state was loaded begins every pass at that state. set_epoch would end
                # that too, but for all workers together: they share it, and each of them is in a pass of its own.
                self._stream = self._open_pass()
            raise DataError(f"{self._name}: this rank's part of the stream has no document")
        except DataError as error:
            yield error

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last microbatch."""
        # A copy: torchdata sends a worker's state later, and only what differs from the state before.
        state = {"stream": self._stream.state_dict(), "rest": list(self._rest)}
        # Behind a microbatch the rest is of one document, so where its first token lies says all.
        return state | {"rest_offset": self._rest_offsets[0] if self._rest else 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the position."""
        self._rest = list(state_dict["rest"])
        first = state_dict.get("rest_offset", 0)  # absent where positions never counted from a document's beginning
        self._rest_offsets = list(range(first, first + len(self._rest)))
        self._stream = self._open_pass()
        self._stream.load_state_dict(state_dict["stream"])

    def _one_pass(self) -> Iterator[Microbatch]:
        batch_size, seq_len = self._shape
        for text in self._texts():
            self._num_documents += 1
            ids = [self._tokenizer.bos_id, *self._tokenizer.encode(text), self._tokenizer.eos_id]
            self._collation.check_document(f"a document of {self._name}", len(ids), len(ids) - 1)
            self._rest += ids
            self._rest_offsets += range(len(ids))
            while len(self._rest) > batch_size * seq_len:
                yield self._take_microbatch()

    def _take_microbatch(self) -> Microbatch:
        batch_size, seq_len = self._shape
        num_labels = batch_size * seq_len
        tokens = np.asarray(self._rest[: num_labels + 1], np.int64)
        offsets = np.asarray(self._rest_offsets[: num_labels + 1], np.int64)
        del self._rest[:num_labels], self._rest_offsets[:num_labels]
        rows = [slice(start, start + seq_len + 1) for start in range(0, num_labels, seq_len)]
        return self._collation.collate([cut_window(tokens[row], offsets[row]) for row in rows])

    def _texts(self) -> Iterator[str]:
        """Yield the texts of one pass, failures of the network and of the format as DataErrors."""
        rows = iter(self._stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # the hub's client, fsspec and the readers each raise their own
                raise _stream_error(self._name, error) from error
            if not isinstance(row.get(self._text_field), str):
                raise DataError(
                    f"{self._name}: no field {self._text_field!r} with text; the fields are: {', '.join(row)}; "
                    "choose one by --training.dataset_text_field"
                )
            yield row[self._text_field]


def _split(open_stream: OpenStream, name: str, dp_rank: int, dp_degree: int) -> OpenStream:
    """Return a function that gives a rank's part of the stream, from its beginning."""
    from datasets.distributed import split_dataset_by_node

    try:
        whole = open_stream()
    except Exception as error:  # as above: no common base
        raise _stream_error(name, error) from error
    return partial(split_dataset_by_node, whole, rank=dp_rank, world_size=dp_degree)


def _stream_error(name: str, error: Exception) -> DataError:
    return DataError(
        f"--training.dataset={name}: cannot be streamed from the Hugging Face hub: {type(error).__name__}: {error}; "
        "check the network and HF_HUB_OFFLINE, or train on files of your own by --training.dataset_path"
    )


def _check_workers(num_workers: int, num_shards: int, name: str, dp_rank: int) -> None:
    if num_workers > num_shards:
        fact = f"{name} has {num_shards} shards for dp rank {dp_rank}"
        raise option_error(
            "training.num_workers", num_workers, fact, "each worker needs a shard", f"give {num_shards} or less"
        )


def _check_layout(saved: dict[str, Any], now: dict[str, int]) -> None:
    flags = {"dp_degree": "parallelism.data_parallel_shard_degree", "num_workers": "training.num_workers"}
    for name, flag in flags.items():
        if saved[name] != now[name]:
            fact = f"the checkpoint was made with {name} {saved[name]}, this run has {now[name]}"
            rule = "streamed data goes on in the layout that it was saved in only"
            raise option_error(flag, now[name], fact, rule, f"give {saved[name]}")
