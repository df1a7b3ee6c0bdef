"""The load: waves of clients, with pauses between them in which nothing may be left."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from soaking.bad import BAD, huge_body, more_than_ever_fits, wrong_prompt
from soaking.books import Books
from soaking.case import Draw
from soaking.client import Client, Manner
from soaking.good import GOOD, full_slot
from soaking.ledger import Ledger, Outcome
from soaking.observer import Observer
from soaking.raw import RawClient

IDLE_WITHIN_S = 10.0  # after the last client has left
_POLL_S = 0.05
_MANNERS = {Manner.PATIENT: 12, Manner.LEAVES_BEFORE: 3, Manner.LEAVES_WITHIN: 3, Manner.SLOW: 1, Manner.STOPS: 1}
_LARGE_MANNERS = {Manner.LEAVES_WITHIN: 1, Manner.SLOW: 2, Manner.STOPS: 3}  # of replies that no buffer holds
_Drawn = TypeVar("_Drawn")


@dataclass(frozen=True, slots=True)
class Kinds:
    """Ways to draw requests, with their weights; and whether connections are broken too."""

    good: Mapping[Draw, int]
    bad: Mapping[Draw, int]
    has_raw: bool

    def without_limits(self) -> "Kinds":
        """Without those that know the limits of our own server."""
        good = {draw: weight for draw, weight in self.good.items() if draw not in KNOW_OUR_LIMITS}
        bad = {draw: weight for draw, weight in self.bad.items() if draw not in KNOW_OUR_LIMITS}
        return Kinds(good, bad, has_raw=False)


ALL_KINDS = Kinds(GOOD, BAD, has_raw=True)
KNOW_OUR_LIMITS = {full_slot, wrong_prompt, huge_body, more_than_ever_fits}


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

    def __init__(self, observer: Observer, seed: int, kinds: Kinds = ALL_KINDS) -> None:
        self._observer = observer
        self.seed = seed
        self._kinds = kinds
        self.ledger = Ledger()
        self.health = Health()
        self.journal: dict[str, list[str]] = {}
        self.complaints: list[str] = []

    async def put(self, wave: Wave) -> None:
        """One wave, and then the wait for the server to be idle."""
        polling = asyncio.create_task(self._poll_health())
        try:
            async with Client(self._observer.url, self.ledger) as client:
                await self._send(wave, client)
            books = await self._wait_until_idle()
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        if books is not None and _still_there(books):
            self.complaints.append(f"not idle {IDLE_WITHIN_S:g} s after a wave: {books.leftovers}")

    async def read_final_books(self) -> Books | None:
        """Thorough ones, once the connections of clients that left have been taken down too."""
        deadline = time.monotonic() + IDLE_WITHIN_S
        while (books := await self._read_books()) is not None and books.leftovers and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        return await self._read_books(is_thorough=True)

    async def _read_books(self, is_thorough: bool = False) -> Books | None:
        """What the observer sees. Faults and what the journal has are taken over."""
        books = await self._observer.read(is_thorough)
        if books is not None:
            self.complaints += [f"the server: {fault}" for fault in books.faults]
            for number, endings in books.journal.items():
                self.journal.setdefault(number, []).extend(endings)
        return books

    async def _send(self, wave: Wave, client: Client) -> None:
        raw = RawClient(*_address(self._observer.url), self.ledger)
        num_before = len(self.ledger.entries)
        ends_at = time.monotonic() + wave.seconds

        def is_over() -> bool:
            num_sent = len(self.ledger.entries) - num_before
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
        rng = Random(f"{self.seed}-{len(self.ledger.entries)}")
        share = rng.random()
        if share < 0.06 and self._kinds.has_raw:
            entry = await raw.perform(rng)
        elif share < 0.25:
            manner = rng.choice([Manner.PATIENT, Manner.PATIENT, Manner.LEAVES_BEFORE])
            entry = await client.perform(_draw(rng, self._kinds.bad)(rng), manner, rng)
        else:
            make = _draw(rng, self._kinds.good)
            manner = _draw(rng, _LARGE_MANNERS if make is full_slot else _MANNERS)
            entry = await client.perform(make(rng), manner, rng)
        if entry.outcome is Outcome.QUEUE_FULL:
            await asyncio.sleep(rng.uniform(0.0, 1.0))  # the server asked for one second

    async def _poll_health(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                asked_at = time.monotonic()
                async with session.get(f"{self._observer.url}/health") as response:
                    if response.status != 200:
                        self.health.complaints.append(f"/health answered {response.status}: {await response.text()}")
                self.health.latencies.append(time.monotonic() - asked_at)
                await asyncio.sleep(_POLL_S)

    async def _wait_until_idle(self) -> Books | None:
        deadline = time.monotonic() + IDLE_WITHIN_S
        while True:
            books = await self._read_books()
            if books is None or not _still_there(books) or time.monotonic() > deadline:
                return books
            await asyncio.sleep(_POLL_S)


def draw_wave(rng: Random) -> Wave:
    """Of any strength, from what bores the server to what is twice too much for it."""
    return Wave(rng.choice([2, 8, 24, 40]), rng.uniform(4.0, 10.0), is_cut=rng.random() < 0.4)


def _draw(rng: Random, weights: Mapping[_Drawn, int]) -> _Drawn:
    return rng.choices(list(weights), list(weights.values()))[0]


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None, "an address"
    return parts.hostname, parts.port or 80


def _still_there(books: Books) -> bool:
    """True if something runs. Connections may be the health poll's."""
    return bool(books.leftovers.keys() - {"connections"})
