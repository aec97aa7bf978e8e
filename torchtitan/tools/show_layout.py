"""Show how context parallelism lays sequences on its ranks: `python -m torchtitan.tools.show_layout`, one process.

Options of training say which data, masks and degrees; see `_HELP` for its own. What is shown are the plans that the
ranks would make. Letters: B sequences, S tokens of each, P cp ranks, R of the method, U of Ulysses.
"""

import importlib.util
import logging
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from torchtitan.attention.masks import AttentionMasks, MaskKind
from torchtitan.attention.plan import plan_masks, whole_masks
from torchtitan.build import load_balancer, model_args
from torchtitan.components.tokenizer import Tokenizer, build_tokenizer
from torchtitan.config.arguments import read_arguments
from torchtitan.config.cp_method import LOAD_BALANCERS, seq_len_factor
from torchtitan.config.job import OPTIONS, JobConfig, value_of
from torchtitan.config.parse import load_config, to_toml
from torchtitan.config.sections import Job, Parallelism
from torchtitan.config.validate import check
from torchtitan.data.cache import default_cache_folder
from torchtitan.data.loader import build_dataloader
from torchtitan.distributed.context_parallel import cp_order
from torchtitan.errors import ConfigError, TitanError, nearest, option_error
from torchtitan.models.spec import ModelArgs
from torchtitan.tools.layout_plot import Layout, draw
from torchtitan.tools.logging import init_logging

logger = logging.getLogger("torchtitan.show_layout")  # by name: run as a script, this module is __main__

_HELP = """python -m torchtitan.tools.show_layout [options of training] [options of its own]

Show how context parallelism lays a microbatch on its ranks under each load balancer: work, traffic of keys and values,
kernel calls, as a table and a picture. One process, no torchrun: --parallelism.context_parallel_degree may be any.

--documents 7,30,27    lengths of documents that are told apart, instead of the data; ";" begins another row
--balancers A,B        of headtail, none, per_document, ptrr, greedy; default: all
--output FILE.png      the picture; default layout.png
--no_picture           the table alone

Options of training:
"""
_VALUED = ("documents", "balancers", "output")
_FLAG = "no_picture"
_CP = "parallelism.context_parallel_degree"
_SEQ_LEN = "training.seq_len"
_LARGEST_PLAN = 2**28  # sequences x tokens x ranks: a plan takes some 15 bytes for each
_MOST_LENGTHS = 8  # documents whose lengths are told


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    config: JobConfig
    documents: tuple[tuple[int, ...], ...]  # tokens of each, by row; empty: those of the data
    balancers: tuple[str, ...]
    picture: Path | None


@dataclass(frozen=True)
class Shown:
    """What there is to show."""

    config: JobConfig
    args: ModelArgs
    masks: AttentionMasks
    layouts: dict[str, Layout | str]  # by balancer; a text: why it cannot cut the sequence

    @property
    def planned(self) -> list[Layout]:
        """Return the layouts that there are."""
        return [layout for layout in self.layouts.values() if isinstance(layout, Layout)]


def main(argv: Sequence[str] | None = None) -> int:
    """Show the layouts; returns the exit code (0 done, 1 failed, 2 refused)."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except TitanError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:  # as under `| head`: the reader has seen enough, and Python would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: Sequence[str]) -> int:
    if {"--help", "-h"} & set(argv):
        print(_HELP)
    request, notes = read_request(argv)
    if request.config.job.print_config:
        print(to_toml(request.config), end="")
        return 0
    init_logging(color=not request.config.metrics.disable_color_printing)
    shown = show(request)
    for note in notes:
        logger.warning("%s", note)
    if request.picture:
        _draw(request.picture, shown)
    print(report(shown), flush=True)
    if request.picture:
        print(f"\nPicture: {request.picture}", flush=True)
    return 0


def read_request(argv: Sequence[str]) -> tuple[Request, tuple[str, ...]]:
    """Return what `argv` asks for, and notes on options of training that have no effect.

    Raises:
        ConfigError: a value is bad, or two contradict each other.
    """
    own_words, words = _split(argv)
    config, notes = load_config(words)
    own = read_arguments(own_words, {_FLAG}, _VALUED)
    if own.problems:
        raise ConfigError(own.problems[0])
    documents = _documents(own.texts["documents"]) if "documents" in own.texts else ()
    if documents:
        flags = {name for name, kind in OPTIONS.items() if kind is bool}
        config = _with_documents(config, documents, read_arguments(words, flags, OPTIONS.keys() - flags).texts)
    balancers = _balancers(own.texts["balancers"]) if "balancers" in own.texts else LOAD_BALANCERS
    return Request(config, documents, balancers, _picture(own.texts)), notes


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of this command's options and those of training's; values stay behind their options."""
    own: list[str] = []
    others: list[str] = []
    target = others
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            target = own if name in (*_VALUED, _FLAG) else others
        target.append(word)
    return own, others


