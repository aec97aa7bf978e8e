"""Run a function on several gloo ranks, forked from a server that has torch loaded already."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torchtitan.distributed.context_parallel",
]
_TIMEOUT_S = 120.0


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what `fn(*args)` returns on each of `world_size` ranks; `fn` is a module-level function.

    Raises:
        AssertionError: a rank raised or died; the message holds the first rank's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, world_size, folder, send, fn, args), daemon=True)
            process.start()
            send.close()
            pipes.append(receive)
            processes.append(process)
        try:
            return _collect(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in results], timeout=_TIMEOUT_S)
        assert ready, f"ranks {sorted(set(range(len(pipes))) - set(results))} gave no answer in {_TIMEOUT_S} s"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without an answer") from None
            assert ok, f"rank {rank} failed:\n{value}"
            results[rank] = pickle.loads(value)
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    rank: int, world_size: int, folder: str, send: Connection, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        send.send((True, pickle.dumps(fn(*args))))  # plainly: multiprocessing would share tensors by descriptors
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        send.send((False, traceback.format_exc()))
