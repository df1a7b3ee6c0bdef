"""The load: waves of clients, with pauses between them in which nothing may be left; and what is wrong in the end."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from tests.soak.case import BAD
from tests.soak.client import Client, ClientLog, Ending, Manner, RawClient
from tests.soak.good import GOOD, full_slot
from tests.soak.server import ServerState, Target, as_record

IDLE_WITHIN_S = 10.0  # after the last client has left
_POLL_S = 0.05
_MANNERS = {Manner.PATIENT: 12, Manner.LEAVES_BEFORE: 3, Manner.LEAVES_WITHIN: 3, Manner.SLOW: 1, Manner.STOPS: 1}
_LARGE_MANNERS = {Manner.LEAVES_WITHIN: 1, Manner.SLOW: 2, Manner.STOPS: 3}  # of replies that no buffer holds
_Drawn = TypeVar("_Drawn")


@dataclass(frozen=True, slots=True)
class Wave:
    """So many clients at a time, for so long or so many requests. At its end all may leave at once."""

    num_clients: int
    seconds: float
    is_cut: bool = False
    max_requests: int | None = None


@dataclass(slots=True)
class Health:
    """How `/health` answered while the load was on."""

    latencies: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


class Load:
    """Puts waves on a server. The n-th request of a seed is always the same."""

    def __init__(self, target: Target, seed: int) -> None:
        self._target = target
        self.seed = seed
        self.client_log = ClientLog()
        self.health = Health()
        self.server_log: dict[str, list[str]] = {}
        self.complaints: list[str] = []

    async def put(self, wave: Wave) -> None:
        """One wave, and then the wait for the server to be idle."""
        polling = asyncio.create_task(self._poll_health())
        try:
            async with Client(self._target.url, self.client_log) as client:
                await self._send(wave, client)
            state = await self._wait_until_idle()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        if _still_there(state):
            self.complaints.append(f"not idle {IDLE_WITHIN_S:g} s after a wave: {state.leftovers}")

    async def read_final_state(self) -> ServerState:
        """A thorough one, once nothing is left. A peek before it would not do: a connection whose client has left may
        still wait to be accepted, and be accepted after the peek.
        """
        deadline = time.monotonic() + IDLE_WITHIN_S
        while (state := await self._read_state(is_thorough=True)).leftovers and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        return state

    async def _read_state(self, is_thorough: bool = False) -> ServerState:
        """The server's state now. Its faults and what its log has are taken over."""
        state = await self._target.read(is_thorough)
        self.complaints += [f"the server: {fault}" for fault in state.faults]
        for number, endings in state.server_log.items():
            self.server_log.setdefault(number, []).extend(endings)
        return state

    async def _send(self, wave: Wave, client: Client) -> None:
        raw = RawClient(*_address(self._target.url), self.client_log)
        num_before = len(self.client_log.entries)
        ends_at = time.monotonic() + wave.seconds

        def is_over() -> bool:
            num_sent = len(self.client_log.entries) - num_before
            return time.monotonic() > ends_at or (wave.max_requests is not None and num_sent >= wave.max_requests)

        async def keep_asking() -> None:
            while not is_over():
                await self._ask(client, raw)

        asking = [asyncio.create_task(keep_asking()) for _ in range(wave.num_clients)]
        if wave.is_cut:
            await asyncio.wait(asking, timeout=max(0.0, ends_at - time.monotonic()))
            for task in asking:
                task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        self.complaints += [f"the soak itself failed: {end!r}" for end in ends if isinstance(end, Exception)]

    async def _ask(self, client: Client, raw: RawClient) -> None:
        rng = Random(f"{self.seed}-{len(self.client_log.entries)}")
        share = rng.random()
        if share < 0.06:
            entry = await raw.perform(rng)
        elif share < 0.25:
            manner = rng.choice([Manner.PATIENT, Manner.PATIENT, Manner.LEAVES_BEFORE])
            entry = await client.perform(_draw(rng, BAD)(rng), manner, rng)
        else:
            make = _draw(rng, GOOD)
            manner = _draw(rng, _LARGE_MANNERS if make is full_slot else _MANNERS)
            entry = await client.perform(make(rng), manner, rng)
        if entry.ending is Ending.QUEUE_FULL:
            await asyncio.sleep(rng.uniform(0.0, 1.0))  # the server asked for one second

    async def _poll_health(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                asked_at = time.monotonic()
                async with session.get(f"{self._target.url}/health") as response:
                    if response.status != 200:
                        self.health.complaints.append(f"/health answered {response.status}: {await response.text()}")
                self.health.latencies.append(time.monotonic() - asked_at)
                await asyncio.sleep(_POLL_S)

    async def _wait_until_idle(self) -> ServerState:
        deadline = time.monotonic() + IDLE_WITHIN_S
        while True:
            state = await self._read_state()
            if not _still_there(state) or time.monotonic() > deadline:
                return state
            await asyncio.sleep(_POLL_S)


def draw_waves(rng: Random) -> Iterator[Wave]:
    """Waves without end, each four of all strengths: from a small load to twice what the server can take."""
    while True:
        for num_clients in rng.sample([2, 8, 24, 40], 4):
            yield Wave(num_clients, rng.uniform(4.0, 10.0), is_cut=rng.random() < 0.4)


def _draw(rng: Random, weights: Mapping[_Drawn, int]) -> _Drawn:
    return rng.choices(list(weights), list(weights.values()))[0]


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None, "an address"
    return parts.hostname, parts.port or 80


def _still_there(state: ServerState) -> bool:
    """True if something runs. Connections may be the health poll's."""
    return bool(state.leftovers.keys() - {"connections"})


# --- the verdict


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
