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
    before: ServerState | None  # None: nobody could look
    after: ServerState | None
    complaints: list[str]

    def record(self) -> dict[str, Any]:
        """As JSON wants it."""
        return {
            "endings": {kind: dict(counts) for kind, counts in self.endings.items()},
            "manners": dict(self.manners),
            "health_ms": {name: round(value, 1) for name, value in self.health_ms.items()},
            "before": self.before and as_record(self.before),
            "after": self.after and as_record(self.after),
            "complaints": self.complaints,
        }


def judge(load: Load, before: ServerState | None, after: ServerState | None) -> Verdict:
    """Everything that is wrong, in words; nothing, if all is well. `before` None: growth is not looked at."""
    health_ms = percentiles(load.health.latencies)
    complaints = [*load.client_log.complaints(), *load.complaints, *load.health.complaints]
    if health_ms["max"] > MAX_HEALTH_MS:
        complaints.append(f"/health took {health_ms['max']:.0f} ms")
    if after is not None:
        complaints += load.client_log.compare(load.server_log)
        complaints += [f"at the end there are {count} {name}" for name, count in after.leftovers.items()]
    if before is not None and after is not None:
        complaints += growth(before, after)
    return Verdict(load.client_log.count(), load.client_log.count_manners(), health_ms, before, after, complaints)


def percentiles(latencies: list[float]) -> dict[str, float]:
    """In milliseconds, of seconds."""
    ranked = sorted(latencies) or [0.0]
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: 1000 * ranked[int(share * (len(ranked) - 1))] for name, share in shares.items()}


def growth(before: ServerState, after: ServerState) -> list[str]:
    """What there is more of than before."""
    complaints = [
        f"there were {earlier} {name}, and now there are {later}"
        for name, earlier, later in (
            ("tasks", before.num_tasks, after.num_tasks),
            ("open files", before.num_fds, after.num_fds),
        )
        if later > earlier
    ]
    if after.num_threads - before.num_threads > MAX_NEW_THREADS:
        complaints.append(f"there were {before.num_threads} threads, and now there are {after.num_threads}")
    if after.num_objects - before.num_objects > MAX_NEW_OBJECTS:
        complaints.append(f"there were {before.num_objects} objects, and now there are {after.num_objects}")
    if after.rss_mb - before.rss_mb > MAX_GROWTH_MB:
        complaints.append(f"memory has grown from {before.rss_mb:.1f} to {after.rss_mb:.1f} MB")
    return complaints


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
    if verdict.before is not None and verdict.after is not None:
        yield f"{'':24}{'before':>12}{'after':>12}"
        after = as_record(verdict.after)
        yield from (f"{name:24}{value:>12.6g}{after[name]:>12.6g}" for name, value in as_record(verdict.before).items())
    for name, value in verdict.health_ms.items():
        yield f"{'/health, ms, ' + name:24}{value:>12.1f}"
