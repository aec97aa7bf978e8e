"""Train one step on a sequence of 262,144 tokens over 8 CPU ranks, and report its time and memory.

    python scripts/long_context.py [--ranks 8] [options of torchtitan.train]

The model is small (2 layers, dim 128, 2 query heads of 64, 1 key/value head, vocabulary 4,096), so that attention and
the length are what costs; everything is recomputed in the backward, and keys and values are gathered. Printed are the
trainer's own line for the step, and the sum over all processes of their proportional set sizes (PSS, which counts
shared pages once), largest of samples taken twice a second; Linux only.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torchtitan.models import get_spec
from torchtitan.models.llama3.args import Llama3Args
from torchtitan.tools.launch import children
from torchtitan.train import main as train

_FLAVOR = "long_context"
_OPTIONS = {
    "model.flavor": _FLAVOR,
    "training.seq_len": "262144",
    "training.local_batch_size": "1",
    "training.steps": "1",
    "lr_scheduler.warmup_steps": "0",
    "parallelism.context_parallel_method": "gather",
    "activation_checkpoint.mode": "full",
    "comm.init_timeout_seconds": "3600",
    "metrics.log_freq": "1",
}


def main(argv: list[str]) -> int:
    """Be one of the ranks if a launcher started this, else start them and watch; returns the exit code."""
    if "RANK" in os.environ:
        sizes = Llama3Args(128, 2, 2, 1, 256, vocab_size=0, context_length=2**24)
        get_spec("llama3").flavors[_FLAVOR] = sizes
        return train(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="processes that share the sequence")
    args, options = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return watch(args.ranks, [f"--job.dump_folder={folder}", *options])


def watch(ranks: int, options: list[str]) -> int:
    """Run the step on `ranks` processes; prints the largest memory of all together in GiB. Returns the exit code."""
    defaults = {**_OPTIONS, "parallelism.context_parallel_degree": str(ranks)}
    command = [
        sys.executable,
        "-m",
        "torchtitan.tools.launch",
        *(f"--{name}={value}" for name, value in defaults.items()),
    ]
    environment = {**os.environ, "NGPU": str(ranks), "TRAIN_FILE": __file__}
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen([*command, *options], env=environment)
    while process.poll() is None:
        peak = max(peak, sum(_pss_bytes(pid) for pid in _descendants(process.pid)))
        time.sleep(0.5)
    seconds = time.perf_counter() - start
    print(f"{seconds:.1f} s from start to end; largest memory of all processes together: {peak / 2**30:.2f} GiB")
    return process.returncode


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for child in found:
        found += children(child)
    return found


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
