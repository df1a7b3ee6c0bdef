"""Limits that a request must keep to count as good: `ttft:500,tpot:50`, in milliseconds.

Goodput is that of `vllm bench serve`: a request is good if it ended well with every limited latency at or below its
limit. A reply of fewer than two tokens has no time per output token and keeps every limit on it.
"""

import math
from dataclasses import dataclass
from typing import Self

from chairlift.bench.records import MS_PER_S, RequestRecord

NAMES = ("ttft", "tpot", "e2el")
EXAMPLE = "ttft:500,tpot:50"


@dataclass(frozen=True, slots=True)
class Limits:
    """Most milliseconds by latency; None is no limit. At least one is set."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ValueError` that says what cannot be read, and what could."""
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = part.strip().partition(":")
            if name not in NAMES or name in limits:
                raise ValueError(_complaint(part, f"limits are of {', '.join(NAMES)}, each at most once"))
            limits[name] = _milliseconds(part, number)
        return cls(**limits)

    def are_kept(self, record: RequestRecord) -> bool:
        """Whether this request ended well and within all limits."""
        if record.failure is not None:
            return False
        seen = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(limit is None or seen[name] * MS_PER_S <= limit for name in NAMES for limit in [getattr(self, name)])

    def __str__(self) -> str:
        limits = {name: getattr(self, name) for name in NAMES}
        return ", ".join(f"{name} {limit:g} ms" for name, limit in limits.items() if limit is not None)


def _milliseconds(part: str, number: str) -> float:
    try:
        milliseconds = float(number)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ValueError(_complaint(part, "milliseconds above 0 must follow the colon"))
    return milliseconds


def _complaint(part: str, reason: str) -> str:
    return f"cannot read the limit {part.strip()!r}: {reason}, as in {EXAMPLE}"
