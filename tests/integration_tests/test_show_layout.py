"""show_layout: its numbers are the plans' own, its picture is what the masks say, and it refuses in one line."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch

from torchtitan.attention.masks import MaskKind
from torchtitan.attention.plan import whole_masks
from torchtitan.distributed.context_parallel import MaskPlanner
from torchtitan.tools import show_layout
from torchtitan.tools.layout_plot import mask_cells, rank_colors
from torchtitan.tools.show_layout import Shown, main, read_request, show

_ROOT = Path(__file__).parents[2]
_CP = "parallelism.context_parallel_degree"
_TWO, _FOUR = f"--{_CP}=2", f"--{_CP}=4"


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    """Put the package's logger back: main() is called in this process."""
    logger = logging.getLogger("torchtitan")
    before = (logger.handlers, logger.propagate, logger.level)
    yield
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def _command(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "torchtitan.tools.show_layout", *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(_ROOT)}
    environment["TORCHTITAN_CACHE"] = str(folder / "cache")
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def _shown(*options: str) -> Shown:
    return show(read_request([*options, "--no_picture"])[0])


def _pairs(shown: Shown) -> dict[str, list[int]]:
    """Return each rank's query-key pairs of one layer, by balancer."""
    num_layers = len(shown.masks.layer_kinds)
    return {layout.balancer: (layout.work.pairs // num_layers).tolist() for layout in shown.planned}


def test_one_command_prints_the_table_and_draws(tmp_path: Path) -> None:
    """Breaks with another balance, a matrix that is turned round, or a picture that is empty or grey."""
    from matplotlib.image import imread

    names = "headtail,per_document,ptrr,greedy"
    result = _command(tmp_path, "--documents", "4,12", _TWO, "--output=two.png", f"--balancers={names}")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    cells = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert cells["headtail"] == ["headtail", "1.182", "1.182", "0.818", "50.0", "%", "12"]
    for balancer in ("per_document", "greedy"):
        assert cells[balancer][:4] == [balancer, "1.000", "1.000", "1.000"]
    assert "ptrr          -      16 is no multiple of 256" in lines
    # Rank 0 has tokens 0-3 and 12-15, and needs 4-11 of rank 1, which needs none of its: 8 tokens in each of 6 layers.
    place = lines.index(next(line for line in lines if line.startswith("K/V traffic of headtail")))
    matrix = [line.split() for line in lines[place + 2 : place + 5]]
    assert matrix == [["0", "-", "0", "0"], ["1", "48", "-", "48"], ["received", "48", "0", "48"]]
    image = imread(tmp_path / "two.png")
    height, width = image.shape[:2]
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
    assert width == 1650 and 3 * 440 < height < 4 * 440  # three rows of panels; ptrr has none
    assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 8
    for panels in (image[:, : width // 3], image[:, width // 3 : 3 * width // 5]):  # masks, and bars
        for color in rank_colors(2):
            assert (np.abs(panels[..., :3] - color).max(2) < 0.01).mean() > 0.02


def test_work_is_what_the_documents_make_it() -> None:
    assert _pairs(_shown("--documents=4,12", _TWO)) == {
        "headtail": [52, 36],
        "none": [20, 68],
        "per_document": [44, 44],
        "greedy": [44, 44],
    }


def test_what_is_sent_is_what_is_needed() -> None:
    """Of two kinds of layers and two rows: by each rank's tables, as training's planner makes them.

    A wrong order, a forgotten kind of layer or a matrix that is turned round would part them.
    """
    documents = ["--documents=300,212,512;1,1000,23", "--model.sliding_window=100", "--model.full_attention_every=3"]
    shown = _shown(*documents, _FOUR)
    assert [layout.balancer for layout in shown.planned] == list(shown.layouts)
    batch = {"document_starts": shown.masks.document_starts, "positions": shown.masks.positions}
    for layout in shown.planned:
        assert layout.traffic.sum(0).tolist() == layout.work.needed.tolist()
        assert layout.traffic.any()
        for rank in range(4):
            plan = MaskPlanner(shown.masks.layer_kinds, 4, rank, layout.balancer)(batch)["masks"]
            counts = [plan.layers[kind].counts for kind in plan.layer_kinds]
            sent, received = torch.stack(counts).sum(0).tolist()
            assert layout.traffic[rank].tolist() == sent
            assert layout.traffic[:, rank].tolist() == received
            assert layout.pieces[rank] == sum(len(plan.layers[kind].pieces) for kind in plan.layer_kinds)


def test_ulysses_leaves_the_method_fewer_ranks() -> None:
    options = ("--documents=30,34", "--parallelism.context_parallel_degree=8")
    two = _shown(*options, "--parallelism.context_parallel_ulysses_degree=4")
    assert _pairs(two)["headtail"] == _pairs(_shown("--documents=30,34", _TWO))["headtail"]
    whole = _shown(*options, "--parallelism.context_parallel_ulysses_degree=8")
    assert [layout.balancer for layout in whole.planned] == ["none"]
    assert whole.layouts["greedy"] == "there is nothing to balance: Ulysses takes all ranks"
    assert re.search(r"^none +1\.000  1\.000 +- +12$", show_layout.report(whole), re.MULTILINE) is not None


def test_documents_need_no_tokenizer_and_no_length_of_the_file() -> None:
    file = _ROOT / "torchtitan/models/llama3/train_configs/llama3_8b.toml"  # its tokenizer is not in this package
    shown = _shown(f"--job.config_file={file}", "--documents=30,34", _FOUR)
    assert "llama3 8B: 1 x seq_len 64 over cp 4\ndocuments 30,34; 32 layers with no window" in show_layout.report(shown)


def test_data_are_those_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first microbatch of the package's own data: documents as packed, of an example that has more than one row."""
    options = ["--training.seq_len=2048", "--training.local_batch_size=2", "--training.packing=best_fit"]
    options += ["--model.attn_mask=document", "--debug.seed=3", _FOUR]
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"word " * count}"}}\n' for count in range(1, 400)))
    monkeypatch.setenv("TORCHTITAN_CACHE", str(tmp_path))
    shown = _shown(*options, f"--training.dataset_path={tmp_path / 'text.jsonl'}")
    starts = shown.masks.document_starts
    assert starts.shape == (2, 2048)
    assert all(len(row.unique()) > 1 for row in starts)
    assert torch.equal(shown.masks.positions, torch.arange(2048, dtype=torch.int32) - starts)  # none of them is cut
    other = _shown(*options, f"--training.dataset_path={tmp_path / 'text.jsonl'}", "--debug.seed=4")
    assert not torch.equal(other.masks.document_starts, starts)


def test_the_default_data_are_shown(tmp_path: Path) -> None:
    """Python's own library, whose plain causal masks head-tail cuts equally."""
    result = _command(tmp_path, "--training.seq_len=256", "--training.local_batch_size=2", _FOUR, "--no-picture")
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    assert result.returncode == 0, result.stderr
    assert "2 x seq_len 256 over cp 4\ndocuments not told apart; 6 layers with no window" in result.stdout
    assert re.search(r"^headtail +1\.000  1\.000 1\.000 1\.000 1\.000 ", result.stdout, re.MULTILINE)
    assert re.search(r"^none +1\.747  0\.253 0\.751 1\.249 1\.747 ", result.stdout, re.MULTILINE)
    assert "Training uses headtail (--parallelism.context_parallel_load_balancer=auto)" in result.stdout


def test_cells_of_the_mask_are_those_of_the_definition() -> None:
    """Against all S x S pairs: who holds most of each cell, and the share that is seen, over layers of two kinds."""
    seq_len, cells, degree = 100, 32, 3
    lengths = [23, 60, 17]
    starts = torch.tensor([[sum(lengths[:index]) for index, length in enumerate(lengths) for _ in range(length)]])
    tokens = torch.arange(seq_len)
    masks = whole_masks(starts, tokens - starts, (MaskKind(), MaskKind(window=9), MaskKind()))
    assert masks is not None
    owner = np.random.default_rng(0).integers(0, degree, seq_len)
    causal = (tokens <= tokens[:, None]) & (starts[0] == starts[0][:, None])
    seen = (2 * causal + (causal & (tokens > tokens[:, None] - 9))).double().numpy() / 3
    edges = np.arange(cells + 1) * seq_len // cells
    sums = np.array(
        [
            np.add.reduceat(np.add.reduceat(seen * (owner == r)[:, None], edges[:-1]), edges[:-1], 1)
            for r in range(degree)
        ]
    )
    cell_owner, shares = mask_cells(masks, owner, degree, cells)
    np.testing.assert_allclose(shares * np.outer(np.diff(edges), np.diff(edges)), sums.sum(0), atol=1e-12)
    some = sums.sum(0) > 0
    held = np.take_along_axis(sums, cell_owner[None], 0)[0]
    np.testing.assert_allclose(held[some], sums.max(0)[some], atol=1e-12)
    assert {tuple(np.unique(row[~seen_row])) for row, seen_row in zip(cell_owner, some, strict=True)} <= {
        (),
        (0,),
        (1,),
        (2,),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--documents=4,0"], "--documents=4,0: '0' is no length; .*give positive integers"),
        (["--documents=4,,3"], "--documents=4,,3: '' is no length; .*give positive integers"),
        (["--documents=4,x"], "--documents=4,x: 'x' is no length; .*give positive integers"),
        (["--documents=4,-3"], "--documents=4,-3: '-3' is no length; .*give positive integers"),
        (["--documents=4,12;15"], "--documents=4,12;15: the rows have 16, 15 tokens; .*make their sums equal"),
        (
            ["--documents=4,12", "--training.seq_len=32"],
            "--training.seq_len=32: --documents=4,12 makes it 16; .*give 16, or leave one of the two out",
        ),
        (
            ["--documents=4,12", "--model.attn_mask", "causal"],
            "--model.attn_mask=causal: --documents=4,12 makes it document; ",
        ),
        (["--documents=4,11", _TWO], "--documents=4,11: a row has 15 tokens, no multiple of 2; .*change a document"),
        (
            ["--training.seq_len=15", _TWO],
            "--training.seq_len=15: 15 is not a multiple of 2; .*use 14 or 16, or another",
        ),
        (
            ["--documents=4,12", "--balancers=none,gredy"],
            "--balancers=none,gredy: unknown load balancer 'gredy'; did you mean greedy?; allowed: headtail, none, "
            "per_document, ptrr, greedy; choose from these",
        ),
        (
            ["--documents=4,12", "--balancers=ptrr", _TWO],
            "--balancers=ptrr: ptrr: 16 is no multiple of 256; .*add none, or leave the option out",
        ),
        (["--documents=16", f"--{_CP}=0"], f"--{_CP}=0: 0 is no"),
        (
            ["--documents=16", _TWO, "--parallelism.context_parallel_ulysses_degree=3"],
            "--parallelism.context_parallel_ulysses_degree=3: 3 does not divide context_parallel_degree 2; ",
        ),
        (["--documents=16", "--output=no/a.png"], "--output=no/a.png: no is no folder; .*or give --no_picture"),
        (["--documents=16", "--output=a.jpg"], "--output=a.jpg: 'a.jpg' does not end in .png; "),
        (["--documents=16", "--output=folder.png"], "--output=folder.png: it is a folder; "),
        (["--documents=16", "--output=a.png", "--no_picture"], "--output=a.png: --no_picture is given too; "),
        (["--documents"], "--documents: a value is missing; "),
        (["--documents=16", "--no_picture", "16"], "16: unexpected argument; "),
        (["--documents=16", "--training.seqlen=16"], "--training.seqlen=16: unknown option; did you mean "),
    ],
)  # fmt: skip
def test_wrong_input_ends_in_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    assert main(options) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    assert re.match(pattern, captured.err), captured.err
    assert not (tmp_path / "layout.png").exists()


@pytest.mark.parametrize("option", ["--documents=4,12", "--training.seq_len=16"])
def test_a_plan_for_which_there_is_no_memory_is_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show_layout, "_LARGEST_PLAN", 31)
    assert main([option, "--training.local_batch_size=1", _TWO, "--no_picture"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{option}: 1 x 16 tokens x 2 ranks are too many; ") and error.count("\n") == 1


def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    assert main(["--documents=16", f"--output={tmp_path / 'a.png'}"]) == 2
    assert "a.png: it cannot be written; " in capsys.readouterr().err


def test_a_disk_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(show_layout, "draw", fail)
    assert main(["--documents=16", f"--output={tmp_path / 'a.png'}"]) == 2
    assert "a.png: it cannot be written (No space left on device); " in capsys.readouterr().err


def test_without_matplotlib_the_table_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: Callable[..., ModuleSpec | None] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else found(name))
    assert main(["--documents=16"]) == 2
    message = "--output=layout.png: matplotlib is not installed; .*pip install matplotlib, or give --no_picture\n"
    assert re.fullmatch(message, capsys.readouterr().err)
    assert main(["--documents=16", "--no_picture"]) == 0
    assert "none          1.000" in capsys.readouterr().out
