"""The one place that decides the device, and what is known about it."""

import ctypes
import os
import platform

import torch

from torchtitan.errors import ConfigError

# Dense bf16 peaks in FLOP/s, by a part of the name that CUDA reports. Source: the makers' data sheets.
_PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
# mallopt's, of <malloc.h>: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_TOP_PAD, in bytes.
_MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 2**26}


def resolve_device() -> torch.device:
    """Return this process's device: the CUDA device of its LOCAL_RANK where CUDA is available, else the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ConfigError(
            f"NGPU: more processes than the {num_devices} CUDA devices that are visible; each needs one of its own; "
            f"use NGPU={num_devices}, or hide the GPUs by CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def peak_flops(device: torch.device) -> float | None:
    """Return the peak of dense bf16 matrix products in FLOP/s, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_FLOPS.items() if part in name), None)


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next tensor of this process; elsewhere do nothing.

    By default it gives large blocks back to the kernel, and every step pays for clearing their pages again: 5 to 8 %
    of a small model's step. Memory at the peak does not change.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    for option, value in _MALLOC_OPTIONS.items():
        libc.mallopt(option, value)


@torch.compiler.assume_constant_result
def cpu_has_bf16_kernels() -> bool:
    """Return whether the CPU multiplies bf16 matrices faster than torch's scalar fallback.

    Without the instructions (AVX2-only x86, for one) a bf16 product is 10 to 70 times slower than the same in fp32.
    """
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def kernel_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which matrix kernels should run on `tensor`.

    It is the tensor's own, but fp32 for bf16 on a CPU without bf16 kernels: products of bf16 numbers are exact in
    fp32 and kernels accumulate in fp32 anyway, so only the speed differs.
    """
    if tensor.dtype == torch.bfloat16 and tensor.device.type == "cpu" and not cpu_has_bf16_kernels():
        return torch.float32
    return tensor.dtype