def _documents(text: str) -> tuple[tuple[int, ...], ...]:
    rows = [row.split(",") for row in text.split(";")]
    for length in (length.strip() for row in rows for length in row):
        if not re.fullmatch("0*[1-9][0-9]{0,9}", length, re.ASCII):
            rule = "each is the length of a document in tokens, and semicolons separate rows"
            raise option_error(
                "documents", text, f"{length!r} is no length", rule, "give positive integers, as 7,30,27"
            )
    documents = tuple(tuple(int(length) for length in row) for row in rows)
    sums = [sum(row) for row in documents]
    if len(set(sums)) > 1:
        fact = f"the rows have {_listed(sums)} tokens"
        raise option_error("documents", text, fact, "all rows of a batch are equally long", "make their sums equal")
    return documents


def _with_documents(config: JobConfig, documents: tuple[tuple[int, ...], ...], given: Mapping[str, str]) -> JobConfig:
    """Return the configuration of a batch of these documents; `given` beside them may not say otherwise."""
    implied = {_SEQ_LEN: sum(documents[0]), "training.local_batch_size": len(documents), "model.attn_mask": "document"}
    for option, value in implied.items():
        if option in given and value_of(config, option) != value:
            fact, rule = f"--documents={_text(documents)} makes it {value}", "they fill the batch, and are told apart"
            raise option_error(option, given[option], fact, rule, f"give {value}, or leave one of the two out")
    training = replace(config.training, seq_len=sum(documents[0]), local_batch_size=len(documents))
    model = replace(config.model, attn_mask="document", tokenizer_path="")  # no text is read
    return replace(config, training=training, model=model)


