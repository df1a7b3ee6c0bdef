"""The block that mixes into a layer what it gets of each token beside the other layers' output, as Gemma 3n and 4 do.

A second embedding has a vector for each layer. With a projection of the first embedding they are a token's inputs of
all layers (`LayerInputs`), which a pass computes once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from chairlift.models.blocks.block import BlockModule, Packer, Pass, Undivided, Weight
from chairlift.models.blocks.dense_mlp import ACTIVATE, Activation
from chairlift.models.layers import Linear, RMSNorm, RowTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """Describes the inputs that layers get of each token."""

    size: int  # of an input
    num_layers: int
    vocab_size: int  # tokens from there on have the inputs of token 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputBlock(Undivided):
    """A `Block`: projection(activation(gate(x)) * input) of one layer, without a norm before it."""

    name: ClassVar[str] = "per_layer_input"
    role: ClassVar[str] = "per_layer_input"

    size: int  # of the input
    activation: Activation  # of the gate

    @property
    def native(self) -> str | None:
        """Names its structure in native code, which takes whole vectors, and one activation."""
        is_taken = self.activation is Activation.GELU_TANH and self.size % 16 == 0 and self.size <= 512
        return "per_layer_input" if is_taken else None

    def make(
        self,
        layer_idx: int,
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "PerLayerInput":
        return PerLayerInput(self, layer_idx, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        return Weight.whole("gate", "gate", "inp_gate"), Weight.whole("projection", "projection", "proj")


class PerLayerInput(BlockModule):
    """The block in torch."""

    def __init__(self, block: PerLayerInputBlock, layer_idx: int, hidden_size: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.gate = Linear(hidden_size, block.size, bias=False)
        self.projection = Linear(block.size, hidden_size, bias=False)
        self._activate = ACTIVATE[block.activation]

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        assert now.layer_inputs is not None, "the pass of a model with such blocks has their inputs"
        gated = self._activate(self.gate(x)) * now.layer_inputs[:, self.layer_idx]
        projected: torch.Tensor = self.projection(gated)
        return projected

    def pack(self, packer: Packer) -> dict[str, object]:
        return {
            "gate": packer.matrix(self.gate),
            "projection": packer.matrix(self.projection),
            "size": self.gate.out_features,
            "first": self.layer_idx * self.gate.out_features,
        }


class LayerInputs(nn.Module):
    """Makes the inputs of all layers: (norm(projection(x) / sqrt(hidden)) + sqrt(size) embedding(token)) / sqrt(2)."""

    def __init__(self, config: LayerInputsConfig, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> None:
        super().__init__()
        self.config = config
        num_features = config.num_layers * config.size
        self.embedding = RowTable(config.vocab_size, num_features)
        self.projection = Linear(hidden_size, num_features, bias=False)
        self.norm = make_norm(config.size)
        self.projection_scale, self.factor = hidden_size**-0.5, 2**-0.5

    def forward(self, input_ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """int64 `[T]`, their embeddings `[T, hidden]` -> `[T, layers, size]`"""
        projected = self.norm((self.projection(x) * self.projection_scale).unflatten(-1, (-1, self.config.size)))
        total: torch.Tensor = projected + self.look_up(input_ids, x.dtype)
        return total * self.factor

    def look_up(self, input_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """int64 `[T]` -> the summand that comes of the second embedding, `[T, layers, size]`."""
        config, scale = self.config, torch.tensor(self.config.size**0.5, dtype=dtype).item()
        known = torch.where(input_ids < config.vocab_size, input_ids, 0)
        return self.embedding.look_up(known, dtype).view(-1, config.num_layers, config.size) * scale


def weights_of_layer_inputs() -> list[Weight]:
    """Names the weights of `LayerInputs`, within the body."""
    return [
        Weight.whole("embedding", "embed_tokens_per_layer", "per_layer_token_embd"),
        Weight.whole("projection", "per_layer_model_projection", "per_layer_model_proj"),
        Weight.whole("norm", "per_layer_projection_norm", "per_layer_proj_norm"),
    ]
