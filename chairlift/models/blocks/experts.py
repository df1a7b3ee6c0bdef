"""The block of a mixture of experts: MLPs of which a router chooses some for each token (Shazeer et al. 2017).

A matrix of all experts is one weight: `[experts * out, in]`, an expert's rows after those of the one before it. An MLP
that every token goes through as well is a block of its own beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.models import grouped_experts
from chairlift.models.blocks.block import BlockModule, KeepsNothing, Packer, Part, Pass, Weight
from chairlift.models.blocks.dense_mlp import Activation
from chairlift.models.blocks.router import Router, Routes, Scoring
from chairlift.models.layers import Linear, RMSNorm, pad_rows

if TYPE_CHECKING:
    from chairlift.kernels.grouped import StoredMatrix

_NATIVE_ACTIVATIONS: dict[object, int] = {Activation.SILU: 0, Activation.GELU_TANH: 1}
_NATIVE_CLAMPED = 2


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """(up + 1) gate sigmoid(alpha gate), with the gate at most the limit and up within it on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsBlock(KeepsNothing):
    """A `Block`: the mixture of experts of one layer."""

    name: ClassVar[str] = "experts"
    role: ClassVar[str] = "mlp"

    router: Router
    intermediate_size: int  # of each expert
    activation: Activation | ClampedSwiGLU = Activation.SILU  # of an expert's gate
    has_bias: bool = False  # of experts

    def __post_init__(self) -> None:
        if self.activation is Activation.RELU_SQUARED:
            raise ValueError("relu2 is not an activation of gates here")

    @property
    def native(self) -> str | None:
        """Names its structure in native code, which scales no logits."""
        return "experts" if self.router.logit_scale == 1.0 else None

    def make(
        self,
        layer_idx: int,  # noqa: ARG002
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],  # noqa: ARG002
    ) -> "Experts":
        return Experts(self, hidden_size)

    def weights(self) -> tuple[Weight, ...]:
        """Lists a tensor for each expert: files that stack them are read as if they had these (`models/stacked.py`)."""
        biases = (Weight.parameter(Part("choice_bias", "exp_probs_b.bias")),) if self.router.has_choice_bias else ()
        return (
            Weight.whole("router", "router", "ffn_gate_inp"),
            *biases,
            *(self._stacked(name) for name in ("gate", "up", "down")),
        )

    def _stacked(self, name: str) -> Weight:
        experts = range(self.router.num_experts)
        return Weight(f"{name}_proj", tuple(Part(f"{i}.{name}_proj", f"ffn_{name}_exps.{i}") for i in experts))

    def divide(self, num_ranks: int) -> NoReturn:
        raise NotImplementedError(self.find_split_obstacle(num_ranks))

    def find_split_obstacle(self, num_ranks: int) -> str:  # noqa: ARG002
        return "its experts are not divided among devices"


