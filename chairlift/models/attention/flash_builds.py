"""Finds the build of flash-attn that runs a model on a GPU, and says why there is none.

On Hopper that is version 3, built from source or from the wheel fa3-fwd, and elsewhere version 2. A build of version 3
may lack kernels, as the wheel does for float16 and for windows. Its build flags name what was left out.
"""

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from chairlift.config import DType
from chairlift.models.attention.backend import AttentionConfig, find_head_obstacle

HEAD_DIM_ALIGNMENT = 8

_FLASH_ATTN_2 = "flash_attn"  # the module
_FLASH_ATTN_3 = {  # modules, the preferred one first, and those that hold their build flags
    "flash_attn_interface": "flash_attn_config",
    "fa3_fwd_interface": "fa3_fwd_config",
}
_KERNEL_HEAD_DIMS = (64, 96, 128, 192, 256)  # other heads use the kernels of the next larger size
_AMPERE = (8, 0)  # compute capability of the first GPUs that flash-attn runs on
_HOPPER = 9  # major one of those that version 3 was written for


@dataclass(frozen=True, slots=True)
class Demands:
    """Says which kernels a model needs."""

    head_dims: tuple[int, ...]
    is_float16: bool
    has_windows: bool
    has_softcaps: bool

    @classmethod
    def of(cls, layers: Mapping[int, AttentionConfig], head_dims: Iterable[int], *, is_float16: bool) -> "Demands":
        """Gathers what these layers need."""
        return cls(
            head_dims=tuple(head_dims),
            is_float16=is_float16,
            has_windows=any(layer.window is not None for layer in layers.values()),
            has_softcaps=any(layer.softcap is not None for layer in layers.values()),
        )


def find_obstacle(
    layers: Mapping[int, AttentionConfig], head_dims: Iterable[int], dtype: DType, device: str
) -> str | None:
    """Says why flash-attn cannot run a model with these layers, heads and format on that device; None if it can."""
    demands = Demands.of(layers, head_dims, is_float16=dtype is DType.FLOAT16)
    if device == "cpu":
        return "it runs on a CUDA device, and the device is cpu"
    if dtype is DType.FLOAT32:
        return f"it computes in bfloat16 or float16, not {dtype}"
    if obstacle := find_head_obstacle(demands.head_dims, HEAD_DIM_ALIGNMENT):
        return obstacle
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    lacking = None
    for module in _installed_modules(capability):
        lacking = _find_missing_kernels(module, demands)
        if lacking is None:
            return None
    if lacking is not None:
        return f"{lacking}, and flash-attn 2 is not installed (pip install 'chairlift[flash]')"
    return "the package flash-attn is not installed (pip install 'chairlift[flash]')"


def find_flash_attn(capability: tuple[int, int], demands: Demands) -> str | None:
    """Names the module of flash-attn to use on a GPU of that compute capability: version 3 on Hopper if it is installed
    and has all kernels that the model needs, else version 2; None if there is none. Imports build flags only."""
    modules = _installed_modules(capability)
    return next((module for module in modules if _find_missing_kernels(module, demands) is None), None)


def is_version_3(module: str) -> bool:
    """True if the module is a build of version 3."""
    return module in _FLASH_ATTN_3


def is_version_2_installed() -> bool:
    """True if there is a build of version 2, which lacks no kernels."""
    return importlib.util.find_spec(_FLASH_ATTN_2) is not None


def _installed_modules(capability: tuple[int, int]) -> list[str]:
    """Names the modules of flash-attn that are there for such a GPU, the preferred one first."""
    wanted = (*_FLASH_ATTN_3, _FLASH_ATTN_2) if capability[0] == _HOPPER else (_FLASH_ATTN_2,)
    return [name for name in wanted if importlib.util.find_spec(name) is not None]


def _find_missing_kernels(module: str, demands: Demands) -> str | None:
    """Says which needed kernels the build lacks; None if it has all, or does not say what it has."""
    flags = _build_flags(module)

    def is_left_out(what: str) -> bool:
        return flags.get(f"FLASHATTENTION_DISABLE_{what}", False)

    largest = max(demands.head_dims, default=0)
    kept = [head_dim for head_dim in _KERNEL_HEAD_DIMS if not is_left_out(f"HDIM{head_dim}")]
    asked = {
        "float16": demands.is_float16 and is_left_out("FP16"),
        "windows": demands.has_windows and is_left_out("LOCAL"),
        "soft caps": demands.has_softcaps and is_left_out("SOFTCAP"),
        f"heads of {largest}": largest > max(kept, default=0),
        "ragged batches": is_left_out("VARLEN"),
        "appending": is_left_out("APPENDKV"),
    }
    missing = [what for what, is_missing in asked.items() if is_missing]
    return f"{module} was built without kernels for {' and '.join(missing)}" if missing else None


def _build_flags(module: str) -> Mapping[str, bool]:
    """Reads the flags that a build of version 3 was made with; none if it has no record of them."""
    name = _FLASH_ATTN_3.get(module)
    if name is None or importlib.util.find_spec(name) is None:
        return {}
    flags: Mapping[str, bool] = importlib.import_module(name).CONFIG["build_flags"]
    return flags
