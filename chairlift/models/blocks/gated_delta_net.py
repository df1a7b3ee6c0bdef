"""The block of a Gated DeltaNet (Yang et al., "Gated Delta Networks", 2024): a matrix per head instead of all keys.

A token decays the matrix S of a head, and then corrects what S answers to the token's key:

    S = exp(g) S;   S = S + k (beta (v - S' k))';   output = S' q

Queries, keys and values come from one projection and a short convolution; g and beta are gates of the token. A slot
keeps of a layer the convolution's last inputs `[kernel_size - 1, 2 Hk Dk + Hv Dv]`, then the matrices `[Hv, Dk, Dv]`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.cache.layout import StateParams
from chairlift.models.blocks.block import BlockModule, Cut, Packer, Part, Pass, Units, Weight
from chairlift.models.blocks.causal_conv import MOST_TAPS, CausalConv, Taps, log_of_rates, unsqueeze_kernels
from chairlift.models.layers import Linear, RMSNorm
from chairlift.models.recurrence import Step, add_up, sigmoid, silu, softplus

if TYPE_CHECKING:
    from chairlift.kernels.ragged import LayerStates, RaggedRows

_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetBlock:
    """A `Block`: the Gated DeltaNet of one layer."""

    name: ClassVar[str] = "linear_attn"
    role: ClassVar[str] = "attention"

    num_key_heads: int  # of queries as well; each serves as many value heads as the next one
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel_size: int
    norm_eps: float
    has_tiled_heads: bool = False  # value heads take the key heads in turns, instead of neighbours the same one

    @property
    def num_mixed(self) -> int:
        """Features of a token's query, key and value, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def num_window(self) -> int:
        """Elements of the convolution's window, which come first in a state."""
        return (self.kernel_size - 1) * self.num_mixed

    @property
    def native(self) -> str | None:
        """Names its structure in native code."""
        fits = self.key_dim % 16 == self.value_dim % 16 == 0 and 2 <= self.kernel_size <= MOST_TAPS
        return "gated_delta_net" if fits else None

    def make(
        self,
        layer_idx: int,
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "GatedDeltaNet":
        return GatedDeltaNet(self, layer_idx, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        keys, values = Units(self.num_key_heads, self.key_dim), Units(self.num_value_heads, self.value_dim)
        mixed, gates, rows = (keys, keys, values), (Units(self.num_value_heads),), Cut.ROWS
        projected = Part("in_proj_qkv", "attn_qkv", mixed), Part("in_proj_z", "attn_gate", (values,))
        gating = Part("in_proj_b", "ssm_beta", gates), Part("in_proj_a", "ssm_alpha", gates)
        return (
            Weight("in_proj", projected, rows),
            Weight("gate_proj", gating, rows),
            Weight("conv1d", (Part("conv1d", "ssm_conv1d", mixed, from_gguf=unsqueeze_kernels),), rows),
            Weight.parameter(Part("A_log", "ssm_a", gates, from_gguf=log_of_rates), rows),
            Weight.parameter(Part("dt_bias", "ssm_dt.bias", gates), rows),
            Weight.whole("norm", "norm", "ssm_norm"),
            Weight("out_proj", (Part("out_proj", "ssm_out", (values,)),), Cut.COLUMNS),
        )

    def divide(self, num_ranks: int) -> Self:
        num_key_heads, num_value_heads = self.num_key_heads // num_ranks, self.num_value_heads // num_ranks
        return replace(self, num_key_heads=num_key_heads, num_value_heads=num_value_heads)

    def find_split_obstacle(self, num_ranks: int) -> str | None:
        if self.num_key_heads % num_ranks:
            return f"the {self.num_key_heads} key heads of its Gated DeltaNets cannot be divided by that"
        return None

    def kept(self, dtype: torch.dtype) -> None:  # noqa: ARG002
        return None

    def state(self) -> StateParams:
        num_elements = self.num_window + self.num_value_heads * self.key_dim * self.value_dim
        return StateParams(num_elements, self.num_mixed + 2 * self.num_value_heads)


class GatedDeltaNet(BlockModule):
    """Projections around the recurrence, whose output is normalised by head and gated."""

    def __init__(self, block: GatedDeltaNetBlock, layer_idx: int, hidden_size: int) -> None:
        super().__init__()
        self.block, self.layer_idx = block, layer_idx
        num_values = block.num_value_heads * block.value_dim
        self.in_proj = Linear(hidden_size, block.num_mixed + num_values, bias=False)  # query, key, value; output gate
        self.gate_proj = Linear(hidden_size, 2 * block.num_value_heads, bias=False)  # beta; decay
        self.conv1d = CausalConv(block.num_mixed, block.kernel_size, bias=False)
        self.A_log = nn.Parameter(torch.empty(block.num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(block.num_value_heads))
        self.norm = RMSNorm(block.value_dim, block.norm_eps)
        self.out_proj = Linear(num_values, hidden_size, bias=False)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`; moves the states of the rows."""
        assert now.recur is not None, "a recurrent block needs states"
        projected = self.in_proj(x)
        mixed, gate = projected[:, : self.block.num_mixed], projected[:, self.block.num_mixed :]
        heads = now.recur(self.layer_idx, torch.cat((mixed, self.gate_proj(x)), dim=1), self)
        heads = self.norm(heads.view(len(x), -1, self.block.value_dim).to(x.dtype))
        gated = (heads * F.silu(gate.view(heads.shape).float())).to(x.dtype)
        output: torch.Tensor = self.out_proj(gated.flatten(1))
        return output

    def make_step(self) -> Step:
        """See `Recurrent`."""
        return partial(_step, self.block, self.conv1d.taps(), -torch.exp(self.A_log.float()), self.dt_bias.float())

    def advance(self, rows: "RaggedRows", states: "LayerStates", inputs: torch.Tensor) -> torch.Tensor:
        """See `Recurrent`."""
        from chairlift.kernels import gated_delta_rule

        block = self.block
        heads = gated_delta_rule.DeltaHeads(
            block.num_key_heads, block.num_value_heads, block.key_dim, block.value_dim, block.has_tiled_heads
        )

        def move_memory(convolved: torch.Tensor) -> torch.Tensor:
            return gated_delta_rule.advance(
                rows, states, convolved, inputs, self.A_log, self.dt_bias, heads, length_eps=_L2_EPS
            )

        return self.conv1d.advance(rows, states, inputs, move_memory)

    def pack(self, packer: Packer) -> dict[str, object]:
        block, taps, place = self.block, self.conv1d.taps(), packer.state_place(self.layer_idx)
        return {
            "in": packer.matrix(self.in_proj),
            "gate": packer.matrix(self.gate_proj),
            "out": packer.matrix(self.out_proj),
            "taps": packer.vector(taps.weights),
            "rates": packer.vector(-torch.exp(self.A_log.float())),
            "dt_bias": packer.vector(self.dt_bias),
            "norm": packer.norm(self.norm),
            "num_key_heads": block.num_key_heads,
            "num_value_heads": block.num_value_heads,
            "key_dim": block.key_dim,
            "value_dim": block.value_dim,
            "num_taps": len(taps.weights),
            "has_tiled_heads": block.has_tiled_heads,
            "state_offset": place.offset,
            "input_offset": place.input_offset,
            "norm_eps": block.norm_eps,
            "length_eps": _L2_EPS,
        }


def _step(
    block: GatedDeltaNetBlock,
    taps: Taps,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    inputs: torch.Tensor,
) -> torch.Tensor:
    """See `recurrence.Step`. `rates`: of decay, below 0, float32 `[Hv]` as `dt_bias` is."""
    num_keys = block.num_key_heads * block.key_dim
    mixed, beta, decay = torch.split(inputs, [block.num_mixed, block.num_value_heads, block.num_value_heads], dim=1)
    convolved = silu(taps.advance(state, mixed))
    query, key = (
        _spread(block, _normalise(each.reshape(len(each), -1, block.key_dim)))
        for each in convolved[:, : 2 * num_keys].chunk(2, dim=1)
    )  # [n, Hv, Dk]
    value = convolved[:, 2 * num_keys :].view(len(inputs), -1, block.value_dim)  # [n, Hv, Dv]
    matrix = state[:, block.num_window :].view(len(inputs), -1, block.key_dim, block.value_dim)
    matrix *= torch.exp(rates * softplus(decay + dt_bias))[..., None, None]
    correction = (value - add_up(matrix * key.unsqueeze(-1), 2)) * sigmoid(beta).unsqueeze(-1)
    matrix += key.unsqueeze(-1) * correction.unsqueeze(2)
    scaled = query * block.key_dim**-0.5
    return add_up(matrix * scaled.unsqueeze(-1), 2).flatten(1)


def _spread(block: GatedDeltaNetBlock, heads: torch.Tensor) -> torch.Tensor:
    """`[n, Hk, D] -> [n, Hv, D]`: the key head of each value head."""
    num_served = block.num_value_heads // block.num_key_heads
    return heads.repeat(1, num_served, 1) if block.has_tiled_heads else heads.repeat_interleave(num_served, dim=1)


def _normalise(heads: torch.Tensor) -> torch.Tensor:
    """`[n, H, D]`, each head to length 1."""
    return heads * torch.rsqrt(add_up(heads * heads, 2) + _L2_EPS).unsqueeze(-1)
