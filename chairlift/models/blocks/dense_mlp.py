"""The block of a dense MLP. Gate and up are one product, if it has a gate. A slot keeps nothing of it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import NormalDist
from typing import ClassVar, Self

import torch
from torch.nn import functional as F

from chairlift.device import compiled_on_gpu
from chairlift.models.blocks.block import BlockModule, Cut, Edges, KeepsNothing, Packer, Part, Pass, Units, Weight
from chairlift.models.layers import Linear, RMSNorm, pad_rows, silu_mul


class Activation(StrEnum):
    """The activation of the MLP's gate; without one, of its inner features."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU_SQUARED = "relu2"  # without a gate only


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMLPBlock(KeepsNothing):
    """A `Block`: the MLP of one layer."""

    name: ClassVar[str] = "mlp"
    role: ClassVar[str] = "mlp"

    intermediate_size: int
    activation: Activation = Activation.SILU
    has_bias: bool = False
    is_fused: bool = False  # checkpoints hold gate_up_proj, not its parts
    is_gated: bool = True
    gate_scale: float = 1.0  # of what the activation gets
    output_scale: float = 1.0
    sparsity: float = 0.0  # share of a token's gates, if they are normal, that is cut off and becomes 0

    def __post_init__(self) -> None:
        if self.is_gated and self.activation is Activation.RELU_SQUARED:
            raise ValueError("relu2 is not an activation of gates here")

    @property
    def native(self) -> str | None:
        """Names its structure in native code, which has one activation without a gate."""
        has_code = self.is_gated != (self.activation is Activation.RELU_SQUARED) and (
            self.is_gated or not self.sparsity
        )
        return "dense_mlp" if has_code else None

    def make(
        self,
        layer_idx: int,  # noqa: ARG002
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "GatedMLP | PlainMLP":
        return GatedMLP(self, hidden_size) if self.is_gated else PlainMLP(self, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        inner = Units(self.intermediate_size)
        down = Weight("down_proj", (Part("down_proj", "ffn_down", (inner,)),), Cut.COLUMNS)
        if not self.is_gated:
            return Weight("up_proj", (Part("up_proj", "ffn_up", (inner,)),), Cut.ROWS), down
        parts: tuple[Part, ...] = Part("gate_proj", "ffn_gate", (inner,)), Part("up_proj", "ffn_up", (inner,))
        if self.is_fused:
            parts = (Part("gate_up_proj", "ffn_up", (inner, inner)),)
        return Weight("gate_up_proj", parts, Cut.ROWS, is_interleaved=True), down

    def divide(self, num_ranks: int) -> Self:
        return replace(self, intermediate_size=self.intermediate_size // num_ranks)

    def find_split_obstacle(self, num_ranks: int) -> str | None:
        if self.intermediate_size % num_ranks:
            return f"the {self.intermediate_size} inner features of its MLPs cannot be divided by that"
        return None


class GatedMLP(BlockModule):
    """down(act(gate(x)) * up(x)), gate and up as one product (Shazeer 2020)."""

    def __init__(self, block: DenseMLPBlock, hidden_size: int) -> None:
        super().__init__()
        self.block = block
        self.gate_up_proj = Linear(hidden_size, 2 * block.intermediate_size, bias=block.has_bias)
        self.down_proj = Linear(block.intermediate_size, hidden_size, bias=block.has_bias)
        self._multiply = _MULTIPLY[block.activation]
        self._gate_scale, self._output_scale = block.gate_scale, block.output_scale
        self._cutoff = NormalDist().inv_cdf(block.sparsity) if block.sparsity else None  # in standard deviations

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        gate_up = self.gate_up_proj(x, now.norm)
        if self._gate_scale != 1.0:
            gate, up = gate_up.chunk(2, dim=-1)
            gate_up = torch.cat((gate * self._gate_scale, up), dim=-1)
        if self._cutoff is not None:
            gate, up = gate_up.chunk(2, dim=-1)
            least = gate.mean(dim=-1, keepdim=True) + self._cutoff * gate.std(dim=-1, keepdim=True, unbiased=False)
            gate_up = torch.cat((F.relu(gate - least), up), dim=-1)
        projected: torch.Tensor = self.down_proj(self._multiply(gate_up), addend=now.residual)
        return projected if self._output_scale == 1.0 else projected * self._output_scale

    @property
    def edges(self) -> Edges:
        """See `BlockModule`."""
        return Edges(self.gate_up_proj, self.down_proj if self._output_scale == 1.0 else None)

    def pack(self, packer: Packer) -> dict[str, object]:
        return {
            "up": packer.matrix(self.gate_up_proj, partial(interleave, lanes=packer.lanes)),
            "down": packer.matrix(self.down_proj, is_sensitive=True),
            "intermediate": self.block.intermediate_size,
            "is_gated": True,
            "is_gelu": self.block.activation is Activation.GELU_TANH,
            "gate_scale": self._gate_scale,
            "output_scale": self._output_scale,
            "is_sparse": self._cutoff is not None,
            "cutoff": self._cutoff or 0.0,
        }


class PlainMLP(BlockModule):
    """down(act(up(x)))"""

    def __init__(self, block: DenseMLPBlock, hidden_size: int) -> None:
        super().__init__()
        self.block = block
        self.up_proj = Linear(hidden_size, block.intermediate_size, bias=block.has_bias)
        self.down_proj = Linear(block.intermediate_size, hidden_size, bias=block.has_bias)
        self._activate = ACTIVATE[block.activation]

    @property
    def edges(self) -> Edges:
        """See `BlockModule`."""
        return Edges(self.up_proj, self.down_proj)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        activated = self._activate(self.up_proj(x, now.norm))
        projected: torch.Tensor = self.down_proj(activated, addend=now.residual)
        return projected

    def pack(self, packer: Packer) -> dict[str, object]:
        return {
            "up": packer.matrix(self.up_proj),
            "down": packer.matrix(self.down_proj, is_sensitive=True),
            "intermediate": self.block.intermediate_size,
            "is_gated": False,
            "gate_scale": 1.0,
            "output_scale": 1.0,
        }


def interleave(tensor: torch.Tensor, lanes: int) -> torch.Tensor:
    """Gate and up stacked `[2 I, ...]` -> a panel of gate's outputs, then the same of up, and so on; I is padded."""
    gate, up = (pad_rows(half, lanes).view(-1, lanes, *tensor.shape[1:]) for half in tensor.chunk(2))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


@compiled_on_gpu
def _gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 N] -> [T, N]`"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


_MULTIPLY = {Activation.SILU: silu_mul, Activation.GELU_TANH: _gelu_tanh_mul}
ACTIVATE: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: partial(F.gelu, approximate="tanh"),
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
}
"""Applies an activation to numbers of any shape."""
