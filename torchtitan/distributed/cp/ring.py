"""Method `ring`: torch's ring attention on an inner attention module, told its layout for each call.

Letters: B batch, H heads, S local sequence, E head dim.
"""

from collections.abc import Callable
from typing import Any

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
    """The two ends of one attention module: what its backward needs to find, call by call."""

    def __init__(self, rotate_method: str, balanced: bool) -> None:
        self.rotate_method = rotate_method
        self.balanced = balanced
        self.calls: list[list[State]] = []  # of the calls in progress: where their backward keeps the state it found

    def settings(self, dtype: torch.dtype) -> RingSettings:
        return RingSettings(self.balanced, self.rotate_method, accumulate_in_fp32=dtype != torch.float64)

    def before(self, module: nn.Module, qkv: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        self.calls.append([])
        return _LeaveBackward.apply(self.calls[-1], *qkv)

    def after(self, module: nn.Module, qkv: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return _EnterBackward.apply(out, self.settings(out.dtype), self.calls.pop())

    def around(self, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def ring_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            with ring_scope(self.settings(q.dtype)):
                return forward(q, k, v)

        return ring_forward


def apply_ring(module: nn.Module, cp_mesh: DeviceMesh, *, rotate_method: str, balanced: bool) -> None:
    """Make an inner attention module a ring over the cp axis, in place; it takes and returns local [B, H, S, E]."""
    hooks = _RingHooks(rotate_method, balanced)
    module.register_forward_pre_hook(hooks.before)
    register_plan(module, cp_mesh)
    module.register_forward_hook(hooks.after)
    module.forward = hooks.around(module.forward)
