"""Seeds, and kernels whose results repeat bit for bit."""

import os

import torch


def set_determinism(seed: int, deterministic: bool) -> None:
    """Seed torch and, if asked, allow deterministic kernels only (a kernel without such a form then raises)."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
