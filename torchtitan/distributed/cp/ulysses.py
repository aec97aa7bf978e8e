"""Ulysses: around the attention, ranks exchange tokens for heads. Source: arXiv:2309.14509.

Letters: U ranks that exchange, B batch, H query heads, K key/value heads, n local tokens, E head dim.
"""

from typing import Any

import torch
from torch import library, nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan.config.cp_method import exchanged_kv_heads
from torchtitan.distributed.collectives import all_to_all
from torchtitan.distributed.cp.torch_private import resolve_group


def apply_ulysses_in(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have an attention module see all tokens of its exchange group for a share of the heads, in place."""
    group, degree = mesh.get_group().group_name, mesh.size()

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        q, k, v, *mask = inputs
        return *heads_for_tokens(q, k, v, group=group, degree=degree), *mask

    module.register_forward_pre_hook(before)


def apply_ulysses_out(module: nn.Module, mesh: DeviceMesh) -> None:
    """Have the output of an attention module go back to where its tokens came from, in place."""
    group, degree = mesh.get_group().group_name, mesh.size()

    def after(module: nn.Module, inputs: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        return tokens_for_heads(out, group=group, degree=degree)

    module.register_forward_hook(after)


def heads_for_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, group: str, degree: int
) -> tuple[torch.Tensor, ...]:
    """Exchange once for all three: [B, H, n, E], 2 x [B, K, n, E] -> [B, H/U, U n, E], 2 x [B, K'/U, U n, E]."""
    repeats = exchanged_kv_heads(q.size(1), k.size(1), degree) // k.size(1)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    shares = [tensor.unflatten(1, (degree, -1)) for tensor in (q, k, v)]  # [B, U, H/U, n, E] each
    parts = torch.cat(shares, dim=2).movedim(1, 0)  # [U, B, heads, n, E], part i for rank i
    received = exchange(parts, group).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [B, heads, U n, E]
    return received.split([share.size(2) for share in shares], dim=1)


def tokens_for_heads(out: torch.Tensor, *, group: str, degree: int) -> torch.Tensor:
    """Undo the exchange for the output: [B, H/U, U n, E] -> [B, H, n, E]."""
    parts = out.unflatten(2, (degree, -1)).movedim(2, 0)  # [U, B, H/U, n, E], part i for rank i
    return exchange(parts, group).movedim(0, 1).flatten(1, 2)


@library.custom_op("torchtitan::exchange", mutates_args=())
def exchange(parts: torch.Tensor, group: str) -> torch.Tensor:
    """Send part i to rank i of the group, and return what came from each: [U, *shape] both."""
    return all_to_all(parts, resolve_group(group))


@exchange.register_fake
def _(parts: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.group = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return exchange(grad, ctx.group), None


exchange.register_autograd(_backward, setup_context=_save)
EXCHANGE_OP = torch.ops.torchtitan.exchange.default
