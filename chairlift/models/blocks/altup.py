"""The blocks of Gemma 3n that stand around the others of a layer, and the layer that they make.

Alternating updates (Baykal et al. 2023): between layers a token is several streams of features. A layer computes the
first of them, predicts the others, and corrects these by what it computed. Laurel is a second residual, of low rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.models.blocks.block import BlockModule, Packer, Part, Pass, Undivided, Weight
from chairlift.models.blocks.layer import DecoderLayer, PackedBlock, PackedSublayer, Residual
from chairlift.models.layers import Linear, RMSNorm, Use

_LEAST_SQUARE = 1e-5  # of a stream's elements on average, when it is scaled


@dataclass(frozen=True, slots=True)
class _AroundBlock(Undivided):
    """The base of both blocks."""

    role: ClassVar[str]

    @property
    def native(self) -> str:
        """Names what native code has of it."""
        return self.role


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpBlock(_AroundBlock):
    """A `Block`: predicts and corrects the streams of one layer."""

    name: ClassVar[str] = "altup"
    role: ClassVar[str] = "altup"

    num_streams: int
    has_output_scale: bool  # what is mixed with the layer's inputs is scaled

    def make(self, layer_idx: int, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> "AltUp":  # noqa: ARG002
        return AltUp(self, hidden_size, make_norm)

    def weights(self) -> tuple[Weight, ...]:
        return (
            Weight.parameter(Part("correct_output_scale", "altup_correct_scale.weight")),
            Weight.whole("correction_coefs", "correction_coefs", "altup_correct_coef"),
            Weight.whole("prediction_coefs", "prediction_coefs", "altup_predict_coef"),
            Weight.whole("modality_router", "modality_router", "altup_router"),
            Weight.whole("router_norm", "router_norm", "altup_router_norm"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaurelBlock(_AroundBlock):
    """A `Block`: x + norm(right(left(x))), beside attention."""

    name: ClassVar[str] = "laurel"
    role: ClassVar[str] = "laurel"

    rank: int

    def make(self, layer_idx: int, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> "Laurel":  # noqa: ARG002
        return Laurel(self, hidden_size, make_norm)

    def weights(self) -> tuple[Weight, ...]:
        return (
            Weight.whole("linear_left", "linear_left", "laurel_l"),
            Weight.whole("linear_right", "linear_right", "laurel_r"),
            Weight.whole("post_laurel_norm", "post_laurel_norm", "laurel_post_norm"),
        )


class AltUp(BlockModule):
    """The block in torch: its layer calls `predict`, `correct` and `scale`."""

    def __init__(self, block: AltUpBlock, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> None:
        super().__init__()
        self._block, count = block, block.num_streams
        self.correct_output_scale = nn.Parameter(torch.empty(hidden_size))
        self.correction_coefs = Linear(count, count, bias=False)
        self.prediction_coefs = Linear(count, count**2, bias=False)
        self.modality_router = Linear(hidden_size, count, bias=False)
        self.router_norm = make_norm(hidden_size)

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """`[streams, T, hidden]`, twice: adds to each a mixture of all."""
        coefficients = self.prediction_coefs(self._modalities(streams[0])).unflatten(-1, (-1, len(streams)))
        return streams + torch.einsum("tji,ith->jth", coefficients, streams)

    def correct(self, predicted: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`[streams, T, hidden]`, the first stream as it was computed `[T, hidden]` -> `[streams, T, hidden]`"""
        coefficients = self.correction_coefs(self._modalities(x)) + 1.0
        corrected: torch.Tensor = predicted + coefficients.T.unsqueeze(-1) * (x - predicted[0])
        return corrected

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden]`, twice"""
        if not self._block.has_output_scale:
            return x
        return (x.float() * self.correct_output_scale).to(x.dtype)

    def _modalities(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden] -> [T, streams]`"""
        routed = self.modality_router(self.router_norm(x) / x.shape[-1])
        return torch.tanh(routed.float()).to(x.dtype)

    def pack(self, packer: Packer) -> dict[str, object]:
        missing = (0, -len(self.correct_output_scale) % packer.lanes)
        scale = packer.vector(F.pad(self.correct_output_scale, missing)) if self._block.has_output_scale else None
        return {
            "router_norm": packer.norm(self.router_norm),
            "router": packer.vector(F.pad(_numbers_of(self.modality_router), missing)),
            "prediction": packer.vector(_numbers_of(self.prediction_coefs)),
            "correction": packer.vector(_numbers_of(self.correction_coefs)),
            "output_scale": scale,
        }


class Laurel(BlockModule):
    """The block in torch."""

    def __init__(self, block: LaurelBlock, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> None:
        super().__init__()
        self.linear_left = Linear(hidden_size, block.rank, bias=False)
        self.linear_right = Linear(block.rank, hidden_size, bias=False)
        self.post_laurel_norm = make_norm(hidden_size)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:  # noqa: ARG002
        """`[T, hidden] -> [T, hidden]`"""
        output: torch.Tensor = x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return output

    def pack(self, packer: Packer) -> dict[str, object]:
        return {
            "left": packer.matrix(self.linear_left),
            "right": packer.matrix(self.linear_right),
            "rank": self.linear_left.out_features,
        }


class AltUpLayer(DecoderLayer):
    """A layer of attention, an MLP, an input of its own, and the blocks above. Its stream is `[streams, T, hidden]`."""

    self_attn: BlockModule
    mlp: BlockModule
    per_layer_input: BlockModule
    altup: AltUp
    laurel: Laurel
    pre_attention_norm: RMSNorm
    post_attention_norm: RMSNorm
    pre_mlp_norm: RMSNorm
    post_mlp_norm: RMSNorm
    post_per_layer_input_norm: RMSNorm

    def forward(self, stream: Residual, now: Pass) -> Residual:
        """Returns what the layer makes of the tokens."""
        predicted = self.altup.predict(stream.x)
        first = predicted[0]
        normed = self.pre_attention_norm(first)
        attended = self.post_attention_norm(self.self_attn(normed, now))
        x = (first + attended + self.laurel(normed, now)) * 2**-0.5
        x = x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x), now))
        corrected = self.altup.correct(predicted, x)
        inputs = self.per_layer_input(self.altup.scale(corrected[0]), now)
        corrected[1:] += self.post_per_layer_input_norm(inputs)
        return Residual(corrected, None)

    def uses(self) -> dict[Linear, Use]:
        """Lists nothing: its products fold nothing in."""
        return {}

    def pack(self, packer: Packer) -> list[PackedSublayer]:
        """Takes the weights out, in the order of `forward`."""
        pre_norm, altup = packer.norm(self.pre_attention_norm), self.altup.pack(packer)
        attention = PackedBlock("attention", self.self_attn.pack(packer))
        inputs = PackedBlock("per_layer_input", self.per_layer_input.pack(packer))
        return [
            PackedSublayer(
                [PackedBlock("predicts", altup), attention],
                pre_norm,
                packer.norm(self.post_attention_norm),
                is_continued=True,
            ),
            PackedSublayer(
                [PackedBlock("laurel", self.laurel.pack(packer))],
                pre_norm,
                packer.norm(self.laurel.post_laurel_norm),
                scale=2**-0.5,
                adds_input=True,
            ),
            PackedSublayer(
                [PackedBlock("dense_mlp", self.mlp.pack(packer))],
                packer.norm(self.pre_mlp_norm),
                packer.norm(self.post_mlp_norm),
            ),
            PackedSublayer([PackedBlock("corrects", altup), inputs], None, packer.norm(self.post_per_layer_input_norm)),
        ]


class Streams(nn.Module):
    """Makes several streams of embedded tokens, and one of these after the last layer."""

    def __init__(self, num_streams: int, hidden_size: int) -> None:
        super().__init__()
        self.spreading, self.merging = (
            nn.ModuleList(Linear(hidden_size, hidden_size, bias=False) for _ in range(num_streams - 1))
            for _ in range(2)
        )

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, hidden] -> [streams, T, hidden]`"""
        return torch.stack([x, *(_scaled_like(x, each(x)) for each in self.spreading)])

    def merge(self, streams: torch.Tensor) -> torch.Tensor:
        """`[streams, T, hidden] -> [T, hidden]`"""
        first, *others = streams
        pairs = zip(self.merging, others, strict=True)
        return torch.stack([first, *(_scaled_like(first, each(x)) for each, x in pairs)]).mean(dim=0)


def _numbers_of(linear: Linear) -> torch.Tensor:
    """Takes the matrix out, as float32 `[out, in]`."""
    weight = linear.let_go()
    return weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()[:, : linear.in_features].float()


def _scaled_like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`other`, scaled so that its features have the magnitude of those of `x`: `[T, hidden]` each."""
    wanted = x.square().mean(dim=-1, keepdim=True).sqrt()
    return other * wanted / other.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()


def weights_of_streams(num_streams: int) -> list[Weight]:
    """Names the weights of `Streams`, within the body."""
    return [
        Weight.whole(f"{module}.{index}", f"{name}.{index}", f"{gguf}.{index}")
        for module, name, gguf in (
            ("spreading", "altup_projections", "altup_proj"),
            ("merging", "altup_unembed_projections", "altup_unembd_proj"),
        )
        for index in range(num_streams - 1)
    ]
