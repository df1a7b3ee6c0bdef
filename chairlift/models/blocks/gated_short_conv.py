"""The block of a gated short convolution, as in LFM2: `C conv(B x)`, of which a slot keeps the last few inputs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from chairlift.cache.layout import StateParams
from chairlift.models.blocks.block import BlockModule, Cut, Packer, Part, Pass, Units, Weight
from chairlift.models.blocks.causal_conv import MOST_TAPS, CausalConv, unsqueeze_kernels
from chairlift.models.layers import Linear, RMSNorm
from chairlift.models.recurrence import Step

if TYPE_CHECKING:
    from chairlift.kernels.ragged import LayerStates, RaggedRows


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedShortConvBlock:
    """A `Block`: the gated convolution of one layer."""

    name: ClassVar[str] = "conv"
    role: ClassVar[str] = "attention"

    num_features: int
    kernel_size: int
    has_bias: bool = False

    @property
    def native(self) -> str | None:
        """Names its structure in native code."""
        fits = self.num_features % 16 == 0 and 2 <= self.kernel_size <= MOST_TAPS and not self.has_bias
        return "gated_short_conv" if fits else None

    def make(
        self,
        layer_idx: int,
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "GatedShortConv":
        return GatedShortConv(self, layer_idx, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        features = Units(self.num_features)
        return (
            Weight("in_proj", (Part("in_proj", "shortconv.in_proj", (features,) * 3),), Cut.ROWS),
            Weight("conv", (Part("conv", "shortconv.conv", (features,), from_gguf=unsqueeze_kernels),), Cut.ROWS),
            Weight("out_proj", (Part("out_proj", "shortconv.out_proj", (features,)),), Cut.COLUMNS),
        )

    def divide(self, num_ranks: int) -> Self:
        return replace(self, num_features=self.num_features // num_ranks)

    def find_split_obstacle(self, num_ranks: int) -> str | None:
        if self.num_features % num_ranks:
            return f"the {self.num_features} features of its convolutions cannot be divided by that"
        return None

    def kept(self, dtype: torch.dtype) -> None:  # noqa: ARG002
        return None

    def state(self) -> StateParams:
        return StateParams((self.kernel_size - 1) * self.num_features, self.num_features)


class GatedShortConv(BlockModule):
    """Projections around the convolution, with a gate before it (B) and after it (C)."""

    def __init__(self, block: GatedShortConvBlock, layer_idx: int, hidden_size: int) -> None:
        super().__init__()
        self.block, self.layer_idx = block, layer_idx
        self.in_proj = Linear(hidden_size, 3 * block.num_features, bias=block.has_bias)
        self.conv = CausalConv(block.num_features, block.kernel_size, bias=block.has_bias)
        self.out_proj = Linear(block.num_features, hidden_size, bias=block.has_bias)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; moves the states of the rows."""
        assert now.recur is not None, "a recurrent block needs states"
        before, after, features = self.in_proj(x).chunk(3, dim=1)
        convolved = now.recur(self.layer_idx, before * features, self)
        output: torch.Tensor = self.out_proj(after * convolved.to(x.dtype))
        return output

    def make_step(self) -> Step:
        """See `Recurrent`."""
        return self.conv.taps().advance

    def advance(self, rows: "RaggedRows", states: "LayerStates", inputs: torch.Tensor) -> torch.Tensor:
        """See `Recurrent`."""
        return self.conv.advance(rows, states, inputs)

    def pack(self, packer: Packer) -> dict[str, object]:
        taps, place = self.conv.taps(), packer.state_place(self.layer_idx)
        return {
            "in": packer.matrix(self.in_proj),
            "out": packer.matrix(self.out_proj),
            "taps": packer.vector(taps.weights),
            "num_features": self.block.num_features,
            "num_taps": len(taps.weights),
            "state_offset": place.offset,
            "input_offset": place.input_offset,
        }
