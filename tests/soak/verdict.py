"""What a soak proves: the state before and after, the two logs, and health, judged."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.soak.client_log import Ending
from tests.soak.load import Load
from tests.soak.state import ServerState, as_record

MAX_GROWTH_MB = 15.0  # beyond this, memory has grown; the allocator's own unrest is several MB
MAX_NEW_OBJECTS = 5_000  # caches fill up within their bounds; a leaked request is hundreds of objects
MAX_NEW_THREADS = 8  # pools start theirs when they first need them; a thread leaked by requests is hundreds
MAX_HEALTH_MS = 2_000.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was counted, and what is wrong about it."""

    endings: dict[str, Counter[str]]  # by kind
    manners: Counter[str]
    health_ms: dict[str, float]
    before: ServerState
    after: ServerState
    complaints: list[str]

    def record(self) -> dict[str, Any]:
        """As JSON wants it."""
        return {
            "endings": {kind: dict(counts) for kind, counts in self.endings.items()},
            "manners": dict(self.manners),
            "health_ms": {name: round(value, 1) for name, value in self.health_ms.items()},
            "before": as_record(self.before),
            "after": as_record(self.after),
            "complaints": self.complaints,
        }


def judge(load: Load, before: ServerState, after: ServerState) -> Verdict:
    """Everything that is wrong, in words; nothing, if all is well."""
    health_ms = percentiles(load.health.latencies)
    complaints = [*load.client_log.complaints(), *load.complaints, *load.health.complaints]
    if health_ms["max"] > MAX_HEALTH_MS:
        complaints.append(f"/health took {health_ms['max']:.0f} ms")
    complaints += load.client_log.compare(load.server_log)
    complaints += [f"at the end there are {count} {name}" for name, count in after.leftovers.items()]
    complaints += growth(before, after)
    return Verdict(load.client_log.count(), load.client_log.count_manners(), health_ms, before, after, complaints)


def percentiles(latencies: list[float]) -> dict[str, float]:
    """In milliseconds, of seconds."""
    ranked = sorted(latencies) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: 1000 * ranked[int(share * (len(ranked) - 1))] for name, share in shares.items()}


def growth(before: ServerState, after: ServerState) -> list[str]:
    """What there is more of than before, beyond what is allowed."""
    figures = (
        ("tasks", before.num_tasks, after.num_tasks, 0),
        ("open files", before.num_fds, after.num_fds, 0),
        ("threads", before.num_threads, after.num_threads, MAX_NEW_THREADS),
        ("objects", before.num_objects, after.num_objects, MAX_NEW_OBJECTS),
        ("MB of memory", before.rss_mb, after.rss_mb, MAX_GROWTH_MB),
    )
    return [
        f"there were {earlier:.6g} {name}, and now there are {later:.6g}"
        for name, earlier, later, allowed in figures
        if later - earlier > allowed
    ]


def table(verdict: Verdict) -> str:
    """Kinds by endings, and the figures below."""
    return "\n".join(_lines(verdict))


def _lines(verdict: Verdict) -> Iterator[str]:
    endings = list(Ending)
    yield f"{'':24}" + "".join(f"{ending:>12}" for ending in endings)
    for kind, counts in sorted(verdict.endings.items()):
        yield f"{kind:24}" + "".join(f"{counts[ending] or '':>12}" for ending in endings)
    totals = sum(verdict.endings.values(), Counter[str]())
    yield f"{'all':24}" + "".join(f"{totals[ending]:>12}" for ending in endings)
    yield ""
    yield from (f"{name:24}{count:>12}" for name, count in verdict.manners.items())
    yield ""
    yield f"{'':24}{'before':>12}{'after':>12}"
    after = as_record(verdict.after)
    yield from (f"{name:24}{value:>12.6g}{after[name]:>12.6g}" for name, value in as_record(verdict.before).items())
    for name, value in verdict.health_ms.items():
        yield f"{'/health, ms, ' + name:24}{value:>12.1f}"
