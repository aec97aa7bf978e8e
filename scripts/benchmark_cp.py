"""Compare the methods of context parallelism with each other and with one process, on attention alone.

    python scripts/benchmark_cp.py [--seq-len 16384] [--degree 2] [--methods ring,gather,ulysses] [--output-folder DIR]

No model is needed: each method hooks one inner attention module, which is fed random q, k, v and output gradients. The
reference is the same module in one process on whole sequences, by default with as many threads as all ranks together.
It and the methods take turns in every round of this one call, so that a noisy machine disturbs all alike; processes
start once, and those whose turn it is not are blocked. A round's figure is the median over its repeats of the slowest
rank's time, and a printed time is the median over the rounds. Forward and backward start at a barrier each.

Untimed passes measure the rest, per rank:
  sent    bytes sent to other ranks, as counted = as predicted, "!=" where they differ on any rank
  work    (query, key) pairs that causal attention needs of a rank, read from the shapes at its forward kernel calls,
          over an equal share of them; pairs that a kernel computes and masks away are not in it
  peak    what a forward and a backward add to the memory that the rank holds before, inputs not included. On a CPU it
          is the growth of the resident set's high-water mark, reset just before ("-" where the system cannot): gloo's
          buffers and holes between freed blocks are in it, so equal runs differ by a tenth. On CUDA it is the
          allocator's
  error   largest difference from one process over the largest value: of outputs, and of the gradients of q, k and v

Methods: ring, ring-alltoall, gather, gather-whole (all heads at once), gather-strided (--gather-kv-heads at a time),
gather-kept (the gathered K and V are kept for the backward), ulysses (over all ranks), and ulysses<u>-METHOD: u ranks
of Ulysses, METHOD for the rest.

Letters: P cp degree, S tokens of the sequence, n = S / P, B batch, H query heads, K key/value heads, E head dim.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.attention.work import count_attention_work
from torchtitan.config.cp_method import CAUSAL_BALANCERS, AttentionShape, sent_bytes, seq_len_factor
from torchtitan.distributed.collectives import count_traffic
from torchtitan.distributed.context_parallel import apply_cp, cp_shard
from torchtitan.errors import ConfigError, nearest, option_error
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.tools.device import keep_freed_memory

_METHODS = ("ring", "ring-alltoall", "gather", "gather-whole", "gather-kept", "gather-strided")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_SINGLE = "one process"
_PHASES = ("forward", "backward")
_MIB = 2**20
_CLEAR_REFS, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@dataclass(frozen=True)
class Problem:
    """What all methods compute, and on what."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    batch_size: int
    degree: int
    load_balancer: str
    gather_kv_heads: int  # key/value heads that gather-strided gathers at a time
    threads: int  # of each rank
    single_threads: int  # of the one process
    device_type: str

    def causal_pairs(self) -> int:
        """Return how many (query, key) pairs causal attention has, of all heads."""
        return self.batch_size * self.num_heads * self.seq_len * (self.seq_len + 1) // 2


