"""Grouped-query attention. Letters: B batch, S sequence, D model, H query heads, K key/value heads, E head dim."""

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.attention.masks import LayerMask, MaskKind
from torchtitan.attention.pieces import masked_attention, pieces_of
from torchtitan.distributed.plan import InnerAttention, standard_attention
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.rope import rotate
from torchtitan.tools.device import kernel_dtype

# Without the math kernel: it would build [S, S] scores, and no context-parallel method knows it.
_CUDA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


class ScaledDotProductAttention(InnerAttention):
    """Causal attention of one device; the module that context parallelism hooks."""

    @standard_attention
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: LayerMask | None = None) -> torch.Tensor:
        """Return softmax(q k^T / sqrt(E)) v under the mask: [B, H, S, E], 2 x [B, K, S, E] -> [B, H, S, E].

        Without one it is the causal mask.
        """
        if mask is not None:
            return self._masked(q, k, v, mask)
        if q.device.type == "cuda":
            return self._forward_cuda(q, k, v)
        dtype = kernel_dtype(q) if self.chooses_kernel_dtype else q.dtype
        # The CPU kernel is up to a tenth faster on contiguous heads, and the copy is nearly free.
        operands = [tensor.to(dtype).contiguous() for tensor in (q, k, v)]
        return _causal(*operands).to(q.dtype)

    def _masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return masked_attention(q, k, v, mask)

    def _forward_cuda(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.dtype == torch.float32:  # only the memory-efficient kernel takes fp32, and it knows no grouped heads
            group = q.size(1) // k.size(1)
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        with sdpa_kernel(_CUDA_KERNELS):
            return _causal(q, k, v)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class VarlenMask(NamedTuple):
    """What the flash kernel for sequences side by side takes."""

    ends: torch.Tensor  # int32 [segments + 1]: where each begins and ends in all rows, one behind the other
    longest: int  # tokens; a bound
    window: int  # 0: none


class VarlenAttention(ScaledDotProductAttention):
    """The same attention; on CUDA one call of the flash kernel for all documents of a batch, side by side."""

    def prepare(self, mask: LayerMask, device: torch.device) -> Any:
        """Return the mask as this module's kernel takes it."""
        return mask if device.type == "cpu" else _varlen_mask(mask, device)

    def _masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        return _varlen(q, k, v, mask) if isinstance(mask, VarlenMask) else masked_attention(q, k, v, mask)


class FlexAttention(ScaledDotProductAttention):
    """The same attention; on CUDA by flex_attention, which skips what a BlockMask rules out."""

    def prepare(self, mask: LayerMask, device: torch.device) -> Any:
        """Return the mask as this module's kernel takes it; flex has no backward on a CPU."""
        return mask if device.type == "cpu" else _block_mask(mask, device)

    def _masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
        if isinstance(mask, LayerMask):
            return masked_attention(q, k, v, mask)
        return _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=True)


def _varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: VarlenMask) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q_packed, k_packed, v_packed = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))  # [B S, H, E]
    out = varlen_attn(
        q_packed,
        k_packed,
        v_packed,
        mask.ends,
        mask.ends,
        mask.longest,
        mask.longest,
        window_size=(mask.window - 1 if mask.window else -1, 0),
        enable_gqa=True,
    )
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (q.size(0), q.size(2))).transpose(1, 2)


def _varlen_mask(mask: LayerMask, device: torch.device) -> VarlenMask:
    starts, batch, seq_len = _segments(mask.pieces)
    ends = torch.tensor([*starts, batch * seq_len], dtype=torch.int32, device=device)
    return VarlenMask(ends, seq_len, mask.window)  # the bound is the same for all batches, so nothing is compiled anew


def _segments(pieces: torch.Tensor) -> tuple[list[int], int, int]:
    """Return where the segments begin among the tokens of all rows, how many rows there are, and tokens in each."""
    rows_of_pieces = pieces_of(pieces)
    batch = max(piece.row + piece.rows for piece in rows_of_pieces)
    seq_len = sum(piece.rows * piece.length for piece in rows_of_pieces) // batch
    starts = [
        row * seq_len + piece.query for piece in rows_of_pieces for row in range(piece.row, piece.row + piece.rows)
    ]
    return sorted(starts), batch, seq_len


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _block_mask(mask: LayerMask, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    starts, batch, seq_len = _segments(mask.pieces)
    ends = torch.tensor([*starts, batch * seq_len])
    begins = ends[:-1].repeat_interleave(ends.diff()).unflatten(0, (batch, seq_len))  # among the tokens of all rows
    first = begins - torch.arange(0, batch * seq_len, seq_len)[:, None]
    if mask.window:
        first = torch.maximum(first, torch.arange(seq_len) - mask.window + 1)
    first = first.to(device)

    def seen(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (first[row, query] <= key) & (key <= query)

    # Compiled it makes the blocks alone; as it is, on a CPU, it makes all of [S, S] first.
    return create_block_mask(seen, batch, None, seq_len, seq_len, device=str(device), _compile=device.type == "cuda")


# By model.attn_type.
INNER_ATTENTIONS: dict[str, type[InnerAttention]] = {
    "sdpa": ScaledDotProductAttention,
    "flex": FlexAttention,
    "varlen": VarlenAttention,
}


class Attention(nn.Module):
    """Projections and rotary embedding around the inner attention; K and V keep their own number of heads."""

    def __init__(
        self, dim: int, num_heads: int, num_kv_heads: int, head_dim: int, attn_type: str, kind: MaskKind
    ) -> None:
        super().__init__()
        self.kind = kind  # of mask
        self.head_dim = head_dim
        self.wq = Linear(dim, num_heads * head_dim)
        self.wk = Linear(dim, num_kv_heads * head_dim)
        self.wv = Linear(dim, num_kv_heads * head_dim)
        self.wo = Linear(num_heads * head_dim, dim)
        self.inner_attention: InnerAttention = INNER_ATTENTIONS[attn_type]()

    def forward(self, x: torch.Tensor, turn: torch.Tensor, mask: Any = None) -> torch.Tensor:
        """Return the attention's output: [B, S, D] with rotations [B, 1, S, E/2] -> [B, S, D]."""
        q = rotate(self._heads(self.wq(x)), turn)  # [B, H, S, E]
        k = rotate(self._heads(self.wk(x)), turn)  # [B, K, S, E]
        v = self._heads(self.wv(x))  # [B, K, S, E]
        # [B, H, S, E]; without a mask the call is that of torch's SDPA, which its ring hooks
        out = self.inner_attention(q, k, v) if mask is None else self.inner_attention(q, k, v, mask)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
