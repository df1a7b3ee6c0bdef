"""What this machine offers: the device, the number formats it multiplies natively, free memory."""

import importlib.util
import re

import psutil
import torch

from chairlift.config import DType, MachineFacts
from chairlift.errors import ConfigurationError


def inspect_machine(device: str) -> MachineFacts:
    """Facts about the named device ("auto": the first GPU, else the CPU). ConfigurationError if there is none such."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return MachineFacts("cpu", _fast_cpu_dtypes(), psutil.virtual_memory().available, has_flash_attn=False)
    match = re.fullmatch(r"cuda(?::([0-9]+))?", device)
    if match is None:
        raise ConfigurationError(f"device {device!r} is not supported; choose cpu or cuda:0")
    return _inspect_gpu(int(match[1] or 0))


def _inspect_gpu(index: int) -> MachineFacts:
    num_gpus = torch.cuda.device_count()
    if index >= num_gpus:
        raise ConfigurationError(f"there is no device cuda:{index}; this machine has {num_gpus} CUDA devices")
    free_bytes, _ = torch.cuda.mem_get_info(index)
    return MachineFacts(
        device=f"cuda:{index}",
        fast_dtypes=frozenset(DType),
        free_bytes=free_bytes,
        has_flash_attn=importlib.util.find_spec("flash_attn") is not None,
    )


def _fast_cpu_dtypes() -> frozenset[DType]:
    """float32 always; the 16-bit formats only with instructions for them, since emulation is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    dtypes = {DType.FLOAT32}
    if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        dtypes.add(DType.BFLOAT16)
    if any(capabilities.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith")):
        dtypes.add(DType.FLOAT16)
    return frozenset(dtypes)
