"""Streamed data, offline: the hub's code on local shards. Each document once per pass, and exact resuming."""

import json
import os
import re
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.unit_tests.data.conftest import BOS, EOS, CountingTokenizer
from torchtitan.batch import IGNORED_LABEL
from torchtitan.components.tokenizer import build_tokenizer
from torchtitan.data import stream
from torchtitan.data.loader import build_dataloader
from torchtitan.data.microbatch import Collation, Microbatch, unchanged
from torchtitan.data.stream import StreamLoader
from torchtitan.errors import ConfigError, DataError

# Python 3.12 and later warn at every fork of a process with threads, and torch has some.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

SEQ_LEN = 16
PLAIN = Collation(document_masks=False, context_length=64, restart_positions=False, prepare=unchanged)
MASKED = replace(PLAIN, document_masks=True)


@dataclass(frozen=True)
class Where:
    """Something that no loader knows."""

    in_parent: bool


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return four files of three documents each; document i of shard s is "s:i" and i letters."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")
    files = []
    for shard in range(4):
        file = tmp_path / f"{shard}.jsonl"
        file.write_text("".join(json.dumps({"text": f"{shard}:{i}" + "x" * 9 * i}) + "\n" for i in range(3)))
        files.append(str(file))
    return files


def build(shards: list[str], tokenizer: CountingTokenizer, **options: Any) -> StreamLoader:
    """Return the loader of dp rank 0 of 2 with B = 2, unless told otherwise."""

    def open_stream() -> datasets.IterableDataset:
        return datasets.load_dataset("json", data_files=shards, split="train", streaming=True)

    arguments = {
        "text_field": "text", "collation": PLAIN, "dp_rank": 0, "dp_degree": 2, "num_workers": 0, **options
    }  # fmt: skip
    return StreamLoader(open_stream, "c4", tokenizer=tokenizer, seq_len=SEQ_LEN, local_batch_size=2, **arguments)


def joined(items: list[Microbatch]) -> dict[str, list[int]]:
    """Return all rows of some microbatches, one behind the other, by name."""
    return {name: [value for item in items for value in item[name].flatten().tolist()] for name in items[0]}


def labels(loader: StreamLoader, count: int) -> list[int]:
    """Return the labels of the next microbatches, joined."""
    return [label for item in islice(loader, count) for label in item["labels"].flatten().tolist()]


def documents(ids: list[int]) -> list[str]:
    """Return the whole documents in a row of ids whose first BOS is missing, as it is no label."""
    text = "".join({BOS: "[", EOS: "]"}.get(id_) or chr(id_) for id_ in ids)
    return [part.split("x")[0] for part in ("[" + text).split("]")[:-1]]


