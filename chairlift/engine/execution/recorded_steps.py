"""Says what a kind of step must offer to be recorded and replayed, and what its recordings are made of.

Recording a step takes as long as dozens of steps, during which all requests would stall. So a launch only replays what
has been recorded: the common sizes are recorded at start, and missing ones when the engine is idle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from chairlift.cache.layout import Place
from chairlift.cache.states import StateMemory
from chairlift.config import ResolvedConfig
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.execution.recorder import GraphRecorder, GraphTable
from chairlift.engine.execution.sampling_graphs import SamplingGraphs
from chairlift.engine.sampling import Places
from chairlift.models.attention import Forward
from chairlift.plan import StepPlan


class Steps(Protocol):
    """The steps of one launch, which are computed one after the other."""

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the places where tokens are sampled: int32 `[N]`."""
        ...

    @property
    def hidden(self) -> torch.Tensor | None:
        """The hidden states of the newest step, `[T, hidden]`, until the next one. None: there are only logits."""
        ...

    def compute(self) -> None:
        """Starts the next step. Between two of these, each place's token must be noted in `LastTokens`."""
        ...

    def logits(self) -> torch.Tensor:
        """Returns the logits of the newest step at these places, `[N, vocab]`, valid until the next step."""
        ...


@dataclass(frozen=True, slots=True)
class GraphParts:
    """Holds what recordings of steps are made of."""

    forward: Forward
    blocks: torch.Tensor  # [n_slots, 2, layers, S, Hkv, D]: the cache's; the last slot is the scratch slot, for padding
    last_tokens: LastTokens
    recorder: GraphRecorder
    sampling: SamplingGraphs
    max_num_tokens: int  # of a step
    places: tuple[Place | None, ...] | None = None  # the cache's
    states: StateMemory | None = None
    records_common: bool = True  # at start; False: only the largest size
    is_divided: bool = False  # other ranks must record the same


class RecordedSteps(Protocol):
    """Replays one kind of step, as far as it has recordings that suffice. `recordings` lists the kinds."""

    @classmethod
    def find_obstacle(cls, forward: Forward) -> str | None:
        """Says why such steps of that model cannot be recorded; None if they can."""
        ...

    @classmethod
    def num_kept_tokens(cls, config: ResolvedConfig) -> int:
        """Returns the tokens of its largest step if recordings keep that step's memory; 0 if they take next to none.

        All recordings share their memory, so only the largest of all kinds counts.
        """
        ...

    @classmethod
    def num_scratch_tokens(cls, config: ResolvedConfig) -> int:
        """Returns how many tokens padding writes to the scratch slot at most."""
        ...

    def __init__(self, parts: GraphParts) -> None: ...

    @property
    def graphs(self) -> GraphTable:
        """The recordings, and the keys of those that launches missed."""
        ...

    def record_common(self) -> None:
        """Records the sizes that most steps will need. torch.OutOfMemoryError if one that it relies on does not fit."""
        ...

    def load(self, plan: StepPlan, places: Places) -> Steps | None:
        """Fills the buffers for a launch. None if the plan is of another kind, or no recording suffices."""
        ...


def state_counts(plan: StepPlan) -> tuple[Sequence[int], Sequence[int]]:
    """By row: pending inputs that lead to its new tokens, and how many of these are tentative; empty: no states."""
    if plan.reservation is None:
        return (), ()
    return plan.reservation.num_replayed, plan.reservation.num_tentative
