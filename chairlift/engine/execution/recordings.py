"""All that an engine has recorded: its kinds of steps, which are listed here, and sampling."""

import logging
import time
from collections.abc import Iterator
from typing import TypeVar

import torch

from chairlift.config import ResolvedConfig
from chairlift.engine.execution.graphs import DecodeGraphs
from chairlift.engine.execution.mixed import MixedGraphs
from chairlift.engine.execution.recorded_steps import GraphParts, RecordedSteps, Steps
from chairlift.engine.execution.sampling_graphs import SamplingGraphs
from chairlift.engine.sampling import Places
from chairlift.models.attention import Forward
from chairlift.plan import StepPlan

logger = logging.getLogger(__name__)

_KINDS: tuple[type[RecordedSteps], ...] = (DecodeGraphs, MixedGraphs)
"""The kinds of steps, in the order in which they are recorded at start. Later ones wait the longest without."""

_Kind = TypeVar("_Kind", bound=RecordedSteps)


def list_obstacles(forward: Forward) -> list[str]:
    """Says why kinds of steps of that model cannot be recorded."""
    return [obstacle for kind in _KINDS if (obstacle := kind.find_obstacle(forward)) is not None]


def num_kept_tokens(forward: Forward, config: ResolvedConfig) -> int:
    """Returns the tokens of the largest step whose memory recordings keep; 0 if there is none."""
    return max((kind.num_kept_tokens(config) for kind in _kinds_of(forward)), default=0)


def num_scratch_tokens(forward: Forward, config: ResolvedConfig) -> int:
    """Returns how many tokens padding writes to the scratch slot at most."""
    return max((kind.num_scratch_tokens(config) for kind in _kinds_of(forward)), default=0)


def _kinds_of(forward: Forward) -> Iterator[type[RecordedSteps]]:
    return (kind for kind in _KINDS if kind.find_obstacle(forward) is None)


class Recordings:
    """Records steps and sampling at start and when the engine is idle, and replays them."""

    def __init__(self, parts: GraphParts) -> None:
        """Records what most launches will need. torch.OutOfMemoryError if that does not fit."""
        self.sampling: SamplingGraphs = parts.sampling
        self._kinds: list[RecordedSteps] = []
        begin = time.monotonic()
        self.sampling.record_common()
        for kind in _kinds_of(parts.forward):  # each allocates its buffers when those before have their memory
            self._kinds.append(kind(parts))
            self._kinds[-1].record_common()
        logger.info("what most launches need is recorded, %.1f s", time.monotonic() - begin)

    def find(self, kind: type[_Kind]) -> _Kind | None:
        """Returns the recordings of a kind of step; None if such steps of this model are not recorded."""
        return next((each for each in self._kinds if isinstance(each, kind)), None)

    def load(self, plan: StepPlan, places: Places) -> Steps | None:
        """Prepares to replay a launch. None if it must run operator by operator."""
        return next((steps for each in self._kinds if (steps := each.load(plan, places)) is not None), None)

    @torch.inference_mode()
    def record_missing(self) -> bool:
        """Records one of those that launches missed, and returns True if there are more. No launch may be in flight."""
        tables = [*(each.graphs for each in reversed(self._kinds)), self.sampling.graphs]
        table = next((each for each in tables if each.missing), None)
        if table is not None:
            table.record_missing()
        return any(each.missing for each in tables)
