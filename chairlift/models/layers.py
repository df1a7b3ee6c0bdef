"""Parts that architectures are wired from."""

import functools
import logging
import math
import platform
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.models.config import RopeConfig

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def compiled_on_gpu(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of tensors that torch compiles when it is first called with one on a CUDA device.

    Torch's elementwise operators between the products of a layer are some thirty kernels of a few microseconds each;
    compiled, they are four.
    """

    @functools.cache
    def compiled() -> Callable[_P, _R]:
        if (obstacle := _find_compile_obstacle()) is not None:
            logger.warning("%s runs operator by operator, which is slower: %s", function.__name__, obstacle)
            return function
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first = args[0]
        is_cuda = isinstance(first, torch.Tensor) and first.is_cuda
        return (compiled() if is_cuda else function)(*args, **kwargs)

    return call


@functools.cache
def _find_compile_obstacle() -> str | None:
    """Why torch.compile cannot make kernels here; None if it can. It needs Triton and a C compiler."""
    try:
        torch.compile(F.silu)(torch.zeros(256, device="cuda"))
    except Exception as error:  # the compiler's own, a missing program's or library's: each means the same here
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


class Linear(nn.Linear):
    """`x W^T + b`. On a CPU in bfloat16 the weight can be packed once, which oneDNN otherwise does in every call."""

    _packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Brings the weight into oneDNN's blocked layout, which is opaque, and frees the plain one."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        del self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, in] -> [T, out]`"""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def can_pack(weight: torch.Tensor) -> bool:
    """True where packing pays: measured on x86, it does for bfloat16 and does not for float32."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return has_onednn and is_x86 and weight.device.type == "cpu" and weight.dtype == torch.bfloat16


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, normalised in float32 (Zhang & Sennrich 2019), of a sum that is kept."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + delta`, and that normalised: `[T, size]` each."""
        return _add_rms_norm(x, delta, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product (SwiGLU, Shazeer 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, has_bias: bool) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * intermediate_size, bias=has_bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        projected: torch.Tensor = self.down_proj(_silu_mul(self.gate_up_proj(x)))
        return projected


@compiled_on_gpu
def _add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + delta
    # On a CPU torch's own rms_norm is a composite of twice as many operators.
    norm = torch.linalg.vector_norm(total, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(total.shape[-1]).add_(eps).rsqrt_()
    return total, (total * scale).to(total.dtype) * weight


@compiled_on_gpu
def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 N] -> [T, N]`"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rope_tables(config: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: float32 `[2, max_seq_len, head_dim]`, both halves of a head alike."""
    frequencies = _inverse_frequencies(config, head_dim).to(device)
    angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float32, device=device), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


@compiled_on_gpu
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates heads `[T, H, D]` by their positions' angles `[T, 1, D]` (halves paired, as in Hugging Face)."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def _inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 `[head_dim / 2]`: theta^(-2i/d) (Su et al. 2021), stretched for longer contexts if so configured."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / config.theta**exponents
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3_frequencies(frequencies, config)
    return frequencies


def _llama3_frequencies(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by `factor`, short ones kept, a smooth passage between."""
    wavelengths = 2 * math.pi / frequencies
    turns = config.original_max_position_embeddings / wavelengths
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / config.factor + smooth * frequencies
