"""The block of a shared expert: an MLP that every token goes through, beside those that a router chooses."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from chairlift.models.blocks.block import Packer, Part, Pass, Weight
from chairlift.models.blocks.dense_mlp import DenseMLPBlock, GatedMLP
from chairlift.models.layers import Linear, RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMLPBlock(DenseMLPBlock):
    """A `Block`: the shared experts of one layer, as one MLP."""

    name: ClassVar[str] = "shared_mlp"

    has_output_gate: bool = False  # the sigmoid of a number of each token, by which the output is multiplied

    def make(
        self,
        layer_idx: int,  # noqa: ARG002
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "SharedMLP":
        return SharedMLP(self, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        weights = tuple(
            replace(weight, parts=tuple(replace(part, gguf=f"{part.gguf}_shexp") for part in weight.parts))
            for weight in DenseMLPBlock.weights(self)
        )
        if not self.has_output_gate:
            return weights
        gate = Part("output_gate", "ffn_gate_inp_shexp", from_gguf=lambda row: row.view(1, -1))
        return (*weights, Weight("output_gate", (gate,)))


class SharedMLP(GatedMLP):
    """A gated MLP, whose output may have a gate as well."""

    def __init__(self, block: SharedMLPBlock, hidden_size: int) -> None:
        super().__init__(block, hidden_size)
        self.output_gate = Linear(hidden_size, 1, bias=False) if block.has_output_gate else None

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        output = super().forward(x, now)
        return output if self.output_gate is None else output * torch.sigmoid(self.output_gate(x))

    def pack(self, packer: Packer) -> dict[str, object]:
        fields = super().pack(packer)
        return fields if self.output_gate is None else {**fields, "output_gate": packer.matrix(self.output_gate)}
