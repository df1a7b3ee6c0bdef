"""The block of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024): a matrix per head, which tokens decay and add to.

    S = exp(dt A) S + (dt x) B';   output = S C + D x

x, B and C come from one projection and a short convolution, dt is a gate of the token; heads of a group share B and C.
The output is gated by z, and normalised by group before or after that, or not at all. A slot keeps of a layer the
convolution's last inputs `[kernel_size - 1, H P + 2 G N]`, then the matrices `[H, P, N]`; native
code keeps each as `[N, P]`, so that it adds up whole vectors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.cache.layout import StateParams
from chairlift.models.blocks.block import BlockModule, Cut, Packer, Part, Pass, Units, Weight
from chairlift.models.blocks.causal_conv import MOST_TAPS, CausalConv, Taps, log_of_rates, unsqueeze_kernels
from chairlift.models.layers import Linear, RMSNorm, pad_rows
from chairlift.models.recurrence import Step, add_up, silu, softplus

if TYPE_CHECKING:
    from chairlift.kernels.ragged import LayerStates, RaggedRows


class ProjectionScales(NamedTuple):
    """Factors of what the input projection gives."""

    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0


NO_SCALES = ProjectionScales()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Block:
    """A `Block`: the Mamba 2 of one layer."""

    name: ClassVar[str] = "mamba"
    role: ClassVar[str] = "attention"

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm_eps: float
    has_norm: bool = True
    is_gated_last: bool = False  # the output is normalised before it is gated
    has_bias: bool = False  # of the input projection
    has_output_bias: bool = False
    has_conv_bias: bool = True
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    input_scale: float = 1.0
    output_scale: float = 1.0
    scales: ProjectionScales = NO_SCALES

    @property
    def num_features(self) -> int:
        """Features of the output, and so of x and z."""
        return self.num_heads * self.head_dim

    @property
    def num_mixed(self) -> int:
        """Features of x, B and C, which are convolved."""
        return self.num_features + 2 * self.num_groups * self.state_size

    @property
    def num_window(self) -> int:
        """Elements of the convolution's window, which come first in a state."""
        return (self.kernel_size - 1) * self.num_mixed

    @property
    def native(self) -> str | None:
        """Names its structure in native code."""
        fits = self.head_dim % 16 == self.state_size % 16 == 0 and 2 <= self.kernel_size <= MOST_TAPS
        return "mamba2" if fits and self.input_scale != 0.0 else None

    @property
    def num_projected(self) -> tuple[int, int, int, int, int]:
        """Outputs of the input projection: z; x, B, C; dt."""
        num_shared = self.num_groups * self.state_size
        return self.num_features, self.num_features, num_shared, num_shared, self.num_heads

    def make(
        self,
        layer_idx: int,
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "Mamba2":
        return Mamba2(self, layer_idx, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        features, shared = Units(self.num_heads, self.head_dim), Units(self.num_groups, self.state_size)
        heads, mixed, rows = Units(self.num_heads), (features, shared, shared), Cut.ROWS
        return (
            Weight("in_proj", (Part("in_proj", "ssm_in", (features, *mixed, heads)),), rows),
            Weight("conv1d", (Part("conv1d", "ssm_conv1d", mixed, from_gguf=unsqueeze_kernels),), rows),
            Weight.parameter(Part("A_log", "ssm_a", (heads,), from_gguf=log_of_rates), rows),
            Weight.parameter(Part("D", "ssm_d", (heads,), from_gguf=torch.flatten), rows),
            Weight.parameter(Part("dt_bias", "ssm_dt.bias", (heads,)), rows),
            Weight("norm", (Part("norm", "ssm_norm", (features,), from_gguf=torch.flatten),), rows),
            Weight("out_proj", (Part("out_proj", "ssm_out", (features,)),), Cut.COLUMNS),
        )

    def divide(self, num_ranks: int) -> Self:
        return replace(self, num_heads=self.num_heads // num_ranks, num_groups=self.num_groups // num_ranks)

    def find_split_obstacle(self, num_ranks: int) -> str | None:
        if self.num_groups % num_ranks:
            return f"the {self.num_groups} groups of its Mamba layers cannot be divided by that"
        return None

    def kept(self, dtype: torch.dtype) -> None:  # noqa: ARG002
        return None

    def state(self) -> StateParams:
        num_elements = self.num_window + self.num_features * self.state_size
        return StateParams(num_elements, self.num_mixed + self.num_heads)


class Mamba2(BlockModule):
    """Projections around the recurrence, whose output is gated and normalised."""

    def __init__(self, block: Mamba2Block, layer_idx: int, hidden_size: int) -> None:
        super().__init__()
        self.block, self.layer_idx = block, layer_idx
        self.in_proj = Linear(hidden_size, sum(block.num_projected), bias=block.has_bias)
        self.conv1d = CausalConv(block.num_mixed, block.kernel_size, bias=block.has_conv_bias)
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.empty(block.num_heads)) for _ in range(3))
        self.norm = _GroupNorm(block.num_features, block.num_groups, block.norm_eps) if block.has_norm else None
        self.out_proj = Linear(block.num_features, hidden_size, bias=block.has_output_bias)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; moves the states of the rows."""
        assert now.recur is not None, "a recurrent block needs states"
        block = self.block
        projected = self._scaled(self.in_proj(x if block.input_scale == 1.0 else x * block.input_scale))
        gate, inputs = projected[:, : block.num_features], projected[:, block.num_features :]
        features = now.recur(self.layer_idx, inputs, self)
        if not block.is_gated_last:
            features = features * F.silu(gate.float())
        if self.norm is not None:
            features = self.norm(features)
        if block.is_gated_last:
            features = features * F.silu(gate.float())
        output: torch.Tensor = self.out_proj(features.to(x.dtype))
        return output if block.output_scale == 1.0 else output * block.output_scale

    def make_step(self) -> Step:
        """See `Recurrent`."""
        rates, skips = -torch.exp(self.A_log.float()), self.D.float().unsqueeze(-1)
        return partial(_step, self.block, _Weights(self.conv1d.taps(), rates, skips, self.dt_bias.float()))

    def advance(self, rows: "RaggedRows", states: "LayerStates", inputs: torch.Tensor) -> torch.Tensor:
        """See `Recurrent`."""
        from chairlift.kernels import mamba2

        block = self.block
        heads = mamba2.MambaHeads(block.num_heads, block.num_groups, block.head_dim, block.state_size, block.dt_limits)
        weights = mamba2.MambaWeights(self.A_log, self.D, self.dt_bias)
        return self.conv1d.advance(
            rows, states, inputs, lambda convolved: mamba2.advance(rows, states, convolved, inputs, weights, heads)
        )

    def _scaled(self, projected: torch.Tensor) -> torch.Tensor:
        block = self.block
        if block.scales == NO_SCALES:
            return projected
        parts = torch.split(projected, list(block.num_projected), dim=1)
        return torch.cat([part * scale for part, scale in zip(parts, block.scales, strict=True)], dim=1)

    def pack(self, packer: Packer) -> dict[str, object]:
        block, taps, place = self.block, self.conv1d.taps(), packer.state_place(self.layer_idx)

        def padded(tensor: torch.Tensor) -> int:
            return packer.vector(pad_rows(tensor, packer.lanes))

        factors = block.input_scale * torch.tensor(block.scales).repeat_interleave(torch.tensor(block.num_projected))
        return {
            "in": packer.matrix(self.in_proj, input_scale=block.input_scale),
            "out": packer.matrix(self.out_proj),
            "factors": None if torch.all(factors == 1.0) else padded(factors),
            "taps": packer.vector(taps.weights),
            "conv_bias": None if taps.bias is None else packer.vector(taps.bias),
            "rates": padded(-torch.exp(self.A_log.float())),
            "skips": padded(self.D),
            "dt_bias": padded(self.dt_bias),
            "norm": None if self.norm is None else packer.vector(self.norm.weight),
            "num_heads": block.num_heads,
            "head_dim": block.head_dim,
            "num_groups": block.num_groups,
            "state_size": block.state_size,
            "num_taps": len(taps.weights),
            "is_gated_last": block.is_gated_last,
            "state_offset": place.offset,
            "input_offset": place.input_offset,
            "norm_eps": block.norm_eps,
            "least_dt": block.dt_limits[0],
            "most_dt": block.dt_limits[1],
            "output_scale": block.output_scale,
        }


class _Weights(NamedTuple):
    """The weights of the recurrence in float32."""

    taps: Taps
    rates: torch.Tensor  # [H]: A, below 0
    skips: torch.Tensor  # [H, 1]: D
    dt_bias: torch.Tensor  # [H]


def _step(block: Mamba2Block, weights: _Weights, state: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """See `recurrence.Step`."""
    mixed, dt = torch.split(inputs, [block.num_mixed, block.num_heads], dim=1)
    convolved = silu(weights.taps.advance(state, mixed))
    num_shared = block.num_groups * block.state_size
    x, *shared = torch.split(convolved, [block.num_features, num_shared, num_shared], dim=1)
    x = x.reshape(len(inputs), -1, block.head_dim)  # [n, H, P]
    entering, leaving = (
        each.reshape(len(inputs), -1, 1, block.state_size).repeat_interleave(block.num_heads // block.num_groups, dim=1)
        for each in shared
    )  # B and C: [n, H, 1, N]
    dt = softplus(dt + weights.dt_bias).clamp(*block.dt_limits)
    matrix = state[:, block.num_window :].view(len(inputs), -1, block.head_dim, block.state_size)
    matrix *= torch.exp(dt * weights.rates)[..., None, None]
    matrix += (x * dt.unsqueeze(-1)).unsqueeze(-1) * entering
    return (add_up(matrix * leaving, 3) + x * weights.skips).flatten(1)


class _GroupNorm(nn.Module):
    """x / rms(x) within each group of features, times a weight."""

    def __init__(self, num_features: int, num_groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_features))
        self._num_groups, self._eps = num_groups, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float32 `[T, features] -> [T, features]`"""
        groups = x.view(len(x), self._num_groups, -1)
        scale = groups.square().mean(dim=-1, keepdim=True).add_(self._eps).rsqrt_()
        normalised: torch.Tensor = (groups * scale).flatten(1) * self.weight
        return normalised
