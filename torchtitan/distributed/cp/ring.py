"""Method `ring`: torch's ring attention on an inner attention module, told its layout for each call.

Letters: B batch, H heads, S local sequence, E head dim.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.distributed.cp.torch_private import (
    RingSettings,
    State,
    enter_ring,
    register_plan,
    ring_scope,
    write_state,
)


class _EnterBackward(torch.autograd.Function):
    """Identity on the attention's output; its backward comes before the ring's and sets torch's state for it."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, settings: RingSettings, found: list[State]) -> torch.Tensor:
        ctx.settings, ctx.found = settings, found
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.found.append(enter_ring(ctx.settings))
        return grad, None, None


class _LeaveBackward(torch.autograd.Function):
    """Identity on q, k and v; its backward comes after the ring's and puts torch's state back."""

    @staticmethod
    def forward(ctx: Any, found: list[State], *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.found = found
        return tuple(tensor.view_as(tensor) for tensor in qkv)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        write_state(ctx.found.pop())
        return None, *grads


class _RingHooks:
    """The two ends of one attention module: what its backward needs to find, call by call.

    While torch.compile traces, they do nothing: collectives and kernels become part of the graph, forward and
    backward, and what the trace needs to find is set around the compiled code (`compiled_ring_scope`).
    """

    def __init__(self, rotate_method: str, balanced: bool) -> None:
        self.rotate_method = rotate_method
        self.balanced = balanced
        self.calls: list[list[State]] = []  # of the calls in progress: where their backward keeps the state it found

    def settings(self, dtype: torch.dtype) -> RingSettings:
        return RingSettings(self.balanced, self.rotate_method, accumulate_in_fp32=dtype != torch.float64)

    def before(self, module: nn.Module, qkv: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if torch.compiler.is_compiling():
            return qkv
        self.calls.append([])
        return _LeaveBackward.apply(self.calls[-1], *qkv)

    def after(self, module: nn.Module, qkv: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return out
        return _EnterBackward.apply(out, self.settings(out.dtype), self.calls.pop())

    def around(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def ring_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return forward(q, k, v)
            with ring_scope(self.settings(q.dtype)):
                return forward(q, k, v)

        return ring_forward


_HOOKS: "WeakKeyDictionary[nn.Module, _RingHooks]" = WeakKeyDictionary()  # of every module that is a ring


def apply_ring(module: nn.Module, cp_mesh: DeviceMesh, *, rotate_method: str, balanced: bool) -> None:
    """Make an inner attention module a ring over the cp axis, in place; it takes and returns local [B, H, S, E]."""
    hooks = _RingHooks(rotate_method, balanced)
    module.register_forward_pre_hook(hooks.before)
    register_plan(module, cp_mesh)
    module.register_forward_hook(hooks.after)
    module.forward = hooks.around(module.forward)
    _HOOKS[module] = hooks


def compiled_ring_scope(block: nn.Module, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return what must surround the compiled forward of a block whose attention may be a ring, as it may be traced."""
    hooks = next((_HOOKS[module] for module in block.modules() if module in _HOOKS), None)
    return nullcontext() if hooks is None else ring_scope(hooks.settings(dtype))