def _balancers(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LOAD_BALANCERS:
            fact = f"unknown load balancer {name!r}{nearest(name, LOAD_BALANCERS)}"
            raise option_error("balancers", text, fact, f"allowed: {_listed(LOAD_BALANCERS)}", "choose from these")
    return tuple(dict.fromkeys(names))


def _picture(texts: Mapping[str, str]) -> Path | None:
    """Return the file to draw into, checked before there is any work to lose."""
    name = texts.get("output", "layout.png")
    rule, remedy = "the picture is written there, as a PNG", "name another file, or give --no_picture"
    if texts.get(_FLAG, "False") not in ("True", "False"):
        raise option_error(_FLAG, texts[_FLAG], "not a switch", "it is true or false", "give it bare")
    if texts.get(_FLAG) == "True":
        if "output" in texts:
            raise option_error("output", name, "--no_picture is given too", rule, "leave one of the two out")
        return None
    file = Path(name)
    problems = {
        f"{file.name!r} does not end in .png": file.suffix.lower() != ".png",
        f"{file.parent} is no folder": not file.parent.is_dir(),
        "it is a folder": file.is_dir(),
        "it cannot be written": not os.access(file if file.exists() else file.parent, os.W_OK),
    }
    for fact, is_true in problems.items():
        if is_true:
            raise option_error("output", name, fact, rule, remedy)
    if not importlib.util.find_spec("matplotlib"):
        fact, rule = "matplotlib is not installed", "it draws the picture"
        raise option_error("output", name, fact, rule, "pip install matplotlib, or give --no_picture")
    return file


def _draw(file: Path, shown: Shown) -> None:
    ulysses = shown.config.parallelism.context_parallel_ulysses_degree
    ranks = "cp rank" if ulysses == 1 else f"rank of the method, {ulysses} of Ulysses each"
    try:
        draw(file, shown.masks, shown.planned, title(shown), ranks)
    except OSError as error:
        fact, rule = f"it cannot be written ({error.strerror})", "the picture is written there, as a PNG"
        raise option_error("output", file, fact, rule, "name another file, or give --no_picture") from None


def show(request: Request) -> Shown:
    """Return the layouts that a request asks for.

    Raises:
        ConfigError: what training would refuse too, but for the number of processes; or no balancer can cut the length.
    """
    config = request.config
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    args = model_args(config, tokenizer)
    _check(request, args)
    parallelism, seq_len = config.parallelism, config.training.seq_len
    refusals = {name: _refusal(name, seq_len, parallelism) for name in request.balancers}
    if all(refusals.values()):
        name, fact = next(iter(refusals.items()))
        rule = "a load balancer gives all ranks equally many of its chunks"
        raise option_error(
            "balancers", ",".join(refusals), f"{name}: {fact}", rule, "add none, or leave the option out"
        )
    starts, positions = _given(request.documents) if request.documents else _read(config, args, tokenizer)
    masks = whole_masks(starts, positions, args.layer_kinds)
    assert masks is not None
    rounds = parallelism.context_parallel_degree // parallelism.context_parallel_ulysses_degree
    layouts = {name: refusal or plan_layout(masks, name, rounds) for name, refusal in refusals.items()}
    return Shown(config, args, masks, layouts)


def _check(request: Request, args: ModelArgs) -> None:
    """Raise what training would for the options that are read here; the number of processes does not matter."""
    training, parallelism, documents = request.config.training, request.config.parallelism, request.documents
    cp, ulysses = parallelism.context_parallel_degree, parallelism.context_parallel_ulysses_degree
    if cp < 1:
        raise option_error(_CP, cp, f"{cp} is no number of ranks", "sequences are cut over 1 or more", "use 1 or more")
    if documents and training.seq_len % cp:
        fact = f"a row has {training.seq_len} tokens, no multiple of {cp}"
        remedy = f"change a document, or use another --{_CP}"
        raise option_error("documents", _text(documents), fact, "every balancer gives all ranks equally many", remedy)
    checked = JobConfig(
        job=Job(dump_folder=tempfile.gettempdir()),  # nothing is written into it
        model=request.config.model,
        training=replace(training, global_batch_size=-1),
        # The balancer that can cut whatever any can, and the method that knows all masks.
        parallelism=Parallelism(
            context_parallel_degree=cp,
            context_parallel_ulysses_degree=ulysses,
            context_parallel_method="gather",
            context_parallel_load_balancer="none",
        ),
        debug=request.config.debug,
    )
    check(checked, world_size=cp, ranks_per_node=1, device_type="cpu", model=args)
    if training.local_batch_size * training.seq_len * (cp // ulysses) > _LARGEST_PLAN:
        fact = f"{training.local_batch_size} x {training.seq_len} tokens x {cp // ulysses} ranks are too many"
        rule = f"one process plans for all, and for a product of {_LARGEST_PLAN} at most"
        remedy = f"use shorter sequences, fewer of them, or a smaller --{_CP}"
        if documents:
            raise option_error("documents", _text(documents), fact, rule, remedy)
        raise option_error(_SEQ_LEN, training.seq_len, fact, rule, remedy)


def _refusal(balancer: str, seq_len: int, parallelism: Parallelism) -> str:
    """Return why a balancer cannot cut the sequence; empty: it can."""
    degree, ulysses = parallelism.context_parallel_degree, parallelism.context_parallel_ulysses_degree
    if degree == ulysses and balancer != "none":
        return "there is nothing to balance: " + ("Ulysses takes all ranks" if degree > 1 else "there is one rank")
    factor = seq_len_factor(degree, balancer, ulysses_degree=ulysses)
    return f"{seq_len} is no multiple of {factor}" if seq_len % factor else ""


def _given(documents: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return document starts and positions, int32 [B, S], of rows that begin with a document."""
    lengths = [np.array(row) for row in documents]
    starts = np.stack([np.repeat(row.cumsum() - row, row) for row in lengths]).astype(np.int32)
    return torch.from_numpy(starts), torch.from_numpy(np.arange(starts.shape[1], dtype=np.int32) - starts)


def _read(config: JobConfig, args: ModelArgs, tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return document starts and positions, int32 [B, S], of the first microbatch of the data."""
    training = config.training
    dataloader = build_dataloader(
        dataset=training.dataset,
        dataset_path=training.dataset_path,
        text_field=training.dataset_text_field,
        tokenizer=tokenizer,
        seq_len=training.seq_len,
        packing=training.packing,
        document_masks=config.model.attn_mask == "document",
        context_length=args.context_length,
        restart_positions=training.position_overflow == "restart",
        local_batch_size=training.local_batch_size,
        global_batch_size=training.local_batch_size,
        dp_rank=0,
        dp_degree=1,
        seed=config.debug.seed,
        num_workers=0,
        cache_folder=default_cache_folder(),
        build_cache=True,
        barrier=lambda: None,
    )
    microbatch = next(iter(dataloader))
    positions = microbatch["positions"]
    return microbatch.get("document_starts", torch.zeros_like(positions)), positions


def plan_layout(masks: AttentionMasks, balancer: str, degree: int) -> Layout:
    """Return what a balancer makes of whole sequences, by the plans of all `degree` ranks of the method."""
    order = cp_order(masks, degree, balancer)
    layers = Counter(masks.layer_kinds)
    traffic, pieces = np.zeros((degree, degree), np.int64), []
    for rank in range(degree):
        plan = plan_masks(masks, order, degree, rank)
        if degree > 1:
            traffic[rank] = sum(count * plan.layers[kind].counts[0].numpy() for kind, count in layers.items())
        pieces.append(sum(count * len(plan.layers[kind].pieces) for kind, count in layers.items()))
    assert plan.work is not None
    return Layout(balancer, order, plan.work, traffic, tuple(pieces))


def title(shown: Shown) -> str:
    """Return what is laid out, in two lines."""
    training, parallelism = shown.config.training, shown.config.parallelism
    ulysses = parallelism.context_parallel_ulysses_degree
    over = f"cp {parallelism.context_parallel_degree}" + (f" (ulysses {ulysses})" if ulysses > 1 else "")
    kinds = Counter(shown.masks.layer_kinds)
    layers = _listed(f"{count} layers with {_limits(kind)}" for kind, count in kinds.items())
    batch = f"{training.local_batch_size} x seq_len {training.seq_len} over {over}"
    return f"{shown.config.model.name} {shown.config.model.flavor}: {batch}\n{_documents_text(shown)}; {layers}"


def _documents_text(shown: Shown) -> str:
    if shown.config.model.attn_mask == "causal":
        return "documents not told apart"
    rows = [np.diff(np.unique(row), append=len(row)).tolist() for row in shown.masks.document_starts.numpy()]
    if sum(map(len, rows)) <= _MOST_LENGTHS:
        return f"documents {_text(rows)}"
    return f"{sum(map(len, rows))} documents, {len(rows[0])} in row 0"


def _limits(kind: MaskKind) -> str:
    limits = [f"window {kind.window}"] * bool(kind.window) + [f"chunks of {kind.chunk}"] * bool(kind.chunk)
    return " and ".join(limits) or "no window"


def report(shown: Shown) -> str:
    """Return the layouts as text: a line for each, then the traffic of each."""
    num_layers = len(shown.masks.layer_kinds)
    lines = [["balancer", "worst", "work", "travels", "pieces"], *(_cells(*item) for item in shown.layouts.items())]
    mean = float(shown.planned[0].work.pairs.double().mean())
    explained = (
        f"work     query-key pairs of each rank over the mean, which is {mean:,.0f} per head in {num_layers} layers\n"
        "worst    the most work\n"
        "travels  of the keys and values of other ranks, as gather sends them; a ring sends all\n"
        f"pieces   kernel calls in {num_layers} layers' forward, of the rank with most"
    )
    blocks = [title(shown), _aligned(lines), explained]
    if len(shown.planned[0].traffic) > 1:
        given = shown.config.parallelism.context_parallel_load_balancer
        used = load_balancer(shown.config, shown.args)
        blocks.append(f"Training uses {used} (--parallelism.context_parallel_load_balancer={given})")
    for layout in shown.planned:
        head = (
            f"K/V traffic of {layout.balancer}, from rank (row) to rank (column): tokens, sum over {num_layers} layers"
        )
        blocks.append(f"{head}\n{_matrix(layout.traffic)}")
    return "\n\n".join(blocks)


def _cells(balancer: str, layout: Layout | str) -> list[str]:
    if isinstance(layout, str):
        return [balancer, "-", layout]
    travelled = "-" if layout.travelled is None else f"{100 * layout.travelled:.1f} %"
    shares = " ".join(f"{share:.3f}" for share in layout.shares)
    return [balancer, f"{layout.shares.max():.3f}", shares, travelled, str(max(layout.pieces))]


def _matrix(traffic: np.ndarray) -> str:
    ranks = [str(rank) for rank in range(len(traffic))]
    numbers = [
        ["-" if row == column else f"{tokens:,}" for column, tokens in enumerate(line)]
        for row, line in enumerate(traffic.tolist())
    ]
    sent = [f"{tokens:,}" for tokens in traffic.sum(1).tolist()]
    received = [f"{tokens:,}" for tokens in (*traffic.sum(0).tolist(), traffic.sum())]
    rows = [[rank, *line, total] for rank, line, total in zip(ranks, numbers, sent, strict=True)]
    return _aligned([["from", *ranks, "sent"], *rows, ["received", *received]], right=True)


def _aligned(lines: list[list[str]], *, right: bool = False) -> str:
    """Return lines of aligned columns, of which a line may lack the last; the first is aligned left."""
    width = max(map(len, lines))
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(width)]
    return "\n".join(
        "  ".join(
            cell.rjust(widths[column]) if right and column else cell.ljust(widths[column])
            for column, cell in enumerate(line)
        ).rstrip()
        for line in lines
    )


def _text(documents: Sequence[Sequence[int]]) -> str:
    return ";".join(",".join(map(str, row)) for row in documents)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


if __name__ == "__main__":
    sys.exit(main())
