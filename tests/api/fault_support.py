"""Faults for a real server: calls and processes that are held back until a test lets go, a record of every launch."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.execution.runner import Launch as Begun
from chairlift.plan import StepPlan
from chairlift.scheduler import RequestState
from tests.api.conftest import SLOTS, Server
from tests.api.conftest import serving as serving
from tests.engine.async_support import Clock as Clock
from tests.engine.async_support import Gate as Gate
from tests.engine.async_support import clock_of as clock_of
from tests.engine.async_support import held as held
from tests.engine.async_support import wait_until
from tests.support.engines import core_of, hooked
from tests.support.server_process import SERVE

# Scripts for a server process. The process from which API workers are forked is forked, too: a fresh interpreter
# would import for seconds.
SERVE_WITH_WORKERS = f"""
import os, signal, socket
from chairlift.__main__ import nurse
from chairlift.api.workers import Nursery

ours, theirs = socket.socketpair()
nursery = os.fork()
if not nursery:
    ours.close()
    nurse(theirs.fileno())
theirs.close()

class Forked:
    def poll(self):
        return None

    def kill(self):
        os.kill(nursery, signal.SIGKILL)

    def wait(self):
        os.waitpid(nursery, 0)

def take_forked(self):
    self._socket, self._process = ours, Forked()

Nursery._start = take_forked
{SERVE}
"""
# Streams begin, and go on when there is a file at the address in the variable GATE.
GATED = """
import os, time
from chairlift.engine.core import EngineCore

step, steps = EngineCore.step, []

def held_step(self):
    steps.append(1)
    while len(steps) > 4 and not os.path.exists(os.environ["GATE"]):
        time.sleep(0.005)
    return step(self)

EngineCore.step = held_step
"""
# Steps take a while, so that streams last; what a processor does meanwhile does not matter.
SLOW = """
import time
from chairlift.engine.core import EngineCore

real_step = EngineCore.step

def slow_step(self):
    time.sleep(0.005)
    return real_step(self)

EngineCore.step = slow_step
"""
# A step with a certain seed never ends.
HANGING = """
import threading
from chairlift.engine.execution.runner import ModelRunner

launch = ModelRunner.launch

def hang(*_):
    threading.Event().wait()

ModelRunner.launch = lambda self, plan: (hang if plan.rows[-1].key.params.seed == 13 else launch)(self, plan)
"""


def forward_of(llm: AsyncLLM) -> Any:
    """Returns what runs the model; `hidden` is called once per step of a launch."""
    return core_of(llm).executor.forward


@dataclass(frozen=True)
class Launch:
    """Holds what one launch computes: requests, their tokens in its first step, and those that they had before."""

    rows: dict[str, int]
    starts: dict[str, int]
    requests: list[RequestState]
    num_steps: int
    num_free_slots: int


@dataclass
class Launches:
    """Every launch of an engine, as it begins."""

    all: list[Launch] = field(default_factory=list)

    @property
    def latest(self) -> Launch:
        return self.all[-1]


@contextmanager
def recorded(llm: AsyncLLM) -> Iterator[Launches]:
    launches = Launches()

    def record(launch: Callable[[StepPlan], Begun], plan: StepPlan) -> Begun:
        requests = [core_of(llm).scheduler.placement.owner_of(row.slot) for row in plan.rows]
        rows = {row.key.tag: row.num_new_tokens for row in plan.rows}
        starts = {row.key.tag: row.start for row in plan.rows}
        launches.all.append(Launch(rows, starts, requests, plan.num_steps, core_of(llm).cache.slots_remaining))
        return launch(plan)

    with hooked(llm, record):
        yield launches


@contextmanager
def silent_for(server: Server, interval_s: float) -> Iterator[None]:
    """Streams that are silent for so long get keep-alive events."""
    pulse, before = server.api.pulse, server.api.pulse.interval_s
    pulse.interval_s = interval_s
    try:
        yield
    finally:
        pulse.interval_s = before


class RawClient:
    """A socket, and what one does with it; a context manager leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reset()

    def reset(self) -> None:
        """Leaves without a word: RST."""
        self._writer.transport.abort()

    def close(self) -> None:
        """Leaves politely: FIN."""
        self._writer.close()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def head(self) -> str:
        return (await self._reader.readuntil(b"\r\n\r\n")).decode()

    async def answer(self) -> tuple[str, str]:
        """The next reply that says how long it is: its head and its body."""
        head = await self.head()
        return head, await self.body(head)

    async def body(self, head: str) -> str:
        """The rest of a reply that says how long it is."""
        length = next(line for line in head.splitlines() if line.startswith("Content-Length: ")).split()[1]
        return (await self._reader.readexactly(int(length))).decode()

    async def chunk(self) -> str:
        """The next piece of a chunked reply; empty at its end."""
        size = int((await self._reader.readuntil(b"\r\n")).strip(), 16)
        return (await self._reader.readexactly(size + 2))[:-2].decode()

    async def read_all(self) -> list[str]:
        pieces = []
        while piece := await self.chunk():
            pieces.append(piece)
        return pieces

    async def seconds_until_closed(self) -> float:
        """Returns how long the server keeps the silent connection open; it must not send anything."""
        start = time.monotonic()
        with suppress(ConnectionResetError):  # the answer to what was sent after the server had closed
            assert await self._reader.read(1) == b""
        return time.monotonic() - start


async def connect(url: str, **socket: Any) -> RawClient:
    """`socket`: arguments of `asyncio.open_connection`."""
    host, port = url.removeprefix("http://").split(":")
    if "sock" in socket:
        await asyncio.get_running_loop().sock_connect(socket["sock"], (host, int(port)))
        return RawClient(*await asyncio.open_connection(**socket))
    return RawClient(*await asyncio.open_connection(host, int(port), **socket))


async def post(server: Server, body: dict[str, Any], path: str = "/v1/completions", **socket: Any) -> RawClient:
    """Sends a request and does not wait for anything."""
    client = await connect(server.url, **socket)
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    client.send(f"{head}\r\n\r\n".encode() + payload)
    return client


async def until_idle(server: Server, num_slots: int = SLOTS) -> None:
    """Waits until no request, no generation and no slot is left."""
    await wait_until(lambda: server.is_idle and server.num_free_slots == num_slots, "nothing runs")
    core_of(server.llm).check()
