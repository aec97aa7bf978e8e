"""Whether the kernels of this machine let bits be equal at all."""

import torch

from torchtitan.models.common.linear import Linear
from torchtitan.models.common.norm import RMSNorm
from torchtitan.tools.device import kernel_dtype


def why_bits_may_differ() -> str:
    """Return why the promise of equal bits cannot hold on this machine: its kernels give a row other bits among others.

    Empty where it can. Torch's kernels alone are asked, nothing of context parallelism.
    """
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(3072, 64, generator=generator).to(dtype)
        for module in (Linear(64, 128), RMSNorm(64, 1e-5)):
            module = module.to(dtype)
            if not all(torch.equal(module(x)[:rows], module(x[:rows])) for rows in (126, 128, 192, 384, 1536)):
                return f"{type(module).__name__} in {dtype} depends on the number of rows"
    for dtype in {torch.float32, kernel_dtype(torch.empty(0, dtype=torch.bfloat16))}:
        q, k, v = (torch.randn(1, 2, 1024, 16, generator=generator).to(dtype) for _ in range(3))
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        forward, reverse = attend(q, k, v, 0.0, False)[0], attend(q.flip(2), k, v, 0.0, False)[0].flip(2)
        if not torch.equal(forward, reverse):
            return f"the attention kernel in {dtype} depends on the order of its rows"
    return ""
