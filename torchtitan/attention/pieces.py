"""Attention piece by piece, over keys that are all here; the operator of a device that holds whole sequences.

Letters: B batch, H query heads, K key/value heads, n queries here, W keys here, E head dim.
"""

from typing import Any

import torch
from torch import library

from torchtitan.attention import kernels
from torchtitan.attention.masks import LayerMask, Piece
from torchtitan.errors import TitanError


def pieces_of(mask_pieces: torch.Tensor) -> list[Piece]:
    """Return the rows of a mask's table."""
    return [Piece(*row) for row in mask_pieces.tolist()]


def forward(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pieces: list[Piece], window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, n, E] and its log-sum-exp [B, H, n], for q [B, H, n, E] and keys [B, K, W, E]."""
    _check(q, pieces)
    operand, keys, values = kernels.operand(q), kernels.operand(keys), kernels.operand(values)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=wide(q), device=q.device)
    for piece in pieces:
        rows, queries, seen = _parts(piece)
        part, part_lse = kernels.forward(
            operand[rows, :, queries].contiguous(), keys[rows, :, seen], values[rows, :, seen], piece.start, window
        )
        out[rows, :, queries] = part
        lse[rows, :, queries] = part_lse
    return out, lse


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pieces: list[Piece],
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of q [B, H, n, E], and of keys and values [2, B, K, W, E] (fp32; fp64 for fp64)."""
    grad, operand, out, keys, values = (kernels.operand(tensor) for tensor in (grad, q, out, keys, values))
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_kv = torch.zeros((2, *keys.shape), dtype=wide(q), device=q.device)
    for piece in pieces:
        rows, queries, seen = _parts(piece)
        parts = [tensor[rows, :, queries].contiguous() for tensor in (grad, operand, out, lse)]
        grad_q[rows, :, queries] = kernels.backward(
            parts[0],
            parts[1],
            keys[rows, :, seen],
            values[rows, :, seen],
            parts[2],
            parts[3],
            piece.start,
            grad_kv[:, rows, :, seen],
            window,
        )
    return grad_q, grad_kv


def _check(q: torch.Tensor, pieces: list[Piece]) -> None:
    """Refuse a mask of other sequences: what no piece names would be left as memory was found."""
    queries = sum(piece.rows * piece.length for piece in pieces)
    if queries != q.size(0) * q.size(2) or max(piece.row + piece.rows for piece in pieces) != q.size(0):
        rows = max(piece.row + piece.rows for piece in pieces)
        raise TitanError(
            f"the mask is of {rows} sequences of {queries // rows} local tokens, the queries of {q.size(0)} sequences "
            f"of {q.size(2)}"
        )


def wide(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that sums are in: fp32, or fp64 for fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _parts(piece: Piece) -> tuple[slice, slice, slice]:
    rows = slice(piece.row, piece.row + piece.rows)
    return rows, slice(piece.query, piece.query + piece.length), slice(piece.first_key, piece.end_key)


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: LayerMask) -> torch.Tensor:
    """Return attention of whole sequences under a mask: [B, H, S, E], 2 x [B, K, S, E] -> [B, H, S, E]."""
    return piecewise_attention(q, k, v, mask.pieces, mask.window)[0]


@library.custom_op("torchtitan::piecewise_attention", mutates_args=())
def piecewise_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pieces: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and its log-sum-exp, as `forward`."""
    return forward(q, k, v, pieces_of(pieces), window)


@library.custom_op("torchtitan::piecewise_attention_backward", mutates_args=())
def piecewise_attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pieces: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    grad_q, grad_kv = backward(grad, q, k, v, out, lse, pieces_of(pieces), window)
    grad_k, grad_v = grad_kv.to(k.dtype)
    return grad_q, grad_k.contiguous(), grad_v.clone()


@piecewise_attention.register_fake
def _(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty(
        q.shape[:3], dtype=wide(q), device=q.device
    )


@piecewise_attention_backward.register_fake
def _(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, pieces, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, pieces)


def _backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
    return *piecewise_attention_backward(grad, *ctx.saved_tensors, ctx.window), None, None


piecewise_attention.register_autograd(_backward, setup_context=_save)
PIECEWISE_OP = torch.ops.torchtitan.piecewise_attention.default
