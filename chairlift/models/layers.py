"""Parts that architectures are wired from."""

import platform
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from chairlift.device import compiled_on_gpu
from chairlift.models.config import Activation, ModelConfig, RopeConfig
from chairlift.models.grouped import GroupedWeight


class Linear(nn.Linear):
    """`x W^T + b`. On a CPU in bfloat16 the weight can be packed once, which oneDNN otherwise does in every call."""

    _taken: GroupedWeight | torch.Tensor | Callable[[], GroupedWeight | torch.Tensor] | None = None
    _packed: torch.Tensor | None = None

    @property
    def grouped(self) -> GroupedWeight | None:
        """The weight if it is in groups, which the kernels multiply as they are; then there is no `weight`."""
        if callable(self._taken):
            self._taken = self._taken()
        return self._taken if isinstance(self._taken, GroupedWeight) else None

    def take(self, weight: GroupedWeight | Callable[[], GroupedWeight | torch.Tensor]) -> None:
        """Replaces `weight`. A function is called when the weight is needed, so that each is packed as it is read."""
        self._taken = weight
        del self.weight

    def let_go(self) -> torch.Tensor | GroupedWeight:
        """Returns the weight, and drops it."""
        if self._taken is not None:
            taken = self._taken() if callable(self._taken) else self._taken
            self._taken = None
            return taken
        weight = self.weight.detach()
        del self.weight
        return weight

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
    """True where packing pays: measured on x86, it does for bfloat16 and does not for float32.

    With AVX2 alone oneDNN has no products in bfloat16, and refuses the weight.
    """
    if platform.machine() not in ("x86_64", "AMD64") or weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), or times 1 + weight, as Gemma has it."""

    def __init__(self, size: int, eps: float, *, is_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.is_offset = is_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`"""
        return _rms_norm(x, self.weight, self.eps, self.is_offset)

    def add(self, x: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`x + delta`, and that normalised: `[T, size]` each."""
        return _add_rms_norm(x, delta, self.weight, self.eps, self.is_offset)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up as one product (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.has_mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.has_mlp_bias)
        self._multiply = _silu_mul if config.activation is Activation.SILU else _gelu_tanh_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        projected: torch.Tensor = self.down_proj(self._multiply(self.gate_up_proj(x)))
        return projected


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool) -> torch.Tensor:
    # On a CPU torch's own rms_norm is a composite of twice as many operators.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale: torch.Tensor = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    if is_offset:
        return (x * scale * (1.0 + weight.float())).to(x.dtype)
    return (x * scale).to(x.dtype) * weight


@compiled_on_gpu
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool) -> torch.Tensor:
    return _normalised(x, weight, eps, is_offset)


@compiled_on_gpu
def _add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, is_offset: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + delta
    return total, _normalised(total, weight, eps, is_offset)


@compiled_on_gpu
def _silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 N] -> [T, N]`"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@compiled_on_gpu
def _gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 N] -> [T, N]`"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


# --- rotary position embedding (Su et al. 2021)


def rope_frequencies(rope: RopeConfig, head_dim: int, max_seq_len: int) -> tuple[torch.Tensor, float]:
    """float32 `[rotated / 2]`, the angle per position of each pair of dimensions; and the factor of cos and sin.

    The first `rotated` dimensions of a head rotate. Rules that depend on a sequence's length (dynamic, longrope) get
    `max_seq_len`, since keys in the cache cannot be rotated again when their sequence grows. So results are those of
    transformers if `max_seq_len` is within the original length, otherwise those for the longest sequence.
    """
    given = dict(rope.parameters)
    if rope.kind == "default":
        rotated = int(head_dim * given.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
        return 1.0 / rope.theta**exponents, 1.0
    config: Any = SimpleNamespace(  # what the rules read of a config
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=given.get("original_max_position_embeddings"),
        rope_parameters={"rope_theta": rope.theta, **given},
        standardize_rope_params=lambda: None,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=max_seq_len)
    return frequencies, float(factor)


def rope_tables(
    rope: RopeConfig, head_dim: int, max_seq_len: int, device: torch.device, num_positions: int | None = None
) -> torch.Tensor:
    """Cosines and sines of `num_positions` (None: `max_seq_len`): float32 `[2, num_positions, rotated]`.

    Both halves of `rotated` are alike.
    """
    frequencies, factor = rope_frequencies(rope, head_dim, max_seq_len)
    positions = torch.arange(num_positions or max_seq_len, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies.to(device))
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())) * factor


@compiled_on_gpu
def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first R dimensions of heads `[T, H, D]` by their positions' angles `[T, 1, R]`.

    Halves of the R are paired, as in Hugging Face.
    """
    rotated = x[..., : cos.shape[-1]]
    low, high = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-high, low), dim=-1) * sin
    return rotated if cos.shape[-1] == x.shape[-1] else torch.cat((rotated, x[..., cos.shape[-1] :]), dim=-1)


@compiled_on_gpu
def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """c tanh(x / c): close to x for small x, and never beyond c."""
    return torch.tanh(scores / cap) * cap
