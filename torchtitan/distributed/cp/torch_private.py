"""The only importer of torch's private context-parallel names, and the only code that touches their global state.

torch keeps how its ring attention works in one process-wide object, which is read when a kernel runs, forward and
backward. `ring_scope` sets it for one call and restores what it found, so that two models, or two layouts, in one
process cannot disturb each other. Names used exist in torch 2.11 to 2.14.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as _torch_cp
from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
    _HeadTailLoadBalancer,
    _PTRRLoadBalancer,
)
from torch.distributed.tensor.parallel import parallelize_module

from torchtitan.tools.device import kernel_dtype

_SEQ_DIM = 2  # of q, k and v: [B, H, S, E]
_ROTATE_METHODS = {"allgather": _torch_cp._RotateMethod.ALL_GATHER, "alltoall": _torch_cp._RotateMethod.ALL_TO_ALL}
_aten = torch.ops.aten


@dataclass(frozen=True)
class RingSettings:
    """What torch's ring attention reads from its process-wide options."""

    balanced: bool  # head-tail placement; False: contiguous
    rotate_method: str  # "allgather" or "alltoall"
    accumulate_in_fp32: bool  # merge partial results in fp32; False: in the inputs' dtype, for fp64


State = tuple[bool, Any, bool, dict[Any, Callable[..., Any]]]


def read_state() -> State:
    """Return all of torch's process-wide context-parallel state that a ring call depends on."""
    options = _torch_cp._cp_options
    handlers = DTensor._op_dispatcher._custom_op_handlers
    return options.enable_load_balance, options.rotate_method, options.convert_to_f32, handlers


def write_state(state: State) -> None:
    """Put back what `read_state` returned."""
    options = _torch_cp._cp_options
    options.enable_load_balance, options.rotate_method, options.convert_to_f32 = state[:3]
    DTensor._op_dispatcher._custom_op_handlers = state[3]


def enter_ring(settings: RingSettings) -> State:
    """Set torch's state for a ring call; returns the state found, for `write_state`."""
    found = read_state()
    ours = {**_torch_cp.custom_ops, **_CPU_HANDLERS}
    handlers = {**found[3], **{op: _restoring(handler, found) for op, handler in ours.items()}}
    write_state((settings.balanced, _ROTATE_METHODS[settings.rotate_method], settings.accumulate_in_fp32, handlers))
    return found


def _restoring(handler: Callable[..., Any], found: State) -> Callable[..., Any]:
    """Return `handler`, putting back the state found where it raises: a failed backward reaches no later hook."""

    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            return handler(*args, **kwargs)
        except BaseException:
            write_state(found)
            raise

    return handle


@contextmanager
def ring_scope(settings: RingSettings) -> Iterator[None]:
    """Have torch's state as `settings` inside, and as it was found afterwards."""
    found = enter_ring(settings)
    try:
        yield
    finally:
        write_state(found)


@contextmanager
def _preserved_state() -> Iterator[None]:
    found = read_state()
    try:
        yield
    finally:
        write_state(found)


def register_plan(module: nn.Module, mesh: DeviceMesh) -> None:
    """Register torch's `_ContextParallel` plan for SDPA on an inner attention module, in place."""
    with _preserved_state():
        _torch_cp._enable_context_parallel_dispatcher()  # for its sharding rules; the handlers are ours to switch
    sdpa = _torch_cp._ContextParallel.AttentionType.SDPA
    parallelize_module(module, mesh, _torch_cp._ContextParallel(seq_dim=_SEQ_DIM, attention_type=sdpa))


def head_tail_indices(seq_len: int, degree: int, device: torch.device, *, restore: bool) -> torch.Tensor:
    """Return head-tail's permutation of a sequence, or its inverse: int64 [S]."""
    return _HeadTailLoadBalancer(seq_len, degree, device)._generate_indices(restore=restore)[0]


def ptrr_groups(costs: np.ndarray, degree: int) -> np.ndarray:
    """Return torch's round-robin of tasks by cost: int64 [tasks] -> int64 [P, tasks / P], the tasks of each rank."""
    return _PTRRLoadBalancer.ptrr_scheduling(torch.from_numpy(costs), degree).numpy()


def shard(
    mesh: DeviceMesh, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], *, seq_len: int, balanced: bool
) -> list[torch.Tensor]:
    """Return this rank's shards by torch's `_context_parallel_shard`, whose global side effects are undone."""
    balancer = _HeadTailLoadBalancer(seq_len, mesh.size(), buffers[0].device) if balanced else None
    with _preserved_state():
        shards = _torch_cp._context_parallel_shard(mesh, list(buffers), list(seq_dims), load_balancer=balancer)
    return [shard for shard in shards if isinstance(shard, torch.Tensor)]  # all of them: no BlockMask was given


def resolve_group(name: str) -> dist.ProcessGroup:
    """Return the process group of a name: an operator of torch's library can take the name only."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(tensor, mesh, [Shard(_SEQ_DIM)], run_check=False)


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    dtype = kernel_dtype(query)
    operands = [tensor.to(dtype).contiguous() for tensor in (query, key, value)]
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(*operands, **kwargs)
    return out, lse  # out stays in the kernel's dtype: torch merges the parts in fp32


def _flash_backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    dtype = kernel_dtype(query)
    operands = [tensor.to(dtype).contiguous() for tensor in (kwargs.pop("grad_out"), query, key, value)]
    out = kwargs.pop("out").to(dtype)
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(*operands, out, **kwargs)


def _cpu_forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, DTensor]:
    """Handle SDPA's CPU flash kernel on DTensors: torch's own ring template with that kernel.

    torch ships handlers for CUDA kernels only. Can go when it has one for the CPU.
    """
    query, key, value, dropout_p, is_causal = _bind(op, args, kwargs)
    mesh = query.device_mesh
    out, lse = _torch_cp._templated_ring_attention(
        mesh.get_group(),
        _SEQ_DIM,
        _flash_forward,
        query=_local(query),
        key=_local(key),
        value=_local(value),
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return _sharded(out.to(query.dtype), mesh), _sharded(lse, mesh)


def _cpu_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    grad_out, query, key, value, out, lse, dropout_p, is_causal = _bind(op, args, kwargs)[:8]
    mesh = query.device_mesh
    grads = _torch_cp._templated_ring_attention_backward(
        mesh.get_group(),
        _SEQ_DIM,
        _flash_backward,
        grad_out=_local(grad_out),
        grad_out_name="grad_out",
        query=_local(query),
        key=_local(key),
        value=_local(value),
        out=_local(out),
        logsumexp=_local(lse),
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=kwargs.get("scale"),
    )
    return tuple(_sharded(grad, mesh) for grad in grads[:3])


def _bind(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the op's positional arguments in order, defaults filled in; keyword-only ones are left out."""
    values = list(args)
    for argument in op._schema.arguments[len(args) :]:
        if not argument.kwarg_only:
            values.append(kwargs.get(argument.name, argument.default_value))
    return values


_CPU_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _cpu_forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cpu_backward,
}
