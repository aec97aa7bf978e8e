"""Attention of consecutive queries over their causal prefix, by the kernels of torch.

Letters: B batch, H query heads, K key/value heads (H is a multiple of K), E head dim, C queries, N keys.
A query block that starts at token `start` of its sequence attends to keys 0 .. start + C - 1, its row i to
0 .. start + i.
"""

import math

import torch
import torch.nn.functional as F

from torchtitan.distributed.attention_work import record_pairs
from torchtitan.tools.device import kernel_dtype

_aten = torch.ops.aten
# The CPU kernel walks keys in splits of 512 columns, and a row's bits depend on where its last split ends; they depend
# on the rows beside it only where a tile of queries is not full. So prefixes are rounded up to 512 and masked, and
# query blocks to 64 rows: then a row has the bits that the whole sequence in one call gives it.
_KEY_SPLIT = 512
_QUERY_TILE = 64
# Rows per masked call. A masked call computes its whole rectangle, of which half a block's width is in vain; below 768
# rows the kernel works on smaller tiles, which costs more.
_QUERY_BLOCK, _LONG_QUERY_BLOCK, _LONG_PREFIX = 1024, 2048, 12288
# The kernel's causal flag gives the same bits on whole tiles of 256 queries, which it uses from 768 on.
_CAUSAL_TILE, _CAUSAL_MIN = 256, 768
_LOWER_RIGHT = 2  # custom_mask_type of the memory-efficient kernel: the last query attends to all keys


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, C, E] and its log-sum-exp [B, H, C] (fp32; fp64 for fp64).

    k and v [B, K, S, E] are the whole sequence in order; only the prefix is read.
    """
    record_pairs(q.size(0) * q.size(1), q.size(2), start)
    if q.device.type == "cuda":
        end = start + q.size(2)
        return _forward_cuda(q, k[:, :, :end], v[:, :, :end])
    return _forward_cpu(q, k, v, start)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    start: int,
    grad_kv: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of q [B, H, C, E], and add those of k and v to `grad_kv` [2, B, K, S, E].

    The parts of the prefix are independent given the forward's log-sum-exp, so no mask is needed.
    """
    end = start + q.size(2)
    if q.device.type == "cuda":
        grad_q, *grads = _backward_cuda(grad, q, k[:, :, :end], v[:, :, :end], out, lse)
        for total, part in zip(grad_kv, grads, strict=True):
            total[:, :, :end] += part
        return grad_q
    parts = [(0, start, False)] if start else []
    grad_q = torch.zeros(q.shape, dtype=grad_kv.dtype, device=q.device)
    for first, last, causal in [*parts, (start, end, True)]:
        part_q, *grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k[:, :, first:last], v[:, :, first:last], out, lse, 0.0, causal
        )
        grad_q += part_q
        for total, part in zip(grad_kv, grads, strict=True):
            total[:, :, first:last] += part
    return grad_q


def operand(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the kernels want it: contiguous, in the dtype that they are fast in."""
    return tensor.to(kernel_dtype(tensor)).contiguous()


def _forward_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    length = q.size(2)
    if start == 0 and length % _CAUSAL_TILE == 0 and length >= _CAUSAL_MIN:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k[:, :, :length], v[:, :, :length], 0.0, True)
        return out, lse
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    block = _LONG_QUERY_BLOCK if start + length >= _LONG_PREFIX else _QUERY_BLOCK
    for first in range(0, length, block):
        rows = slice(first, min(first + block, length))
        out[:, :, rows], lse[:, :, rows] = _masked_block(q[:, :, rows], k, v, start + first)
    return out, lse


def _masked_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with the rows in reverse order: then the mask of row i, column j depends on i + j alone.

    So it is a view of one line of rows + columns numbers, which stays in the innermost cache, where a mask of rows x
    columns would cost a read of main memory for every score.
    """
    length = q.size(2)
    padding = -length % _QUERY_TILE
    end = min(k.size(2), math.ceil((start + length) / _KEY_SPLIT) * _KEY_SPLIT)
    rows = F.pad(q.flip(2), (0, 0, padding, 0))
    line = torch.zeros(rows.size(2) + end - 1, dtype=q.dtype, device=q.device)
    line[start + rows.size(2) :] = -math.inf
    mask = line.as_strided((1, 1, rows.size(2), end), (0, 0, 1, 1))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        rows, k[:, :, :end], v[:, :, :end], 0.0, False, attn_mask=mask
    )
    return out[:, :, padding:].flip(2), lse[:, :, padding:].flip(2)


def _forward_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dtype != torch.float32:
        # The causal flag of this kernel means: the last query attends to all keys.
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]
        return out, lse
    group = q.size(1) // k.size(1)
    by_token = [_by_token(q), _by_token(k, group), _by_token(v, group)]
    out, lse = _aten._efficient_attention_forward(*by_token, None, None, None, None, None, 0.0, _LOWER_RIGHT, True)[:2]
    return out.transpose(1, 2), lse[:, :, : q.size(2)]  # the kernel pads the log-sum-exp


def _backward_cuda(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of a dropout that is off
    if q.dtype != torch.float32:
        return _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, q.size(2), k.size(2), 0.0, True, nothing, nothing
        )
    group = q.size(1) // k.size(1)
    padded = F.pad(lse, (0, -lse.size(2) % 32), value=math.inf)
    grads = _aten._efficient_attention_backward(
        _by_token(grad), _by_token(q), _by_token(k, group), _by_token(v, group), None, _by_token(out),
        None, None, q.size(2), k.size(2), padded, 0.0, nothing, nothing, _LOWER_RIGHT, False,
    )[:3]  # fmt: skip
    grad_q, grad_k, grad_v = (part.transpose(1, 2) for part in grads)
    return grad_q, grad_k.unflatten(1, (-1, group)).sum(2), grad_v.unflatten(1, (-1, group)).sum(2)


def _by_token(tensor: torch.Tensor, group: int = 1) -> torch.Tensor:
    """Return [B, H, C, E] as [B, C, H, E], with every head `group` times."""
    return tensor.repeat_interleave(group, dim=1).transpose(1, 2) if group > 1 else tensor.transpose(1, 2)
