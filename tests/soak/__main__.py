"""Mixed load on a server for minutes on end: does it stay right, and does nothing stay behind?

    python -m tests.soak --minutes 2 --seed 1

Good requests of all kinds, bad ones, clients that leave, that read slowly, that break HTTP; in waves, between which
everything must come to rest. Every request must end exactly once, in a way that is right for it, and the server must
tell the same of it; in the end every slot is free and memory, threads, files and tasks are what they were after the
first wave. The server is one of its own, with limits so small that all of them are met. The last line is JSON; the
exit code is 1 if anything was wrong.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import aiohttp

from tests.soak.case import BAD, GOOD, bad_case, full_slot
from tests.soak.client import BREAKS, Client, ClientLog, Ending, Manner, break_http, connecting
from tests.soak.server import STATE_PATH, State, soaked

IDLE_WITHIN_S = 10.0  # after the last client has left
MAX_HEALTH_S = 2.0
# A leaked request is hundreds of objects and a thread; caches fill up within their bounds, pools start threads when
# they first need them, and the allocator's own unrest is several MB.
MAX_GROWTH = {"tasks": 0, "open files": 0, "threads": 8, "objects": 5_000, "MB of memory": 15.0}
_WARM_UP_SHARE = 0.15
_POLL_S = 0.05
_MANNERS = {Manner.PATIENT: 12, Manner.LEAVES_BEFORE: 3, Manner.LEAVES_WITHIN: 3, Manner.SLOW: 1, Manner.STOPS: 1}
_LARGE_MANNERS = {Manner.LEAVES_WITHIN: 1, Manner.SLOW: 2, Manner.STOPS: 3}  # of replies that no buffer holds


@dataclass(frozen=True, slots=True)
class Wave:
    """So many clients at a time, for so long. At its end all may leave at once."""

    num_clients: int
    seconds: float
    is_cut: bool = False


@dataclass
class Load:
    """Puts waves on a server. The n-th request of a seed is always the same."""

    url: str
    seed: int
    client_log: ClientLog = field(default_factory=ClientLog)
    server_log: dict[str, list[str]] = field(default_factory=dict)
    health_seconds: list[float] = field(default_factory=list)  # how long `/health` took while the load was on
    complaints: list[str] = field(default_factory=list)

    async def tour(self) -> None:
        """Every kind of request once, by so few clients that there is room for each. Full slots are not read on."""
        rng = Random(self.seed)
        async with connecting(self.url, self.client_log) as client:

            async def ask_well() -> None:
                for make in GOOD:
                    await client.perform(make(rng), Manner.STOPS if make is full_slot else Manner.PATIENT, rng)

            async def ask_badly() -> None:
                for kind in BAD:
                    await client.perform(bad_case(rng, kind), Manner.PATIENT, rng)
                for kind in BREAKS:
                    await break_http(self.url, self.client_log, rng, kind)

            await asyncio.gather(ask_well(), ask_badly())

    async def put(self, wave: Wave) -> None:
        """One wave, and then the wait for the server to be idle. Connections may be the health poll's."""
        polling = asyncio.create_task(self._poll_health())
        try:
            async with connecting(self.url, self.client_log) as client:
                await self._send(wave, client)
            left = (await self.settle("connections")).leftovers
        finally:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)
        if left.keys() - {"connections"}:
            self.complaints.append(f"not idle {IDLE_WITHIN_S:g} s after a wave: {left}")

    async def settle(self, but_for: str = "") -> State:
        """The server's state once nothing is left, or when the time is over. Without exceptions a thorough one: a peek
        before it would not do, since a connection whose client has left may still wait to be accepted.
        """
        deadline = time.monotonic() + IDLE_WITHIN_S
        while True:
            async with aiohttp.ClientSession() as http:
                path = STATE_PATH if but_for else f"{STATE_PATH}?thorough"
                async with http.get(self.url + path) as response:
                    state = State(**await response.json())
            self.complaints += [f"the server: {fault}" for fault in state.faults]
            for number, endings in state.arrivals.items():
                self.server_log.setdefault(number, []).extend(endings)
            if not state.leftovers.keys() - {but_for} or time.monotonic() > deadline:
                return state
            await asyncio.sleep(_POLL_S)

    async def _send(self, wave: Wave, client: Client) -> None:
        ends_at = time.monotonic() + wave.seconds

        async def keep_asking() -> None:
            while time.monotonic() < ends_at:
                await self._ask(client)

        asking = [asyncio.create_task(keep_asking()) for _ in range(wave.num_clients)]
        if wave.is_cut:
            await asyncio.wait(asking, timeout=max(0.0, ends_at - time.monotonic()))
            for task in asking:
                task.cancel()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        self.complaints += [f"the soak itself failed: {end!r}" for end in ends if isinstance(end, Exception)]

    async def _ask(self, client: Client) -> None:
        rng = Random(f"{self.seed}-{len(self.client_log.entries)}")
        share = rng.random()
        if share < 0.06:
            entry = await break_http(self.url, self.client_log, rng, rng.choice(BREAKS))
        elif share < 0.25:
            manner = rng.choice([Manner.PATIENT, Manner.PATIENT, Manner.LEAVES_BEFORE])
            entry = await client.perform(bad_case(rng), manner, rng)
        else:
            make = rng.choices(list(GOOD), list(GOOD.values()))[0]
            manners = _LARGE_MANNERS if make is full_slot else _MANNERS
            entry = await client.perform(make(rng), rng.choices(list(manners), list(manners.values()))[0], rng)
        if entry.ending is Ending.QUEUE_FULL:
            await asyncio.sleep(rng.uniform(0.0, 1.0))  # the server asked for one second

    async def _poll_health(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                asked_at = time.monotonic()
                async with session.get(f"{self.url}/health") as response:
                    if response.status != 200:
                        self.complaints.append(f"/health answered {response.status}: {await response.text()}")
                self.health_seconds.append(time.monotonic() - asked_at)
                await asyncio.sleep(_POLL_S)

    def report(self, before: State, after: State) -> dict[str, Any]:
        """Returns what was counted, and everything that is wrong about it in words."""
        ranked = sorted(self.health_seconds) or [0.0]
        health_ms = {f"p{share}": round(1000 * ranked[share * (len(ranked) - 1) // 100], 1) for share in (50, 99, 100)}
        complaints = self.complaints + self.client_log.complaints(self.server_log) + growth(before, after)
        complaints += [f"at the end there are {count} {name}" for name, count in after.leftovers.items()]
        complaints += [f"/health took {ranked[-1]:.1f} s"] * (ranked[-1] > MAX_HEALTH_S)
        return {
            "endings": self.client_log.count(),
            "manners": Counter(entry.manner for entry in self.client_log.entries),
            "health_ms": health_ms,
            "before": before.sizes,
            "after": after.sizes,
            "complaints": complaints,
        }


def growth(before: State, after: State) -> list[str]:
    """Returns what there is more of than before, beyond what is allowed."""
    return [
        f"there were {before.sizes[name]:.6g} {name}, and now there are {after.sizes[name]:.6g}"
        for name, allowed in MAX_GROWTH.items()
        if after.sizes[name] - before.sizes[name] > allowed
    ]


def draw_waves(rng: Random) -> Iterator[Wave]:
    """Waves without end, each four of all strengths: from a small load to twice what the server can take."""
    while True:
        for num_clients in rng.sample([2, 8, 24, 40], 4):
            yield Wave(num_clients, rng.uniform(4.0, 10.0), is_cut=rng.random() < 0.4)


async def soak(url: str, seconds: float, seed: int) -> dict[str, Any]:
    """Warms up, then waves until the time is over. However slow the machine is, everything has been there once."""
    load, ends_at = Load(url, seed), time.monotonic() + seconds
    await load.tour()
    for wave in [Wave(24, _WARM_UP_SHARE * seconds), Wave(8, 2.0, is_cut=True)]:
        await load.put(wave)
    before = await load.settle()
    for wave in draw_waves(Random(seed)):
        await load.put(wave)
        print(f"{len(load.client_log.entries):6} requests so far", file=sys.stderr)
        if time.monotonic() > ends_at:
            break
    return load.report(before, await load.settle())


def main(
    flags: Sequence[str] | None = None,
    serve: Callable[[], AbstractContextManager[Any]] = soaked,
    load: Callable[[str, float, int], Coroutine[Any, Any, dict[str, Any]]] = soak,
) -> int:
    """Soaks, prints what came of it, and returns the exit code. `flags` None: those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, help="draws the requests; left out: a new one each time")
    parser.add_argument("--json", type=Path, help="file for the report")
    arguments = parser.parse_args(flags)
    seed = SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    with serve() as process:
        report = asyncio.run(load(process.url, arguments.minutes * 60, seed))
    report["complaints"] += [f"the server: {line.strip()}" for line in process.log if " ERROR " in line]
    for complaint in report["complaints"]:
        print(f"WRONG (seed {seed}): {complaint}")
    text = json.dumps({"seed": seed, "minutes": arguments.minutes, **report})
    if arguments.json is not None:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if report["complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
