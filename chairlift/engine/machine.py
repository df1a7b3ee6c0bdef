"""What this machine offers: the device, the number formats it multiplies natively, free memory."""

import os
import re

import psutil
import torch

from chairlift.config import DType, MachineFacts
from chairlift.errors import ConfigurationError
from chairlift.models.attention import find_flash_attn
from chairlift.models.cpu import CpuKernelsUnavailable, are_kernels_fast, load_library

_AMPERE = (8, 0)  # compute capability of the first GPUs that multiply bfloat16, and that flash-attn runs on


def inspect_machine(device: str, *, wants_cpu_kernels: bool = True) -> MachineFacts:
    """Facts about the named device ("auto": the first GPU, else the CPU). ConfigurationError if there is none such.

    On a CPU this compiles the cpu backend's kernels if that has not been done before, unless they are not wanted.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return MachineFacts(
            device="cpu",
            fast_dtypes=_fast_cpu_dtypes(),
            free_bytes=psutil.virtual_memory().available,
            cpu_kernels_obstacle=_cpu_kernels_obstacle() if wants_cpu_kernels else "it was not asked for",
            are_cpu_kernels_fast=are_kernels_fast(),
        )
    match = re.fullmatch(r"cuda(?::([0-9]+))?", device)
    if match is None:
        raise ConfigurationError(f"device {device!r} is not supported; choose cpu or cuda:0")
    return _inspect_gpu(int(match[1] or 0))


def choose_num_threads() -> int:
    """One thread per physical core that this process may use, unless OMP_NUM_THREADS says otherwise."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and int(wanted):  # torch's own count may be what an earlier engine set
        return int(wanted)
    num_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or num_usable, num_usable))


def _inspect_gpu(index: int) -> MachineFacts:
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        raise ConfigurationError(f"there is no device cuda:{index}; this machine has {num_gpus} CUDA devices")
    free_bytes, _ = torch.cuda.mem_get_info(index)
    capability = torch.cuda.get_device_capability(index)
    return MachineFacts(
        device=f"cuda:{index}",
        fast_dtypes=frozenset(DType) if capability >= _AMPERE else frozenset({DType.FLOAT32, DType.FLOAT16}),
        free_bytes=free_bytes,
        flash_attn_obstacle=_flash_attn_obstacle(capability),
    )


def _flash_attn_obstacle(capability: tuple[int, int]) -> str | None:
    if capability < _AMPERE:
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    if find_flash_attn(capability) is None:
        return "the package flash-attn is not installed (pip install 'chairlift[flash]')"
    return None


def _cpu_kernels_obstacle() -> str | None:
    try:
        load_library()
    except CpuKernelsUnavailable as error:
        return str(error)
    return None


def _fast_cpu_dtypes() -> frozenset[DType]:
    """float32 always; the 16-bit formats only with instructions for them, since emulation is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    dtypes = {DType.FLOAT32}
    if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        dtypes.add(DType.BFLOAT16)
    if any(capabilities.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith")):
        dtypes.add(DType.FLOAT16)
    return frozenset(dtypes)
