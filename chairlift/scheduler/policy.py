"""The settings of the policy."""

from dataclasses import dataclass
from typing import Self

from chairlift.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Policy:
    """What users may choose of how requests are served; the fields of `EngineConfig` of these names."""

    enable_prefix_caching: bool = True
    priority_ageing: float = 30.0  # seconds in which nobody of a priority got a slot that make up for a level
    preempt_after: int | None = None  # tokens generated before a slot may be lost; None: it never is
    queue_timeout: float | None = None  # seconds to wait for a slot

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(config.enable_prefix_caching, config.priority_ageing, config.preempt_after, config.queue_timeout)


DEFAULT_POLICY = Policy()
