"""Each token once, whatever the number of ranks and workers; going on exactly where a run was stopped."""

import json
import os
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.data.conftest import CountingTokenizer
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.data.loader import Microbatch, TrainLoader, build_dataloader, shift
from torchtitan.errors import ConfigError, DataError

# Python 3.12 and later warn at every fork of a process with threads, and torch has some.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

# Five rows, so that an epoch (139 tokens) ends within a few windows.
ROWS = ["a" * 30, "b" * 7, "c" * 50, "d", "e" * 41]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a file of five rows."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
    return file


@pytest.fixture
def options(data: Path, byte_tokenizer: CountingTokenizer, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of a loader in one process."""
    return {
        "dataset": "local",
        "dataset_path": str(data),
        "text_field": "text",
        "tokenizer": byte_tokenizer,
        "seq_len": 16,
        "local_batch_size": 2,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_degree": 1,
        "seed": 3,
        "num_workers": 0,
        "cache_folder": tmp_path / "cache",
        "build_cache": True,
        "barrier": lambda: None,
    }


def take(loader: TrainLoader, count: int) -> list[Microbatch]:
    """Return the next microbatches."""
    return list(islice(loader, count))


def windows(microbatches: list[Microbatch]) -> list[list[int]]:
    """Return the rows of some microbatches, each with its last label."""
    return [
        [*inputs.tolist(), int(labels[-1])]
        for microbatch in microbatches
        for inputs, labels in zip(microbatch["input"], microbatch["labels"], strict=True)
    ]


def test_labels_are_the_next_tokens() -> None:
    microbatch = shift(torch.arange(9)[None].numpy())
    assert microbatch["input"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert microbatch["labels"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert microbatch["positions"].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_dtypes_and_shapes(options: dict[str, Any]) -> None:
    (microbatch,) = take(build_dataloader(**options), 1)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in microbatch.items()} == {
        "input": (torch.int64, (2, 16)),
        "labels": (torch.int64, (2, 16)),
        "positions": (torch.int32, (2, 16)),
    }


def test_each_token_is_a_label_once_per_epoch(options: dict[str, Any]) -> None:
    """8 epochs of 139 tokens are 1,112 labels, 69.5 windows: over 70 windows every row's letters come 8 times, or 9."""
    labels = torch.cat([microbatch["labels"] for microbatch in take(build_dataloader(**options), 35)]).flatten()
    for row in ROWS:
        assert 8 * len(row) <= int((labels == ord(row[0])).sum()) < 9 * len(row)


@pytest.mark.parametrize("dp_degree", [2, 4])
def test_the_global_batch_does_not_depend_on_the_ranks(options: dict[str, Any], dp_degree: int) -> None:
    """5 steps of 8 windows: microbatch by microbatch the ranks' windows are the one rank's, in order."""
    alone = windows(take(build_dataloader(**options), 20))
    num_microbatches = 20 // dp_degree
    ranks = [
        take(build_dataloader(**{**options, "dp_rank": rank, "dp_degree": dp_degree}), num_microbatches)
        for rank in range(dp_degree)
    ]
    together = [rank[microbatch] for microbatch in range(num_microbatches) for rank in ranks]
    assert windows(together) == alone


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(options: dict[str, Any], num_workers: int) -> None:
    loader = build_dataloader(**{**options, "num_workers": num_workers})
    assert windows(take(loader, 20)) == windows(take(build_dataloader(**options), 20))
    assert loader.state_dict()["windows"] == 40, "what workers prepared ahead does not count"


@pytest.mark.parametrize("num_consumed", [0, 1, 4, 5, 9])
def test_another_layout_goes_on_exactly(options: dict[str, Any], num_consumed: int) -> None:
    """Saved with one rank, also within an epoch and over its end (window 8); loaded with two ranks and a worker."""
    reference = windows(take(build_dataloader(**options), num_consumed + 8))[2 * num_consumed :]
    first = build_dataloader(**options)
    take(first, num_consumed)
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["windows"], state["epoch"]) == (2 * num_consumed, 2 * num_consumed * 16 // 139)
    ranks = []
    for rank, num_workers in ((0, 0), (1, 1)):
        loader = build_dataloader(**{**options, "dp_rank": rank, "dp_degree": 2, "num_workers": num_workers})
        loader.load_state_dict(state)
        ranks.append(take(loader, 4))
        assert loader.state_dict()["windows"] == 2 * num_consumed + 16
    assert windows([rank[microbatch] for microbatch in range(4) for rank in ranks]) == reference


def test_iterating_again_goes_on(options: dict[str, Any]) -> None:
    loader = build_dataloader(**options)
    assert windows(take(loader, 3) + take(loader, 3)) == windows(take(build_dataloader(**options), 6))


def test_the_seed_decides_the_order(options: dict[str, Any]) -> None:
    first = windows(take(build_dataloader(**options), 5))
    assert windows(take(build_dataloader(**options), 5)) == first
    assert windows(take(build_dataloader(**{**options, "seed": 4}), 5)) != first


def test_a_position_in_other_data_is_refused(options: dict[str, Any], data: Path) -> None:
    loader = build_dataloader(**options)
    start = loader.state_dict()
    take(loader, 2)
    state = loader.state_dict()
    with pytest.raises(
        ConfigError, match=r"^--training.seq_len=8: the checkpoint was made with 16; .*window 4 .*give 16"
    ):
        build_dataloader(**{**options, "seq_len": 8}).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^--debug.seed=4: the checkpoint was made with 3; "):
        build_dataloader(**{**options, "seed": 4}).load_state_dict(state)
    data.write_text(data.read_text().replace("d", "x"))
    changed = build_dataloader(**options)
    old, new = state["data_fingerprint"][:16], changed.state_dict()["data_fingerprint"][:16]
    with pytest.raises(DataError, match=f"data have fingerprint {new}, those of the checkpoint {old}"):
        changed.load_state_dict(state)
    changed.load_state_dict(start)  # a seed checkpoint: nothing was read, so nothing can be missed
    assert changed.state_dict()["windows"] == 0


def test_the_runs_random_numbers_are_left_alone(options: dict[str, Any]) -> None:
    before = torch.get_rng_state()
    take(build_dataloader(**options), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_outlive_signals_to_all_processes(options: dict[str, Any]) -> None:
    """Ctrl-C and SLURM signal every process, but the rank ends its step and saves before it stops."""
    import multiprocessing

    loader = iter(build_dataloader(**{**options, "num_workers": 2}))
    first = [next(loader) for _ in range(4)]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGINT)  # type: ignore[arg-type]
        # From another process than the rank, which may end its workers.
        os.spawnlp(os.P_WAIT, "sh", "sh", "-c", f"kill -TERM {worker.pid}")
    time.sleep(0.2)
    rest = [next(loader) for _ in range(10)]
    assert windows(first + rest) == windows(take(build_dataloader(**options), 14))
    for worker in workers:
        worker.terminate()
        worker.join(10)
        assert worker.exitcode == 0
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(islice(loader, 20))


def test_the_standard_library_by_the_packaged_tokenizer(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What a first run does: tokenised once, and the text comes back."""
    options |= {"dataset": "python_stdlib", "dataset_path": "", "tokenizer": build_tokenizer(""), "seq_len": 2048}
    with caplog.at_level("INFO"):
        (microbatch,) = take(build_dataloader(**options), 1)
        build_dataloader(**options)
    assert caplog.text.count("Data: tokenised python_stdlib") == caplog.text.count("Data: reusing the tokens") == 1
    text = build_tokenizer("").decode(microbatch["input"][0].tolist())
    assert text.startswith("<|begin_of_text|>") and "import" in text
