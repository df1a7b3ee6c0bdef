"""The whole forward pass in native code, for CPUs: what `models/llama.py` says in torch, at the speed of memory.

`csrc/` is compiled once per machine (`build`), weights are brought into its layout once (`packing`), and `CpuLlama`
runs it. The torch model is the reference that tests hold it to.
"""

from chairlift.config import DType
from chairlift.models.cpu.build import CpuKernelsUnavailable, are_kernels_fast, load_library
from chairlift.models.cpu.llama import HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM, CpuLlama, takes_heads_of

__all__ = ["CpuKernelsUnavailable", "CpuLlama", "are_kernels_fast", "find_obstacle", "load_library"]


def find_obstacle(head_dim: int, dtype: DType, device: str) -> str | None:
    """Why the kernels cannot run a model of that shape and format on that device; None if they can.

    Compiles them, if that has not been done before.
    """
    if device != "cpu":
        return f"it runs on a CPU, and the device is {device}"
    if dtype is DType.FLOAT16:
        return f"it computes in float32 or bfloat16, not {dtype}"
    if not takes_heads_of(head_dim):
        return f"it takes a head_dim up to {MAX_HEAD_DIM} that {HEAD_DIM_ALIGNMENT} divides, not {head_dim}"
    try:
        load_library()
    except CpuKernelsUnavailable as error:
        return str(error)
    return None