class StackedLinear(Linear):
    """The matrices of several experts, each `[out, in]`, as one of all their rows.

    Those in groups are multiplied as they are `stored`, which is set for a GPU.
    """

    is_whole = False
    stored: "StoredMatrix | None" = None

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int, *, bias: bool) -> None:
        super().__init__(num_inputs, num_experts * num_outputs, bias=bias)
        self.num_experts = num_experts

    def pack(self) -> None:
        """Leaves the matrices as they are: one product takes the rows of one expert."""

    def forward_each(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """`[N, in] -> [N, out]`, of which the first rows are the first expert's, and so on."""
        weights = self.weight.chunk(self.num_experts)
        biases = [None] * self.num_experts if self.bias is None else self.bias.chunk(self.num_experts)
        parts = zip(torch.split(x, counts), weights, biases, strict=True)
        return torch.cat([F.linear(rows, weight, bias) for rows, weight, bias in parts])

    @property
    def is_grouped(self) -> bool:
        """True where one kernel computes the products of all experts."""
        if self.stored is not None:
            return True
        sizes = self.in_features, self.out_features // self.num_experts
        return grouped_experts.can_multiply(*sizes, self.weight.dtype, self.weight.device)

    def forward_grouped(self, x: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """As `forward_each`, without waiting for the device.

        `ends`: int32 `[experts]`, where each expert's rows end; `experts`: int64 `[N]`, whose each row is.
        """
        if self.stored is not None:
            product = grouped_experts.multiply_stored(x, self.stored, ends)
        else:
            product = grouped_experts.multiply(x, self.weight.view(self.num_experts, -1, self.in_features), ends)
        return product if self.bias is None else product + self.bias.view(self.num_experts, -1)[experts]


class Experts(BlockModule):
    """The sum over a token's experts of weight down(act(gate(x)) * up(x))."""

    def __init__(self, block: ExpertsBlock, hidden_size: int) -> None:
        super().__init__()
        self.block = block
        router, size = block.router, block.intermediate_size
        self.router = Linear(hidden_size, router.num_experts, bias=router.has_bias)
        self.choice_bias = nn.Parameter(torch.empty(router.num_experts)) if router.has_choice_bias else None
        self.gate_proj = StackedLinear(router.num_experts, hidden_size, size, bias=block.has_bias)
        self.up_proj = StackedLinear(router.num_experts, hidden_size, size, bias=block.has_bias)
        self.down_proj = StackedLinear(router.num_experts, size, hidden_size, bias=block.has_bias)

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:  # noqa: ARG002
        """`[T, hidden] -> [T, hidden]`"""
        return self.mix(x, self.block.router.route(self.router(x), self.choice_bias))

    def mix(self, x: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Adds up what the chosen experts make of each token: `[T, hidden] -> [T, hidden]`"""
        order = routes.experts.flatten().argsort(stable=True)  # what is computed, by expert
        computed = self._compute(x[order // self.block.router.num_chosen], routes.experts.flatten()[order])
        by_token = torch.empty_like(computed)
        by_token[order] = computed
        weighted = by_token.view(*routes.experts.shape, -1) * routes.weights[..., None].to(x.dtype)
        return weighted.sum(dim=1)

    def _compute(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Runs the rows through their experts, int64 `[N]`, which ascend: `[N, hidden] -> [N, hidden]`."""
        counts = experts.new_zeros(self.block.router.num_experts).scatter_add_(0, experts, torch.ones_like(experts))
        if self.gate_proj.is_grouped and self.down_proj.is_grouped:
            places = counts.cumsum(0).int(), experts
            gate, up = (each.forward_grouped(x, *places) for each in (self.gate_proj, self.up_proj))
            return self.down_proj.forward_grouped(_multiply(self.block.activation, gate, up), *places)
        on_host = counts.tolist()
        gate, up = (each.forward_each(x, on_host) for each in (self.gate_proj, self.up_proj))
        return self.down_proj.forward_each(_multiply(self.block.activation, gate, up), on_host)

    def pack(self, packer: Packer) -> dict[str, object]:
        block, router = self.block, self.block.router
        clamped = block.activation if isinstance(block.activation, ClampedSwiGLU) else ClampedSwiGLU(0.0, 0.0)
        arrange = partial(pad_rows, multiple=packer.lanes)
        return {
            "router": packer.matrix(self.router, is_exact=True, is_plain=self.own_norms is not None),
            **{
                name: packer.matrix(getattr(self, f"{name}_proj"), arrange, num_parts=router.num_experts)
                for name in ("gate", "up", "down")
            },
            "choice_bias": None if self.choice_bias is None else packer.vector(self.choice_bias),
            "num_experts": router.num_experts,
            "num_chosen": router.num_chosen,
            "intermediate": block.intermediate_size,
            "is_sigmoid": router.scoring is Scoring.SIGMOID,
            "is_normalized": router.is_normalised,
            "num_groups": router.num_groups,
            "num_chosen_groups": router.num_chosen_groups,
            "num_scored_of_group": router.num_scored_of_group,
            "activation": _NATIVE_ACTIVATIONS.get(block.activation, _NATIVE_CLAMPED),
            "eps": router.eps,
            "scale": router.scale,
            "alpha": clamped.alpha,
            "limit": clamped.limit,
        }


def _multiply(activation: Activation | ClampedSwiGLU, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`[N, inner]` twice -> `[N, inner]`"""
    if isinstance(activation, ClampedSwiGLU):
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * (gate * torch.sigmoid(activation.alpha * gate))
    activated = F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")
    return activated * up
