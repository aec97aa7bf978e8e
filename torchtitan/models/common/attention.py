"""Grouped-query attention. Letters: B batch, S sequence, D model, H query heads, K key/value heads, E head dim."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan.attention.masks import LayerMask, MaskKind
from torchtitan.attention.pieces import masked_attention
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
            return masked_attention(q, k, v, mask)
        if q.device.type == "cuda":
            return self._forward_cuda(q, k, v)
        dtype = kernel_dtype(q) if self.chooses_kernel_dtype else q.dtype
        # The CPU kernel is up to a tenth faster on contiguous heads, and the copy is nearly free.
        operands = [tensor.to(dtype).contiguous() for tensor in (q, k, v)]
        return _causal(*operands).to(q.dtype)

    def _forward_cuda(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.dtype == torch.float32:  # only the memory-efficient kernel takes fp32, and it knows no grouped heads
            group = q.size(1) // k.size(1)
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        with sdpa_kernel(_CUDA_KERNELS):
            return _causal(q, k, v)


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


# By model.attn_type.
INNER_ATTENTIONS: dict[str, type[InnerAttention]] = {"sdpa": ScaledDotProductAttention}


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
        self.inner_attention = INNER_ATTENTIONS[attn_type]()

    def forward(self, x: torch.Tensor, turn: torch.Tensor, mask: LayerMask | None = None) -> torch.Tensor:
        """Return the attention's output: [B, S, D] with rotations [B, 1, S, E/2] -> [B, S, D]."""
        q = rotate(self._heads(self.wq(x)), turn)  # [B, H, S, E]
        k = rotate(self._heads(self.wk(x)), turn)  # [B, K, S, E]
        v = self._heads(self.wv(x))  # [B, K, S, E]
        # [B, H, S, E]; without a mask the call is that of torch's SDPA, which its ring hooks
        out = self.inner_attention(q, k, v) if mask is None else self.inner_attention(q, k, v, mask)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
