"""Each token once, whatever the number of ranks and workers; going on exactly where a run was stopped."""

import json
import os
import signal
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit_tests.data.conftest import CountingTokenizer
from torchtitan.batch import IGNORED_LABEL
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.data.loader import TrainLoader, build_dataloader
from torchtitan.data.microbatch import Microbatch
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
        "packing": "stream",
        "document_masks": False,
        "context_length": 64,
        "restart_positions": False,
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


@pytest.fixture(params=[("stream", False), ("stream", True), ("best_fit", True)])
def packed(request: pytest.FixtureRequest, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a loader in one process, for each packing."""
    packing, document_masks = request.param
    return {**options, "packing": packing, "document_masks": document_masks}


def take(loader: TrainLoader, count: int) -> list[Microbatch]:
    """Return the next microbatches."""
    return list(islice(loader, count))


def rows(microbatches: list[Microbatch]) -> list[dict[str, list[int]]]:
    """Return the rows of some microbatches, with all that is in them."""
    return [
        {name: tensor[row].tolist() for name, tensor in microbatch.items()}
        for microbatch in microbatches
        for row in range(len(microbatch["input"]))
    ]


@pytest.mark.parametrize("document_masks", [False, True])
def test_dtypes_and_shapes(options: dict[str, Any], document_masks: bool) -> None:
    (microbatch,) = take(build_dataloader(**{**options, "document_masks": document_masks}), 1)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in microbatch.items()} == {
        "input": (torch.int64, (2, 16)),
        "labels": (torch.int64, (2, 16)),
        "positions": (torch.int32, (2, 16)),
        **({"document_starts": (torch.int32, (2, 16))} if document_masks else {}),
    }


def test_each_token_is_a_label_once_per_epoch(options: dict[str, Any]) -> None:
    """8 epochs of 139 tokens are 1,112 labels, 69.5 windows: over 70 windows every row's letters come 8 times, or 9."""
    labels = torch.cat([microbatch["labels"] for microbatch in take(build_dataloader(**options), 35)]).flatten()
    for row in ROWS:
        assert 8 * len(row) <= int((labels == ord(row[0])).sum()) < 9 * len(row)


@pytest.mark.parametrize("dp_degree", [2, 4])
def test_the_global_batch_does_not_depend_on_the_ranks(packed: dict[str, Any], dp_degree: int) -> None:
    """5 steps of 8 windows: microbatch by microbatch the ranks' windows are the one rank's, in order."""
    alone = rows(take(build_dataloader(**packed), 20))
    num_microbatches = 20 // dp_degree
    ranks = [
        take(build_dataloader(**{**packed, "dp_rank": rank, "dp_degree": dp_degree}), num_microbatches)
        for rank in range(dp_degree)
    ]
    together = [rank[microbatch] for microbatch in range(num_microbatches) for rank in ranks]
    assert rows(together) == alone


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_change_nothing(packed: dict[str, Any], num_workers: int) -> None:
    loader = build_dataloader(**{**packed, "num_workers": num_workers})
    assert rows(take(loader, 20)) == rows(take(build_dataloader(**packed), 20))
    assert loader.state_dict()["windows"] == 40, "what workers prepared ahead does not count"


@pytest.mark.parametrize("num_consumed", [0, 1, 4, 5, 9])
def test_another_layout_goes_on_exactly(packed: dict[str, Any], num_consumed: int) -> None:
    """Saved with one rank, also within an epoch and over its end (window 8 or 9); loaded with two ranks, a worker."""
    reference = rows(take(build_dataloader(**packed), num_consumed + 8))[2 * num_consumed :]
    first = build_dataloader(**packed)
    take(first, num_consumed)
    state = json.loads(json.dumps(first.state_dict()))
    windows_per_epoch = {"stream": 139 / 16, "best_fit": 9}[packed["packing"]]
    assert (state["windows"], state["epoch"]) == (2 * num_consumed, 2 * num_consumed // windows_per_epoch)
    ranks = []
    for rank, num_workers in ((0, 0), (1, 1)):
        loader = build_dataloader(**{**packed, "dp_rank": rank, "dp_degree": 2, "num_workers": num_workers})
        loader.load_state_dict(state)
        ranks.append(take(loader, 4))
        assert loader.state_dict()["windows"] == 2 * num_consumed + 16
    assert rows([rank[microbatch] for microbatch in range(4) for rank in ranks]) == reference


def test_iterating_again_goes_on(packed: dict[str, Any]) -> None:
    loader = build_dataloader(**packed)
    assert rows(take(loader, 3) + take(loader, 3)) == rows(take(build_dataloader(**packed), 6))


def test_the_seed_decides_the_order(options: dict[str, Any]) -> None:
    first = rows(take(build_dataloader(**options), 5))
    assert rows(take(build_dataloader(**options), 5)) == first
    assert rows(take(build_dataloader(**{**options, "seed": 4}), 5)) != first


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


@pytest.mark.parametrize(("then", "now"), [("stream", "best_fit"), ("best_fit", "stream")])
def test_another_packing_is_refused(options: dict[str, Any], then: str, now: str) -> None:
    """Masks change nothing about the tokens of a window: they may be switched on and off."""
    loader = build_dataloader(**{**options, "packing": then})
    take(loader, 2)
    state = loader.state_dict()
    other = build_dataloader(**{**options, "packing": now})
    with pytest.raises(
        ConfigError, match=f"^--training.packing={now}: the checkpoint was made with {then}; .*window 4"
    ):
        other.load_state_dict(state)
    masked = build_dataloader(**{**options, "packing": then, "document_masks": True})
    masked.load_state_dict(state)
    assert rows(take(masked, 1))[0]["input"] == rows(take(loader, 1))[0]["input"]


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_checkpoint_of_before_there_were_packings_is_a_streams(options: dict[str, Any], packing: str) -> None:
    """Loading fills in what the checkpoint has; the rest stays as the new loader's state says."""
    loader = build_dataloader(**options)
    take(loader, 2)
    old = {key: value for key, value in loader.state_dict().items() if key != "packing"}
    fresh = build_dataloader(**{**options, "packing": packing})
    for state in (old, {**fresh.state_dict(), **old}):
        if packing == "stream":
            fresh.load_state_dict(state)
            continue
        with pytest.raises(ConfigError, match=r"^--training.packing=best_fit: the checkpoint was made with stream; "):
            fresh.load_state_dict(state)


def test_an_epoch_by_best_fit(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """134 labels: 6 full rows of 16, and of what 31, 8, 51, 2 and 42 leave, 15, 10 + 3 + 2, and 8."""
    with caplog.at_level("INFO"):
        loader = build_dataloader(**{**options, "packing": "best_fit", "global_batch_size": 2})
    assert "Data: packing by best fit: 9 windows an epoch, 6.94 % of their tokens are padding" in caplog.text
    assert "5 documents, 139 tokens; an epoch is 4.5 steps of 2 windows of 16 tokens" in caplog.text
    labels = torch.stack([torch.tensor(row["labels"]) for row in rows(take(loader, 9))])  # 18 rows, two epochs
    for epoch in (labels[:9], labels[9:]):
        assert [int((epoch == ord(row[0])).sum()) for row in ROWS] == [len(row) for row in ROWS]
        assert int((epoch == IGNORED_LABEL).sum()) == 9 * 16 - 134


def test_documents_beyond_the_context(options: dict[str, Any]) -> None:
    """The longest has 52 tokens, 51 of them inputs by best fit."""
    options |= {"document_masks": True, "context_length": 51}
    message = r"^--model.attn_mask=document: the longest document of rows.jsonl has 52 tokens, .* up to 51, .* is 51; "
    with pytest.raises(DataError, match=message):
        build_dataloader(**options)
    by_best_fit = build_dataloader(**{**options, "packing": "best_fit"})
    assert max(max(row["positions"]) for row in rows(take(by_best_fit, 5))) == 50
    restarted = rows(take(build_dataloader(**{**options, "restart_positions": True, "context_length": 10}), 20))
    assert {position for row in restarted for position in row["positions"]} == set(range(10))
    build_dataloader(**{**options, "document_masks": False, "context_length": 1})


@dataclass(frozen=True)
class Plan:
    """Something that no loader knows."""

    number: int
    tensors: tuple[torch.Tensor, ...]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_prepare_is_applied_where_microbatches_are_made(options: dict[str, Any], num_workers: int) -> None:
    """What it adds comes through unchanged; a closure reaches the workers, which are forked."""
    parent = os.getpid()

    def prepare(microbatch: Microbatch) -> Microbatch:
        in_worker = os.getpid() != parent
        return {**microbatch, "plan": Plan(int(in_worker), (microbatch["input"] * 2,))}

    found = take(build_dataloader(**{**options, "num_workers": num_workers}, prepare=prepare), 3)
    for microbatch in found:
        plan = microbatch.pop("plan")
        assert isinstance(plan, Plan) and isinstance(plan.tensors, tuple)
        assert plan.number == num_workers
        assert torch.equal(plan.tensors[0], microbatch["input"] * 2)
    assert rows(found) == rows(take(build_dataloader(**options), 3))


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
    assert rows(first + rest) == rows(take(build_dataloader(**options), 14))
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
