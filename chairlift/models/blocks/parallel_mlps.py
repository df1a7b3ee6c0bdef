"""The blocks of a dense MLP and a mixture of experts side by side, each between norms of its own, as in Gemma 4.

Both read the tokens as they are: one norm before them would not do, since its factors differ, and the router has others
again. The layer normalises the sum of the two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F

from chairlift.models.blocks.block import Edges, Packer, Part, Pass, Weight
from chairlift.models.blocks.dense_mlp import DenseMLPBlock, GatedMLP
from chairlift.models.blocks.experts import Experts, ExpertsBlock
from chairlift.models.layers import RMSNorm, UnitNorm

_ROLE = "parallel_mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelMLPBlock(DenseMLPBlock):
    """A `Block`: the dense MLP."""

    role: ClassVar[str] = _ROLE

    def make(
        self,
        layer_idx: int,  # noqa: ARG002
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],
    ) -> "ParallelMLP":
        return ParallelMLP(self, hidden_size, make_norm)

    def weights(self) -> tuple[Weight, ...]:
        return (
            *DenseMLPBlock.weights(self),
            Weight.whole("pre_norm", "pre_norm", "ffn_norm"),
            Weight.whole("post_norm", "post_norm", "post_ffw_norm_1"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelExpertsBlock(ExpertsBlock):
    """A `Block`: the mixture of experts. Its router reads the tokens normalised with factors of its own."""

    role: ClassVar[str] = _ROLE

    def __post_init__(self) -> None:
        ExpertsBlock.__post_init__(self)
        if self.router.has_bias or self.router.has_choice_bias:
            raise ValueError("a router that scales what it reads has no biases here")

    @property
    def native(self) -> str:
        """Names its structure in native code. The factors of what the router reads scale the logits, too."""
        return "experts"

    def make(
        self,
        layer_idx: int,  # noqa: ARG002
        hidden_size: int,
        make_norm: Callable[[int], RMSNorm],
    ) -> "ParallelExperts":
        return ParallelExperts(self, hidden_size, make_norm)

    def weights(self) -> tuple[Weight, ...]:
        return (
            *ExpertsBlock.weights(self),
            Weight.parameter(Part("router_scale", "ffn_gate_inp.scale")),
            Weight.parameter(Part("expert_scales", "ffn_down_exps.scale")),
            Weight.whole("pre_norm", "pre_norm", "pre_ffw_norm_2"),
            Weight.whole("post_norm", "post_norm", "post_ffw_norm_2"),
        )


class ParallelMLP(GatedMLP):
    """post_norm(mlp(pre_norm(x)))"""

    def __init__(self, block: ParallelMLPBlock, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> None:
        super().__init__(block, hidden_size)
        self.pre_norm, self.post_norm = make_norm(hidden_size), make_norm(hidden_size)

    @property
    def own_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """See `BlockModule`."""
        return self.pre_norm, self.post_norm

    @property
    def edges(self) -> Edges:
        """None: norms stand between its products and its edges."""
        return Edges()

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:
        """`[T, hidden] -> [T, hidden]`"""
        output: torch.Tensor = self.post_norm(super().forward(self.pre_norm(x), now))
        return output


class ParallelExperts(Experts):
    """post_norm(experts(pre_norm(x))), of which the router reads unit_norm(x) * router_scale."""

    def __init__(self, block: ParallelExpertsBlock, hidden_size: int, make_norm: Callable[[int], RMSNorm]) -> None:
        super().__init__(block, hidden_size)
        self.pre_norm, self.post_norm = make_norm(hidden_size), make_norm(hidden_size)
        self.router_norm = UnitNorm(self.pre_norm.eps)
        self.router_scale = nn.Parameter(torch.empty(hidden_size))
        self.expert_scales = nn.Parameter(torch.empty(block.router.num_experts))

    @property
    def own_norms(self) -> tuple[RMSNorm, RMSNorm]:
        """See `BlockModule`."""
        return self.pre_norm, self.post_norm

    def forward(self, x: torch.Tensor, now: Pass) -> torch.Tensor:  # noqa: ARG002
        """`[T, hidden] -> [T, hidden]`"""
        logits = self.router(self.router_norm(x) * self.router_scale.to(x.dtype))
        routes = self.block.router.route(logits, None, self.expert_scales)
        output: torch.Tensor = self.post_norm(self.mix(self.pre_norm(x), routes))
        return output

    def pack(self, packer: Packer) -> dict[str, object]:
        factors = self.router_scale * self.block.router.logit_scale
        return {
            **super().pack(packer),
            "router_norm": packer.vector(F.pad(factors, (0, -len(factors) % packer.lanes))),
            "expert_scales": packer.vector(self.expert_scales),
        }