def test_packing_and_passes(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    """Both ranks' documents together are all, each once per pass, none cut and none joined."""
    seen = [documents(labels(build(shards, byte_tokenizer, dp_rank=rank), 12)) for rank in (0, 1)]
    assert sorted({*seen[0], *seen[1]}) == [f"[{shard}:{i}" for shard in range(4) for i in range(3)]
    for rank in (0, 1):
        assert len(set(seen[rank])) == 6
        assert seen[rank] == (seen[rank][:6] * 9)[: len(seen[rank])]
        assert len(seen[rank]) > 12, "more than two passes"


def test_inputs_are_one_token_behind(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    items = list(islice(build(shards, byte_tokenizer), 3))
    inputs = [token for item in items for token in item["input"].flatten().tolist()]
    assert inputs[0] == BOS
    assert inputs[1:] == [label for item in items for label in item["labels"].flatten().tolist()][:-1]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_resuming_is_exact(shards: list[str], byte_tokenizer: CountingTokenizer, num_workers: int) -> None:
    """Within a pass and behind its end; what workers prepared ahead comes again."""
    options = {"num_workers": num_workers, "dp_rank": 1}
    whole = labels(build(shards, byte_tokenizer, **options), 12)
    for num_consumed in (0, 1, 3, 7) if num_workers == 0 else (3, 5):
        first = build(shards, byte_tokenizer, **options)
        iterator = iter(first)
        for _ in range(num_consumed):
            next(iterator)
        state = json.loads(json.dumps(first.state_dict()))
        assert set(state) == {"dp_degree", "num_workers", "tokenizer", "dp_rank_1"}
        second = build(shards, byte_tokenizer, **options)
        second.load_state_dict(state)
        assert labels(second, 12 - num_consumed) == whole[num_consumed * 2 * SEQ_LEN :]


def test_documents_in_the_stream(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    """By the BOS, which no text here has, against the plain definition; 5, 14 and 23 tokens over rows of 16."""
    found = joined(list(islice(build(shards, byte_tokenizer, collation=MASKED), 12)))
    plain = joined(list(islice(build(shards, byte_tokenizer), 12)))
    assert found["input"] == plain["input"]
    begins = [index for index, token in enumerate(found["input"]) if token == BOS]
    first = [max(begin for begin in begins if begin <= index) for index in range(len(found["input"]))]
    assert found["positions"] == [index - begin for index, begin in enumerate(first)]
    assert max(found["positions"]) == 22, "they go on over a row's end"
    row = [index - index % SEQ_LEN for index in range(len(first))]
    assert found["document_starts"] == [max(0, begin - start) for begin, start in zip(first, row, strict=True)]
    assert found["labels"] == [IGNORED_LABEL if label == BOS else label for label in plain["labels"]]
    assert plain["positions"] == list(range(SEQ_LEN)) * 24 and "document_starts" not in plain


class NothingButEos(CountingTokenizer):
    """A tokenizer that has the same id for every byte: EOS."""

    def encode(self, text: str) -> list[int]:
        """Return as many EOS as there are bytes."""
        return [EOS] * len(text)


def test_ids_are_no_boundaries(shards: list[str], byte_tokenizer: CountingTokenizer, tmp_path: Path) -> None:
    other = NothingButEos(tmp_path / "bytes" / "tokenizer.model")
    expected = joined(list(islice(build(shards, byte_tokenizer, collation=MASKED), 6)))
    found = joined(list(islice(build(shards, other, collation=MASKED), 6)))
    assert set(found["input"]) == {BOS, EOS}
    for name in ("positions", "document_starts"):
        assert found[name] == expected[name]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_resuming_knows_the_place_in_the_document(
    shards: list[str], byte_tokenizer: CountingTokenizer, num_workers: int
) -> None:
    """A document of 3 microbatches, cut in each of them, too."""
    for shard in shards:
        Path(shard).write_text(json.dumps({"text": "x" * 80}) + "\n" + json.dumps({"text": "y" * 7}) + "\n")
    options = {"num_workers": num_workers, "collation": replace(MASKED, context_length=82)}
    whole = list(islice(build(shards, byte_tokenizer, **options), 12))
    assert max(joined(whole)["positions"]) == 81
    for num_consumed in (0, 1, 2, 3, 5, 8) if num_workers == 0 else (1, 5):
        first = build(shards, byte_tokenizer, **options)
        iterator = iter(first)
        for _ in range(num_consumed):
            next(iterator)
        state = json.loads(json.dumps(first.state_dict()))
        second = build(shards, byte_tokenizer, **options)
        second.load_state_dict(state)
        assert joined(list(islice(second, 12 - num_consumed))) == joined(whole[num_consumed:])


def test_a_checkpoint_of_before_there_were_document_masks(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    first = build(shards, byte_tokenizer)
    whole = labels(build(shards, byte_tokenizer), 6)
    next(iter(first))
    state = json.dumps(first.state_dict())
    old = json.loads(re.sub(r', \\"rest_offset\\": \d+', "", state))
    assert "rest_offset" in state and "rest_offset" not in json.dumps(old)
    second = build(shards, byte_tokenizer)
    second.load_state_dict(old)
    assert labels(second, 5) == whole[2 * SEQ_LEN :]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_document_beyond_the_context(shards: list[str], byte_tokenizer: CountingTokenizer, num_workers: int) -> None:
    """The longest has 23 tokens, and its EOS is an input too."""
    short = replace(MASKED, context_length=22)
    message = r"^--model.attn_mask=document: a document of c4 has 23 tokens, so positions up to 22, .* context is 22; "
    with pytest.raises(DataError, match=message):
        labels(build(shards, byte_tokenizer, collation=short, num_workers=num_workers), 12)
    fits = joined(list(islice(build(shards, byte_tokenizer, collation=replace(short, context_length=23)), 12)))
    restarting = replace(short, context_length=10, restart_positions=True)
    found = joined(list(islice(build(shards, byte_tokenizer, collation=restarting), 12)))
    assert found["positions"] == [position % 10 for position in fits["positions"]]
    assert found["document_starts"] == fits["document_starts"]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_prepare_is_applied(shards: list[str], byte_tokenizer: CountingTokenizer, num_workers: int) -> None:
    parent = os.getpid()
    collation = replace(PLAIN, prepare=lambda microbatch: {**microbatch, "here": Where(os.getpid() == parent)})
    for item in islice(build(shards, byte_tokenizer, collation=collation, num_workers=num_workers), 3):
        assert item["here"] == Where(num_workers == 0)
        assert item["input"].shape == (2, SEQ_LEN)


def test_another_layout_is_refused_with_both_sizes(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    state = build(shards, byte_tokenizer).state_dict()
    both = "^--parallelism.data_parallel_shard_degree=4: the checkpoint was made with dp_degree 2, this run has 4"
    with pytest.raises(ConfigError, match=both):
        build(shards, byte_tokenizer, dp_degree=4).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"^--training.num_workers=1: .* num_workers 0, this run has 1; .*; give 0"):
        build(shards, byte_tokenizer, num_workers=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="tokenizer is another one"):
        build(shards, build_tokenizer("")).load_state_dict(state)  # type: ignore[arg-type]


def test_more_workers_than_shards_are_refused(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"^--training.num_workers=3: c4 has 2 shards for dp rank 0; .*give 2 or less"
    ):
        build(shards, byte_tokenizer, num_workers=3)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_missing_field_is_named(shards: list[str], byte_tokenizer: CountingTokenizer, num_workers: int) -> None:
    loader = build(shards, byte_tokenizer, text_field="body", num_workers=num_workers)
    with pytest.raises(DataError, match=r"^c4: no field 'body' with text; the fields are: text; choose .*text_field$"):
        next(iter(loader))


def test_failures_on_the_way_are_named(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    loader = build(shards, byte_tokenizer)
    Path(shards[0]).write_text('{"text": 1')
    with pytest.raises(DataError, match=r"^--training.dataset=c4: cannot be streamed from the Hugging Face hub: "):
        next(iter(loader))


def test_a_stream_without_documents_is_an_error(shards: list[str], byte_tokenizer: CountingTokenizer) -> None:
    for shard in shards:
        Path(shard).write_text("")
    with pytest.raises(DataError):
        next(iter(build(shards, byte_tokenizer)))


@pytest.fixture
def hub_options(byte_tokenizer: CountingTokenizer, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments of a loader of the hub's data."""
    return {
        "dataset": "c4",
        "dataset_path": "",
        "text_field": "text",
        "tokenizer": byte_tokenizer,
        "seq_len": 16,
        "packing": "stream",
        "document_masks": False,
        "context_length": 64,
        "restart_positions": False,
        "local_batch_size": 1,
        "global_batch_size": 1,
        "dp_rank": 0,
        "dp_degree": 1,
        "seed": 0,
        "num_workers": 0,
        "cache_folder": tmp_path,
        "build_cache": True,
        "barrier": lambda: None,
    }


def test_an_unreachable_hub_is_an_error(hub_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach 'allenai/c4' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match=r"cannot be streamed.*ConnectionError: Couldn't reach .*--training.dataset_path"
    ):
        build_dataloader(**hub_options)


def test_the_hub_is_not_packed_by_best_fit(hub_options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^--training.packing=best_fit: c4 is streamed, .*; .*; give stream, or "):
        build_dataloader(**{**hub_options, "packing": "best_fit"})


def test_c4_is_what_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)))
    stream.open_c4()
    assert asked == [(("allenai/c4", "en"), {"split": "train", "streaming": True})]
