"""Describes the router of a mixture of experts, and chooses for each token the experts that compute it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch


class Scoring(StrEnum):
    """Turns a router's logits into scores: over all experts together, or of each by itself."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Says which experts a token goes to, and what their outputs are multiplied by.

    The experts with the highest scores are chosen, and their weights are their scores. A softmax over the chosen alone
    is the softmax over all with weights that are normalised.
    """

    num_experts: int
    num_chosen: int  # of each token
    scoring: Scoring = Scoring.SOFTMAX
    is_normalised: bool = True  # weights are divided by their sum, to which `eps` is added
    eps: float = 0.0
    scale: float = 1.0  # of weights
    logit_scale: float = 1.0
    has_bias: bool = False  # of logits
    has_choice_bias: bool = False  # scores are compared, not weighed, with a number of each expert added
    num_groups: int = 1  # of neighbours; only experts of the groups with the highest scores are chosen
    num_chosen_groups: int = 1
    num_scored_of_group: int = 2  # best experts, whose scores add up to the group's: one or two

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ValueError(f"{self.num_chosen} of {self.num_experts} experts cannot be chosen")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(f"{self.num_experts} experts do not make {self.num_groups} groups of one size")
        size = self.num_experts // self.num_groups
        if not 1 <= self.num_chosen_groups <= self.num_groups or self.num_chosen > self.num_chosen_groups * size:
            raise ValueError(f"{self.num_chosen} experts cannot be chosen of {self.num_chosen_groups} groups of {size}")
        if self.has_groups and size < self.num_scored_of_group:
            raise ValueError(f"groups of experts have {self.num_scored_of_group} at least, not {size}")

    @property
    def has_groups(self) -> bool:
        """True if the choice is limited to some groups."""
        return self.num_chosen_groups < self.num_groups

    def route(
        self, logits: torch.Tensor, choice_bias: torch.Tensor | None, expert_scales: torch.Tensor | None = None
    ) -> "Routes":
        """`[T, experts]` of any floating dtype; computed in float32.

        `expert_scales`: float32 `[experts]`, factors of weights in the end.
        """
        scores = logits.float() * self.logit_scale
        scores = scores.softmax(dim=-1) if self.scoring is Scoring.SOFTMAX else scores.sigmoid()
        compared = scores if choice_bias is None else scores + choice_bias
        if self.has_groups:
            compared = self._in_best_groups(compared)
        experts = compared.topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.is_normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.eps)
        if expert_scales is not None:
            weights = weights * expert_scales[experts]
        return Routes(experts, weights * self.scale)

    def _in_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The same, with minus infinity for the experts of other groups."""
        grouped = scores.view(len(scores), self.num_groups, -1)
        best = (
            grouped.topk(self.num_scored_of_group, dim=-1)
            .values.sum(dim=-1)
            .topk(self.num_chosen_groups, dim=-1)
            .indices
        )
        is_elsewhere = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, value=False)
        return grouped.masked_fill(is_elsewhere[..., None], -torch.inf).flatten(1)


class Routes(NamedTuple):
    """The experts of each token, `[T, chosen]`: int64 numbers, and float32 factors of their outputs."""

    experts: torch.Tensor
    weights: torch.Tensor
