"""Attention of consecutive queries over the keys before them, by the kernels of torch.

Letters: B batch, H query heads, K key/value heads (H is a multiple of K), E head dim, C queries, N keys.
Row i of a query block that starts at key `start` attends to keys 0 .. start + i, or to the last `window` of these.
"""

import math

import torch
import torch.nn.functional as F

from torchtitan.attention.plan import KEY_SPLIT
from torchtitan.attention.work import record_pairs
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
_WINDOW_BLOCK = 256  # at least; a window's block is as long as the window up to the above
# The kernel's causal flag gives the same bits on whole splits, from the length on at which its tiles are the largest.
_CAUSAL_MIN = 2 * KEY_SPLIT
_LOWER_RIGHT = 2  # custom_mask_type of the memory-efficient kernel: the last query attends to all keys


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [B, H, C, E] and its log-sum-exp [B, H, C] (fp32; fp64 for fp64).

    k and v [B, K, N, E] hold the keys from the first on; N is at least start + C, and 512 times a number, or where the
    sequence ends, for the bits to be those of the whole sequence in one call. window 0: all keys up to the query's.
    """
    record_pairs(q.size(0) * q.size(1), q.size(2), start, window)
    if q.device.type == "cuda":
        end = start + q.size(2)
        return _forward_cuda(q, k[:, :, :end], v[:, :, :end], window)
    return _forward_cpu(q, k, v, start, window)


def backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    start: int,
    grad_kv: torch.Tensor,
    window: int = 0,
) -> torch.Tensor:
    """Return the gradient of q [B, H, C, E], and add those of k and v to `grad_kv` [2, B, K, N, E].

    The parts of the keys are independent given the forward's log-sum-exp, so only a window needs a mask.
    """
    end = start + q.size(2)
    if q.device.type == "cuda":
        grad_q, *grads = _backward_cuda(grad, q, k[:, :, :end], v[:, :, :end], out, lse, window)
        for total, part in zip(grad_kv, grads, strict=True):
            total[:, :, :end] += part
        return grad_q
    if window and end > window:
        return _backward_window(grad, q, k, v, out, lse, start, grad_kv, window)
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


def _forward_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    length = q.size(2)
    window = window if window < start + length else 0
    if start == 0 and not window and length % KEY_SPLIT == 0 and length >= _CAUSAL_MIN:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k[:, :, :length], v[:, :, :length], 0.0, True)
        return out, lse
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for rows in _row_blocks(start, length, window):
        out[:, :, rows], lse[:, :, rows] = _masked_block(q[:, :, rows], k, v, start + rows.start, window)
    return out, lse


def _row_blocks(start: int, length: int, window: int) -> list[slice]:
    """Return the queries of each masked call."""
    block = _LONG_QUERY_BLOCK if start + length >= _LONG_PREFIX else _QUERY_BLOCK
    if window:
        block = min(block, max(_WINDOW_BLOCK, -(-window // _QUERY_TILE) * _QUERY_TILE))
    return [slice(first, min(first + block, length)) for first in range(0, length, block)]


def _masked_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    length = q.size(2)
    padding = -length % _QUERY_TILE
    begin = _first_seen(start, window) // KEY_SPLIT * KEY_SPLIT
    end = min(k.size(2), math.ceil((start + length) / KEY_SPLIT) * KEY_SPLIT)
    rows = F.pad(q.flip(2), (0, 0, padding, 0))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        rows,
        k[:, :, begin:end],
        v[:, :, begin:end],
        0.0,
        False,
        attn_mask=_reversed_mask(rows, end - begin, start - begin, window),
    )
    return out[:, :, padding:].flip(2), lse[:, :, padding:].flip(2)


def _first_seen(start: int, window: int) -> int:
    """Return the first key that the query at `start` sees."""
    return max(0, start - window + 1) if window else 0


def _reversed_mask(rows: torch.Tensor, keys: int, start: int, window: int) -> torch.Tensor:
    """Return the mask of queries in reverse order, the first of which starts at key `start`: [1, 1, C, keys].

    In reverse order the mask of row i, column j depends on i + j alone. So it is a view of one line of C + keys
    numbers, which stays in the innermost cache, where a mask of C x keys would cost a read of main memory for every
    score.
    """
    length = rows.size(2)
    line = torch.zeros(length + keys - 1, dtype=rows.dtype, device=rows.device)
    line[start + length :] = -math.inf
    if window:
        line[: max(0, start + length - window)] = -math.inf
    return line.as_strided((1, 1, length, keys), (0, 0, 1, 1))


def _backward_window(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    start: int,
    grad_kv: torch.Tensor,
    window: int,
) -> torch.Tensor:
    grad_q = torch.empty(q.shape, dtype=grad_kv.dtype, device=q.device)
    for rows in _row_blocks(start, q.size(2), window):
        first = start + rows.start
        keys = slice(_first_seen(first, window), start + rows.stop)
        operands = [tensor[:, :, rows].flip(2) for tensor in (grad, q, out)]
        part_q, *grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            operands[0],
            operands[1],
            k[:, :, keys],
            v[:, :, keys],
            operands[2],
            lse[:, :, rows].flip(2),
            0.0,
            False,
            attn_mask=_reversed_mask(operands[1], keys.stop - keys.start, first - keys.start, window),
        )
        grad_q[:, :, rows] = part_q.flip(2)
        for total, part in zip(grad_kv, grads, strict=True):
            total[:, :, keys] += part
    return grad_q


def _forward_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    if q.dtype != torch.float32:
        # The causal flag of this kernel means: the last query attends to all keys.
        by_token = [_by_token(tensor) for tensor in (q, k, v)]
        out, lse = _aten._flash_attention_forward(
            *by_token, None, None, q.size(2), k.size(2), 0.0, True, False, **_flash_window(window)
        )[:2]
        return out.transpose(1, 2), lse
    group = q.size(1) // k.size(1)
    by_token = [_by_token(q), _by_token(k, group), _by_token(v, group)]
    out, lse = _aten._efficient_attention_forward(
        *by_token, None, None, None, None, None, 0.0, _LOWER_RIGHT, True, window_size=window or None
    )[:2]
    return out.transpose(1, 2), lse[:, :, : q.size(2)]  # the kernel pads the log-sum-exp


def _backward_cuda(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # the state of a dropout that is off
    if q.dtype != torch.float32:
        by_token = [_by_token(tensor) for tensor in (grad, q, k, v, out)]
        grads = _aten._flash_attention_backward(
            *by_token, lse, None, None, q.size(2), k.size(2), 0.0, True, nothing, nothing, **_flash_window(window)
        )
        grad_q, grad_k, grad_v = (part.transpose(1, 2) for part in grads)
        return grad_q, grad_k, grad_v
    group = q.size(1) // k.size(1)
    padded = F.pad(lse, (0, -lse.size(2) % 32), value=math.inf)
    grads = _aten._efficient_attention_backward(
        _by_token(grad), _by_token(q), _by_token(k, group), _by_token(v, group), None, _by_token(out),
        None, None, q.size(2), k.size(2), padded, 0.0, nothing, nothing, _LOWER_RIGHT, False,
        window_size=window or None,
    )[:3]  # fmt: skip
    grad_q, grad_k, grad_v = (part.transpose(1, 2) for part in grads)
    return grad_q, grad_k.unflatten(1, (-1, group)).sum(2), grad_v.unflatten(1, (-1, group)).sum(2)


def _flash_window(window: int) -> dict[str, int]:
    """Return the flash kernel's limits: how many keys before and behind its own a query sees."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _by_token(tensor: torch.Tensor, group: int = 1) -> torch.Tensor:
    """Return [B, H, C, E] as [B, C, H, E], with every head `group` times."""
    return tensor.repeat_interleave(group, dim=1).transpose(1, 2) if group > 1 else tensor.transpose(1, 2)
