"""The whole forward pass in native code, for CPUs: what `models/decoder.py` says in torch, at the speed of memory.

`csrc/` is compiled once per machine (`build`), weights are brought into its layout once (`packing`), and `CpuLlama`
runs it. The torch model is the reference that tests hold it to.
"""

from chairlift.config import DType
from chairlift.models.config import Activation, ModelConfig, ModelShape, Norms, QKNorm
from chairlift.models.cpu.build import CpuKernelsUnavailable, are_kernels_fast, load_library
from chairlift.models.cpu.llama import HEAD_DIM_ALIGNMENT, MAX_HEAD_DIM, CpuLlama, takes_heads_of

__all__ = ["CpuKernelsUnavailable", "CpuLlama", "are_kernels_fast", "find_obstacle", "load_library"]


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
    if not _is_plain(model):
        return f"it runs plain Llamas only, which a {model.architecture} with these settings is not"
    try:
        load_library()
    except CpuKernelsUnavailable as error:
        return str(error)
    return None


def _is_plain(model: ModelShape) -> bool:
    if not isinstance(model, ModelConfig) or len(set(model.layers)) != 1 or model.layers[0].window is not None:
        return False
    rope = model.layers[0].rope
    has_plain_rope = rope is not None and dict(rope.parameters).get("partial_rotary_factor", 1.0) == 1.0
    has_plain_scale = model.attention_scale == model.head_dim**-0.5
    kinds = (model.activation, model.norms, model.qk_norm, model.has_offset_norms)
    scales = (model.embedding_scale, model.residual_scale, model.logits_divisor)
    caps = (model.attention_softcap, model.logits_softcap)
    return (
        has_plain_rope
        and has_plain_scale
        and kinds == (Activation.SILU, Norms.PRE, QKNorm.NONE, False)
        and scales == (1.0, 1.0, 1.0)
        and caps == (None, None)
    )
