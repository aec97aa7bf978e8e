"""The branches of attention by device; the one for CUDA runs here on the CPU's kernel, but for the last test."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tiny import CPU, T0, Case, DenseAttention, dense_mask, document_tensors, error
from torchtitan.attention.masks import LayerMask
from torchtitan.attention.plan import whole_masks
from torchtitan.models.common.attention import (
    INNER_ATTENTIONS,
    ScaledDotProductAttention,
    _block_mask,
    _varlen,
    _varlen_mask,
)


def _operands(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 2, 2)
    return [torch.randn(2, heads, 64, 64, generator=generator).to(device, dtype).requires_grad_() for heads in sizes]


def _errors(out: torch.Tensor, qkv: list[torch.Tensor]) -> list[float]:
    """Return how far the output and the gradients of its sum of squares are from dense attention in fp64."""
    out.double().square().sum().backward()
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in qkv]
    expected = DenseAttention()(*exact)
    expected.square().sum().backward()
    found = [out, *(tensor.grad for tensor in qkv)]
    return [error(a.cpu(), b) for a, b in zip(found, [expected, *(e.grad for e in exact)], strict=True)]


@pytest.mark.parametrize("on_cuda", [False, True])
def test_both_branches_are_attention(on_cuda: bool) -> None:
    module, qkv = ScaledDotProductAttention(), _operands(torch.float32)
    out = module._forward_cuda(*qkv) if on_cuda else module(*qkv)
    assert max(_errors(out, qkv)) < 2e-6


@pytest.mark.parametrize(("dtype", "heads"), [(torch.float32, 8), (torch.bfloat16, 2)])
def test_keys_are_repeated_only_for_the_kernel_without_groups(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, heads: int
) -> None:
    """Trap 20: on CUDA fp32 has one kernel that the ring knows, and it takes as many key as query heads."""
    seen = []
    original = F.scaled_dot_product_attention

    def recorded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: bool) -> torch.Tensor:
        seen.append((k.size(1), v.size(1)))
        return original(q, k, v, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    ScaledDotProductAttention()._forward_cuda(*_operands(dtype))
    assert seen == [(heads, heads)]


class _AttentionOps(TorchDispatchMode):
    """Collects the names of attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if "attention" in func._schema.name:
            self.names.add(func._schema.name.removeprefix("aten::_scaled_dot_product_"))
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_takes_kernels_that_the_ring_knows() -> None:
    """Breaks when SDPA falls to math: under context parallelism that would attend to local tokens only."""
    for dtype, known, tolerance in (
        (torch.float32, {"efficient_attention"}, 1e-5),
        (torch.bfloat16, {"flash_attention", "cudnn_attention"}, 3e-2),
    ):
        qkv = _operands(dtype, "cuda")
        with _AttentionOps() as ops:
            out = ScaledDotProductAttention()(*qkv)
        assert ops.names and ops.names <= known
        assert max(_errors(out, qkv)) < tolerance


def _mask(window: int) -> tuple[LayerMask, torch.Tensor]:
    """Return the mask of two rows of documents, and what it allows, by the definition: bool [2, 1, 64, 64]."""
    case = Case(args=replace(T0, window=window), documents=((7, 30, 27), (1, 1, 62)))
    (kind,) = set(case.args.layer_kinds)
    masks = whole_masks(*document_tensors(case), case.args.layer_kinds)
    assert masks is not None
    return masks.layers[kind], dense_mask(case, kind)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 5])
def test_flex_gets_the_mask_of_the_documents(window: int) -> None:
    """Its kernel has a forward on a CPU, which runs here with the BlockMask that CUDA gets."""
    mask, allowed = _mask(window)
    qkv = [tensor.detach() for tensor in _operands(torch.float32)]
    with torch.no_grad():
        block_mask = _block_mask(mask, CPU)
        out = flex_attention(*qkv, block_mask=block_mask, enable_gqa=True)
        assert error(out, DenseAttention(allowed)(*(tensor.double() for tensor in qkv))) < 2e-6


@pytest.mark.parametrize("window", [0, 5])
def test_varlen_gets_the_documents_side_by_side(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    """Its kernel is CUDA's own: here each sequence that it is told of is attended to by itself."""

    def by_sequence(q, k, v, ends, key_ends, longest, _, *, window_size, enable_gqa):  # type: ignore[no-untyped-def]
        assert torch.equal(ends, key_ends) and longest >= int(ends.diff().max()) and enable_gqa
        parts = []
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
            left = window_size[0] if window_size[0] >= 0 else end
            seen = (distance >= -window_size[1]) & (distance <= left)
            heads = [tensor[start:end].transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
            parts.append(DenseAttention(seen)(*heads)[0].transpose(0, 1))
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", by_sequence)
    mask, allowed = _mask(window)
    qkv = _operands(torch.float32)
    assert (
        error(_varlen(*qkv, _varlen_mask(mask, CPU)), DenseAttention(allowed)(*(tensor.double() for tensor in qkv)))
        < 2e-6
    )


@pytest.mark.parametrize("attn_type", ["sdpa", "flex", "varlen"])
@pytest.mark.parametrize("window", [0, 5])
def test_every_type_is_attention_on_a_cpu(attn_type: str, window: int) -> None:
    mask, allowed = _mask(window)
    qkv = _operands(torch.float32)
    INNER_ATTENTIONS[attn_type]()(*qkv, mask).square().sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in qkv]
    DenseAttention(allowed)(*exact).square().sum().backward()
    for found, wanted in zip(qkv, exact, strict=True):
        assert error(found.grad, wanted.grad) < 2e-6
