"""Time this trainer beside a plain loop over Hugging Face `transformers`, and context parallelism beside one process.

    python scripts/benchmark.py [--rounds 3] [--steps 6]

Each line compares two commands that run turn by turn in this one call, so that a noisy machine disturbs both; a round's
figure is the median step after two of warm-up, and the ratio is that of the medians over all rounds.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_CONFIG = _ROOT / "torchtitan/models/llama3/train_configs/debug_model.toml"
_WARMUP = 2  # steps that are not counted


def main() -> None:
    """Print the table; with --transformers-loop, be the other side of one comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times that each pair is run")
    parser.add_argument("--steps", type=int, default=6, help="steps counted per run")
    parser.add_argument("--only", default="", help="part of the name of the comparisons to run")
    parser.add_argument("--transformers-loop", nargs=3, metavar=("DTYPE", "SEQ_LEN", "STEPS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers_loop:
        dtype, seq_len, steps = args.transformers_loop
        print(json.dumps(transformers_loop(dtype, int(seq_len), int(steps))))
        return
    threads = os.cpu_count() or 1
    steps = args.steps + _WARMUP
    pairs: list[tuple[str, str, Callable[[], list[float]], Callable[[], list[float]]]] = [
        (
            f"{dtype}, seq_len 2,048, one process, {threads} threads: tokens/s of this trainer over transformers'",
            "speed",
            lambda dtype=dtype: trainer_steps(1, threads, steps, f"--training.mixed_precision_param={dtype}"),
            lambda dtype=dtype: transformers_steps(threads, steps, dtype),
        )
        for dtype in ("float32", "bfloat16")
    ] + [
        (
            f"{dtype}, seq_len 8,192: step time of cp 2 with one thread each over one process with two threads",
            "time",
            lambda dtype=dtype: trainer_steps(
                2,
                1,
                steps,
                "--training.seq_len=8192",
                f"--training.mixed_precision_param={dtype}",
                "--parallelism.context_parallel_degree=2",
            ),
            lambda dtype=dtype: trainer_steps(
                1, 2, steps, "--training.seq_len=8192", f"--training.mixed_precision_param={dtype}"
            ),
        )
        for dtype in ("float32", "bfloat16")
    ]
    for name, kind, ours, other in pairs:
        if args.only in name:
            print(compare(name, kind, ours, other, args.rounds), flush=True)


def compare(
    name: str, kind: str, ours: Callable[[], list[float]], other: Callable[[], list[float]], rounds: int
) -> str:
    """Run both sides turn by turn; returns one line with both step times in seconds and their ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, run in enumerate((ours, other)):
            times[side].append(statistics.median(run()[_WARMUP:]))
    a, b = (statistics.median(side) for side in times)
    ratio = b / a if kind == "speed" else a / b
    rounds_a, rounds_b = (" ".join(f"{seconds:.3f}" for seconds in side) for side in times)
    return f"{name}: {ratio:.2f}  ({a:.3f} s against {b:.3f} s a step; rounds {rounds_a} | {rounds_b})"


def trainer_steps(processes: int, threads: int, steps: int, *options: str) -> list[float]:
    """Train by the real entry point; returns seconds per step."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"]
        command = [sys.executable, *(launcher if processes > 1 else ["-m"]), "torchtitan.train"]
        command += [f"--job.config_file={_CONFIG}", f"--job.dump_folder={folder}", f"--training.steps={steps}"]
        command += ["--metrics.log_freq=1", "--lr_scheduler.warmup_steps=0", *options]
        _run(command, threads)
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    tokens = [rows[0]["tokens_seen"]] + [b["tokens_seen"] - a["tokens_seen"] for a, b in itertools.pairwise(rows)]
    return [count / row["tokens_per_second"] for count, row in zip(tokens, rows, strict=True)]


def transformers_steps(threads: int, steps: int, dtype: str) -> list[float]:
    """Run the plain loop in a process of its own; returns seconds per step."""
    command = [sys.executable, __file__, "--transformers-loop", dtype, "2048", str(steps)]
    return json.loads(_run(command, threads).splitlines()[-1])


def _run(command: list[str], threads: int) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(_ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")
    return result.stdout


def transformers_loop(dtype: str, seq_len: int, steps: int) -> list[float]:
    """Train transformers' Llama of the debug model's size on random tokens; returns seconds per step."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=131072,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, 4096, (1, seq_len))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    main()