@dataclass(frozen=True)
class Method:
    """One way to split attention."""

    name: str
    base: str  # one of _METHODS
    ulysses_degree: int  # 1: none

    def mesh(self, problem: Problem) -> DeviceMesh:
        """Return the cp mesh [P], or [P / U, U]; every rank must call it."""
        if self.ulysses_degree == 1:
            return init_device_mesh(problem.device_type, (problem.degree,), mesh_dim_names=("cp",))
        shape = (problem.degree // self.ulysses_degree, self.ulysses_degree)
        return init_device_mesh(problem.device_type, shape, mesh_dim_names=("cp", "ulysses"))

    def attention(self, problem: Problem, mesh: DeviceMesh) -> ScaledDotProductAttention:
        """Return an attention module of local q, k and v."""
        module = ScaledDotProductAttention()
        apply_cp(
            [module],
            mesh,
            seq_len=problem.seq_len,
            method=self.base.partition("-")[0],
            rotate_method="alltoall" if self.base == "ring-alltoall" else "allgather",
            load_balancer=problem.load_balancer,
            gather_kv_heads={"gather-strided": problem.gather_kv_heads, "gather-whole": 0}.get(self.base, "auto"),
            keep_gathered=self.base == "gather-kept",
        )
        return module

    def sent_bytes(self, problem: Problem, dtype: torch.dtype, rank: int) -> tuple[int, int]:
        """Return the bytes that a rank should send: forward and backward."""
        sizes = (problem.batch_size, problem.seq_len, problem.num_heads, problem.num_kv_heads, problem.head_dim)
        grad_dtype = torch.promote_types(dtype, torch.float32)  # K's and V's gradients are summed in fp32 at least
        return sent_bytes(
            AttentionShape(*sizes, dtype.itemsize, grad_dtype.itemsize),
            method=self.base.partition("-")[0],
            degree=problem.degree,
            ulysses_degree=self.ulysses_degree,
            keep_gathered=self.base == "gather-kept",
            load_balancer=problem.load_balancer,
            rank=rank,
        )


class Inputs(NamedTuple):
    """Leaves q [B, H, S, E], k and v [B, K, S, E], and the output's gradient [B, H, S, E]; n for S on a rank."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


class Times(NamedTuple):
    """Seconds."""

    forward: float
    backward: float


class Check(NamedTuple):
    """What untimed passes of one rank found."""

    sent_forward: int  # bytes
    sent_backward: int
    pairs: int  # (query, key) pairs of the forward
    peak_bytes: int | None
    differences: list[tuple[float, float]]  # of output, dq, dk, dv: largest difference and largest reference, absolute


def main(argv: list[str]) -> int:
    """Run the benchmark; returns the exit code."""
    try:
        problem, methods, dtypes, args = parse_args(argv)
        output = _output_folder(args.output_folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    keep_freed_memory()  # as in training
    torch.set_num_threads(problem.single_threads)
    print(_heading(problem), flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(problem, folder)
        try:
            for dtype in dtypes:
                part = compare(problem, methods, dtype, ranks, Path(folder), args.rounds, args.repeats)
                print(f"\n{table(part)}", flush=True)
                rows += part
        except RankError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            ranks.stop()
    if output:
        save(output, problem, args.rounds, args.repeats, rows)
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def parse_args(argv: list[str]) -> tuple[Problem, list[Method], list[torch.dtype], argparse.Namespace]:
    """Return the problem, the methods, the dtypes and the rest of the options.

    Raises:
        ConfigError: a value is bad.
    """
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--seq-len", default="16384", help="tokens of the whole sequence")
    parser.add_argument("--heads", default="8", help="query heads")
    parser.add_argument("--kv-heads", default="8", help="key/value heads")
    parser.add_argument("--head-dim", default="64")
    parser.add_argument("--batch-size", default="1")
    parser.add_argument("--degree", default="2", help="ranks: processes on a CPU, GPUs on CUDA")
    parser.add_argument("--dtypes", default="float32,bfloat16", help=", ".join(_DTYPES))
    parser.add_argument("--methods", default="ring,ring-alltoall,gather,gather-whole,gather-kept,ulysses")
    parser.add_argument("--load-balancer", default="headtail", help=", ".join(CAUSAL_BALANCERS))
    parser.add_argument("--gather-kv-heads", default="1", help="key/value heads that gather-strided gathers at a time")
    parser.add_argument("--rounds", default="3", help="turns of each method")
    parser.add_argument("--repeats", default="2", help="passes of each turn")
    parser.add_argument("--threads", default="1", help="of each rank")
    parser.add_argument("--single-threads", default="0", help="of the one process; 0: degree x threads")
    parser.add_argument("--output-folder", default="", help="for benchmark_cp.json and benchmark_cp.png")
    args = parser.parse_args(argv)
    for name in ("seq_len", "heads", "kv_heads", "head_dim", "batch_size", "gather_kv_heads", "rounds", "repeats"):
        setattr(args, name, _integer(args, name, least=1))
    args.degree, args.threads = _integer(args, "degree", least=2), _integer(args, "threads", least=1)
    args.single_threads = _integer(args, "single_threads", least=0) or args.degree * args.threads
    _check(args)
    problem = Problem(
        args.seq_len,
        args.heads,
        args.kv_heads,
        args.head_dim,
        args.batch_size,
        args.degree,
        args.load_balancer,
        args.gather_kv_heads,
        args.threads,
        args.single_threads,
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    methods = [_method(name, problem) for name in _names("methods", args.methods)]
    return problem, methods, _dtypes(args.dtypes, problem.device_type), args


def _integer(args: argparse.Namespace, name: str, *, least: int) -> int:
    text, flag = vars(args)[name], name.replace("_", "-")
    if not re.fullmatch(r"[0-9]+", text) or int(text) < least:
        fact, rule = "not a count that is possible", f"it is an integer of {least} or more"
        raise option_error(flag, text, fact, rule, "use such a one, or leave the option out for its default")
    return int(text)


def _names(flag: str, text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) != len(names):
        fact = "a name is empty or given twice"
        raise option_error(flag, text, fact, "names are separated by commas, each given once", "mend the list")
    return names


def _dtypes(text: str, device_type: str) -> list[torch.dtype]:
    names = _names("dtypes", text)
    known = [name for name in _DTYPES if device_type == "cpu" or name != "float64"]  # CUDA's kernels know no fp64
    for name in names:
        if name not in known:
            fact = f"unknown dtype {name!r} on {device_type}{nearest(name, known)}"
            raise option_error("dtypes", text, fact, f"allowed: {', '.join(known)}", "choose from these")
    return [_DTYPES[name] for name in names]


def _check(args: argparse.Namespace) -> None:
    if args.heads % args.kv_heads:
        fact, rule = f"{args.heads} query heads are no multiple of it", "each key/value head serves equally many"
        raise option_error("kv-heads", args.kv_heads, fact, rule, "give a divisor of --heads")
    if args.gather_kv_heads > args.kv_heads:
        fact, rule = f"there are {args.kv_heads} key/value heads", "no more than those can travel at a time"
        raise option_error("gather-kv-heads", args.gather_kv_heads, fact, rule, "give --kv-heads or less")
    if args.load_balancer not in CAUSAL_BALANCERS:
        fact = f"unknown load balancer{nearest(args.load_balancer, CAUSAL_BALANCERS)}"
        rule = f"allowed: {', '.join(CAUSAL_BALANCERS)}"
        raise option_error("load-balancer", args.load_balancer, fact, rule, "choose from these")
    if torch.cuda.is_available() and args.degree > torch.cuda.device_count():
        fact, rule = f"{torch.cuda.device_count()} CUDA devices are visible", "each rank needs one of its own"
        raise option_error("degree", args.degree, fact, rule, "hide them by CUDA_VISIBLE_DEVICES= to use the CPU")


def _output_folder(name: str) -> Path | None:
    """Return the folder, made if need be."""
    if not name:
        return None
    if not importlib.util.find_spec("matplotlib"):
        fact, rule = "matplotlib is not installed", "it draws the plot"
        raise option_error("output-folder", name, fact, rule, "install it, or leave the option out")
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fact, rule = f"no such folder can be made ({error.strerror})", "results are files in a folder"
        raise option_error("output-folder", name, fact, rule, "name another") from None
    return Path(name)


def _method(name: str, problem: Problem) -> Method:
    """Return the method of a name, checked against the problem."""
    match = re.fullmatch(r"ulysses([0-9]+)-(.+)", name)
    known = [*_METHODS, "ulysses", *(f"ulysses{u}-{base}" for u in _hybrid_degrees(problem) for base in _METHODS)]
    if name not in known:
        rule = f"allowed: {', '.join([*_METHODS, 'ulysses'])}, and ulysses<u>-METHOD where 1 < u < degree divides it"
        fact = f"unknown method with --degree={problem.degree}{nearest(name, known)}"
        raise option_error("methods", name, fact, rule, "choose from these")
    if match:
        method = Method(name, match[2], int(match[1]))
    else:
        method = Method(name, "ring", problem.degree) if name == "ulysses" else Method(name, name, 1)
    if problem.num_heads % method.ulysses_degree:
        fact, rule = f"{problem.num_heads} query heads do not divide by {method.ulysses_degree}", "Ulysses shares them"
        raise option_error("methods", name, fact, rule, "give --heads a multiple, or leave the method out")
    factor = seq_len_factor(problem.degree, problem.load_balancer, ulysses_degree=method.ulysses_degree)
    if problem.seq_len % factor:
        fact, rule = f"{problem.seq_len} is not a multiple of {factor}", f"{name} cuts it in {factor} equal chunks"
        below = problem.seq_len // factor * factor
        remedy = f"use {below} or {below + factor}" if below else f"use {factor}"
        raise option_error("seq-len", problem.seq_len, fact, rule, remedy)
    return method


def _hybrid_degrees(problem: Problem) -> list[int]:
    return [u for u in range(2, problem.degree) if problem.degree % u == 0]


class RankError(Exception):
    """A rank failed; the message holds its traceback."""


class Ranks:
    """The processes of the methods, which wait for orders."""

    def __init__(self, problem: Problem, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")  # its server has loaded this file, and torch, once for all
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(problem.degree):
            ours, theirs = context.Pipe()
            process = context.Process(target=rank_main, args=(rank, problem, folder, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, order: str, *arguments: Any) -> list[Any]:
        """Have every rank carry out an order; returns their answers.

        Raises:
            RankError: a rank failed or died.
        """
        for pipe in self.pipes:
            pipe.send((order, *arguments))
        answers: dict[int, Any] = {}
        while len(answers) < len(self.pipes):
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting)  # whichever comes first: a rank that failed leaves the others in a collective
            answers.update({rank: self._answer(rank) for rank, pipe in enumerate(self.pipes) if pipe in ready})
        return [answers[rank] for rank in range(len(self.pipes))]

    def _answer(self, rank: int) -> Any:
        try:
            done, answer = self.pipes[rank].recv()
        except EOFError:
            raise RankError(f"rank {rank} died without an answer") from None
        if not done:
            raise RankError(f"rank {rank} failed:\n{answer}")
        return answer

    def stop(self) -> None:
        """End the processes."""
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.kill()
            process.join()


def rank_main(rank: int, problem: Problem, folder: str, pipe: Connection) -> None:
    """Be one rank: carry out orders until the other end is closed."""
    torch.set_num_threads(problem.threads)
    keep_freed_memory()
    # The mesh reads its devices from these.
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": problem.degree, "LOCAL_WORLD_SIZE": problem.degree}
    os.environ.update({name: str(value) for name, value in environment.items()})
    try:
        if problem.device_type == "cuda":
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if problem.device_type == "cuda" else "gloo"
        store = dist.FileStore(str(Path(folder) / "store"), problem.degree)
        dist.init_process_group(backend, store=store, rank=rank, world_size=problem.degree)
        worker = Rank(problem, Path(folder), dist.new_group(backend="gloo"))
        orders: dict[str, Callable[..., Any]] = {"check": worker.check, "time": worker.time}
        while True:
            order, *arguments = pipe.recv()
            pipe.send((True, orders[order](*arguments)))
    except (EOFError, ConnectionError):
        return
    except BaseException:
        pipe.send((False, traceback.format_exc()))


class Rank:
    """What one rank does on order."""

    def __init__(self, problem: Problem, folder: Path, barrier_group: dist.ProcessGroup) -> None:
        self.problem = problem
        self.folder = folder
        self.barrier_group = barrier_group
        self.attentions: dict[Method, tuple[ScaledDotProductAttention, DeviceMesh]] = {}
        self.inputs: tuple[Method, torch.dtype, Inputs] | None = None  # of the last order

    def check(self, method: Method, dtype: torch.dtype) -> Check:
        """Measure all but times."""
        attention, inputs = self._prepare(method, dtype)
        with count_attention_work() as work, count_traffic() as sent:
            out = attention(*inputs[:3])
        with count_traffic() as sent_backward:
            grads = torch.autograd.grad(out, inputs[:3], inputs.grad)
        references = self._cut("reference", method, dtype)
        pairs = zip([out.detach(), *grads], references, strict=True)
        differences = [(_largest(ours.double() - whole.double()), _largest(whole)) for ours, whole in pairs]
        del out, grads, references, pairs
        dist.barrier(self.barrier_group)
        peak = peak_bytes(lambda: passes(attention, inputs, 1, lambda: dist.barrier(self.barrier_group)))
        return Check(sent.bytes, sent_backward.bytes, work.pairs, peak, differences)

    def time(self, method: Method, dtype: torch.dtype, repeats: int) -> list[Times]:
        """Time passes; each forward and each backward starts at a barrier."""
        attention, inputs = self._prepare(method, dtype)
        return passes(attention, inputs, repeats, lambda: dist.barrier(self.barrier_group))

    def _prepare(self, method: Method, dtype: torch.dtype) -> tuple[ScaledDotProductAttention, Inputs]:
        if method not in self.attentions:
            mesh = method.mesh(self.problem)
            self.attentions[method] = method.attention(self.problem, mesh), mesh
        if self.inputs is None or self.inputs[:2] != (method, dtype):
            self.inputs = None
            q, k, v, grad = self._cut("inputs", method, dtype)
            self.inputs = method, dtype, Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad)
        return self.attentions[method][0], self.inputs[2]

    def _cut(self, name: str, method: Method, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return this rank's shards of the tensors in one of the single process's files."""
        wholes = torch.load(_file(self.folder, name, dtype), mmap=True, map_location=_device(self.problem))
        mesh = self.attentions[method][1]
        shards = cp_shard(mesh, wholes, load_balancer=self.problem.load_balancer, seq_dim=2)
        return [shard.clone(memory_format=torch.contiguous_format) for shard in shards]  # none of them in the file


def _file(folder: Path, name: str, dtype: torch.dtype) -> Path:
    return folder / f"{name}-{_dtype_name(dtype)}.pt"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device(problem: Problem) -> torch.device:
    if problem.device_type == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _largest(tensor: torch.Tensor) -> float:
    value = float(tensor.abs().max())
    return value if math.isfinite(value) else math.inf  # NaN would be lost in a later maximum


def passes(
    attention: ScaledDotProductAttention, inputs: Inputs, repeats: int, barrier: Callable[[], None]
) -> list[Times]:
    """Return the seconds of forward and backward, `repeats` times."""
    times = []
    for _ in range(repeats):
        barrier()
        start = _now(inputs)
        out = attention(*inputs[:3])
        forward = _now(inputs) - start
        barrier()
        start = _now(inputs)
        grads = torch.autograd.grad(out, inputs[:3], inputs.grad)
        times.append(Times(forward, _now(inputs) - start))
        del out, grads
    return times


def _now(inputs: Inputs) -> float:
    if inputs.q.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_bytes(run: Callable[[], Any]) -> int | None:
    """Return how far `run` drives this process's memory above what it holds, in bytes; None: not known here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    if platform.libc_ver()[0] != "glibc" or not _CLEAR_REFS.exists():
        run()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed and kept is used again, and not seen
    _CLEAR_REFS.write_text("5")  # sets the high-water mark to what is resident now
    before = _high_water_bytes()
    run()
    return max(_high_water_bytes() - before, 0)


def _high_water_bytes() -> int:
    fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def compare(
    problem: Problem,
    methods: list[Method],
    dtype: torch.dtype,
    ranks: Ranks,
    folder: Path,
    rounds: int,
    repeats: int,
) -> list[dict[str, Any]]:
    """Return the rows of one dtype, as they are written to JSON: one process first, then the methods."""
    attention, inputs = ScaledDotProductAttention(), _random_inputs(problem, dtype)
    _write_files(attention, inputs, folder, dtype)
    peak = peak_bytes(lambda: passes(attention, inputs, 1, _no_barrier))
    checks = {method.name: ranks.ask("check", method, dtype) for method in methods}
    times: dict[str, list[Times]] = {name: [] for name in [_SINGLE, *checks]}
    for _ in range(rounds):
        times[_SINGLE].append(_turn([passes(attention, inputs, repeats, _no_barrier)]))
        for method in methods:
            times[method.name].append(_turn(ranks.ask("time", method, dtype, repeats)))
    for file in folder.glob("*.pt"):
        file.unlink()
    rows = [_time_columns(dtype, name, times) for name in times]
    rows[0]["peak_bytes"] = [peak]
    for row, method in zip(rows[1:], methods, strict=True):
        row.update(_check_columns(problem, method, dtype, checks[method.name]))
    return rows


def _no_barrier() -> None:
    pass


def _random_inputs(problem: Problem, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        shape = (problem.batch_size, heads, problem.seq_len, problem.head_dim)
        return torch.randn(shape, generator=generator).to(_device(problem), dtype)

    q, k, v = (draw(heads).requires_grad_() for heads in (problem.num_heads, *[problem.num_kv_heads] * 2))
    return Inputs(q, k, v, draw(problem.num_heads))


def _write_files(attention: ScaledDotProductAttention, inputs: Inputs, folder: Path, dtype: torch.dtype) -> None:
    """Write the inputs, and the output and gradients that the methods are compared with, for all ranks."""
    out = attention(*inputs[:3])
    grads = torch.autograd.grad(out, inputs[:3], inputs.grad)
    for name, tensors in (("inputs", inputs), ("reference", (out, *grads))):
        torch.save([tensor.detach().cpu() for tensor in tensors], _file(folder, name, dtype))


def _turn(by_rank: list[list[Times]]) -> Times:
    """Return the median over repeats of the slowest rank's times."""
    slowest = [Times(*(max(phase) for phase in zip(*times, strict=True))) for times in zip(*by_rank, strict=True)]
    return Times(*(statistics.median(phase) for phase in zip(*slowest, strict=True)))


def _time_columns(dtype: torch.dtype, name: str, times: dict[str, list[Times]]) -> dict[str, Any]:
    medians = {each: [statistics.median(phase) for phase in zip(*turns, strict=True)] for each, turns in times.items()}
    total = sum(medians[name])
    return {
        "dtype": _dtype_name(dtype),
        "method": name,
        "forward_s": medians[name][0],
        "backward_s": medians[name][1],
        "total_s": total,
        "total_over_single": total / sum(medians[_SINGLE]),
        "total_over_ring": total / sum(medians["ring"]) if "ring" in medians else None,
        "forward_rounds_s": [turn.forward for turn in times[name]],
        "backward_rounds_s": [turn.backward for turn in times[name]],
    }


def _check_columns(problem: Problem, method: Method, dtype: torch.dtype, checks: list[Check]) -> dict[str, Any]:
    """Return what was counted, by rank, and the largest errors over the ranks."""
    predicted = [method.sent_bytes(problem, dtype, rank) for rank in range(problem.degree)]
    tensors = zip(*(check.differences for check in checks), strict=True)  # output, dq, dk, dv: one pair for each rank
    errors = [max(pair[0] for pair in pairs) / max(pair[1] for pair in pairs) for pairs in tensors]
    return {
        "sent_forward_bytes": [check.sent_forward for check in checks],
        "sent_backward_bytes": [check.sent_backward for check in checks],
        "predicted_forward_bytes": [forward for forward, _ in predicted],
        "predicted_backward_bytes": [backward for _, backward in predicted],
        "work_shares": [check.pairs * problem.degree / problem.causal_pairs() for check in checks],
        "peak_bytes": [check.peak_bytes for check in checks],
        "output_error": errors[0],
        "gradient_error": max(errors[1:]),
    }


def _heading(problem: Problem) -> str:
    device = torch.cuda.get_device_name() if problem.device_type == "cuda" else "CPU"
    return (
        f"torch {torch.__version__}, {device}; {problem.batch_size} x {problem.seq_len:,} tokens, {problem.num_heads} "
        f"query heads, {problem.num_kv_heads} key/value heads, head dim {problem.head_dim}; {problem.degree} ranks, "
        f"load balancer {problem.load_balancer}; threads: {problem.threads} per rank, {problem.single_threads} in the "
        "one process"
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows of `compare` as lines of aligned columns."""
    heads = ["dtype", "method", "forward s", "backward s", "/ one process", "/ ring", "sent forward MiB"]
    heads += ["sent backward MiB", "work", "peak MiB", "output error", "gradient error"]
    lines = [heads, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    ring = row["total_over_ring"]
    cells = [row["dtype"], row["method"], f"{row['forward_s']:.4f}", f"{row['backward_s']:.4f}"]
    cells += [f"{row['total_over_single']:.2f}", "-" if ring is None else f"{ring:.2f}"]
    peak = _by_rank(row["peak_bytes"], lambda count: "-" if count is None else f"{count / _MIB:.1f}")
    if row["method"] == _SINGLE:
        return [*cells, "-", "-", "-", peak, "-", "-"]
    sent = [_sent(row[f"sent_{phase}_bytes"], row[f"predicted_{phase}_bytes"]) for phase in _PHASES]
    errors = [f"{row[name]:.1e}" for name in ("output_error", "gradient_error")]
    return [*cells, *sent, _by_rank(row["work_shares"], lambda share: f"{share:.3f}"), peak, *errors]


def _sent(counted: list[int], predicted: list[int]) -> str:
    shown = [_by_rank(counts, lambda count: f"{count / _MIB:.3f}") for counts in (counted, predicted)]
    return f" {'=' if counted == predicted else '!='} ".join(shown)


def _by_rank(values: list[Any], show: Callable[[Any], str]) -> str:
    """Return all ranks' values, or one where they look alike."""
    shown = [show(value) for value in values]
    return shown[0] if len(set(shown)) == 1 else "/".join(shown)


def save(folder: Path, problem: Problem, rounds: int, repeats: int, rows: list[dict[str, Any]]) -> None:
    """Write benchmark_cp.json and benchmark_cp.png."""
    settings = {**asdict(problem), "rounds": rounds, "repeats": repeats, "torch": torch.__version__}
    text = json.dumps({"settings": settings, "rows": rows}, indent=2)
    (folder / "benchmark_cp.json").write_text(text + "\n", encoding="utf-8")
    plot(folder / "benchmark_cp.png", rows, _heading(problem))


def plot(file: Path, rows: list[dict[str, Any]], heading: str) -> None:
    """Draw times, bytes sent and peak memory of the slowest or largest rank; a column of panels for each dtype."""
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    figure = Figure(figsize=(1 + 6 * len(dtypes), 10), layout="constrained")
    panels: Any = figure.subplots(3, len(dtypes), squeeze=False, sharey="row")
    for column, dtype in enumerate(dtypes):
        part = [row for row in rows if row["dtype"] == dtype]
        _draw(panels[0, column], part, {phase: [row[f"{phase}_s"] for row in part] for phase in _PHASES})
        panels[0, column].axhline(part[0]["total_s"], color="grey", linestyle="--", linewidth=1)
        for place, row in enumerate(part):
            panels[0, column].text(place, row["total_s"], f"{row['total_over_single']:.2f}", ha="center", va="bottom")
        sent = {phase: [_mib(row.get(f"sent_{phase}_bytes", [0])) for row in part] for phase in _PHASES}
        _draw(panels[1, column], part, sent)
        _draw(panels[2, column], part, {"": [_mib(row["peak_bytes"]) for row in part]})
        panels[0, column].set_title(dtype)
    labels = ("seconds (above: over one process)", "sent by a rank, MiB", "peak memory, MiB")
    for panel, label in zip(panels[:, 0], labels, strict=True):
        panel.set_ylabel(label)
    panels[0, 0].legend()
    figure.suptitle(heading, wrap=True, fontsize="small")
    figure.savefig(file, dpi=120)


def _mib(by_rank: list[int | None]) -> float:
    return max(count or 0 for count in by_rank) / _MIB


def _draw(panel: Any, rows: list[dict[str, Any]], stacked: dict[str, list[float]]) -> None:
    """Draw one bar for each row, of parts that are stacked."""
    bottom = [0.0] * len(rows)
    for (label, values), color in zip(stacked.items(), ("#4477aa", "#ee9944"), strict=False):
        panel.bar(range(len(rows)), values, bottom=bottom, label=label, color=color if label else "#888888")
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    panel.set_xticks(range(len(rows)), [row["method"] for row in rows], rotation=30, ha="right")
    panel.margins(y=0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
