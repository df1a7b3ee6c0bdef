"""The whole forward pass in native code, for CPUs: what `models/decoder.py` says in torch, at the speed of memory.

`csrc/` is compiled once per machine (`compiler`, `build`), weights are brought into its layout once (`packing`), and
`CpuDecoder` runs it. The torch model is the reference that tests hold it to.
"""

from chairlift.config import DType
from chairlift.models.config import ModelConfig, ModelShape
from chairlift.models.cpu.build import are_kernels_fast, load_library
from chairlift.models.cpu.compiler import CpuKernelsUnavailable
from chairlift.models.cpu.decoder import HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM, CpuDecoder, takes_heads_of

__all__ = ["CpuDecoder", "CpuKernelsUnavailable", "are_kernels_fast", "find_obstacle", "load_library"]


def find_obstacle(model: ModelShape, dtype: DType, device: str) -> str | None:
    """Why the kernels cannot run a model of that description and format on that device; None if they can.

    Compiles them, if that has not been done before.
    """
    if device != "cpu":
        return f"it runs on a CPU, and the device is {device}"
    if dtype is DType.FLOAT16:
        return f"it computes in float32 or bfloat16, not {dtype}"
    if not takes_heads_of(model.head_dim):
        return f"it takes a head_dim up to {MAX_HEAD_DIM} that {HEAD_DIM_ALIGNMENT} divides, not {model.head_dim}"
    if not isinstance(model, ModelConfig):
        return f"it runs the families that have a wiring of their own, and {model.architecture} has none"
    try:
        load_library()
    except CpuKernelsUnavailable as error:
        return str(error)
    return None
