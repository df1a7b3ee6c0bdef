"""Makes a whole test: finds the model, makes what is to be sent, warms up, measures.

Conversations are played a fixed number at a time (closed loop) or according to a schedule (open loop). Times are
`time.perf_counter()` seconds. In the open loop a late client does not shift later requests, and latency counts from the
time a request was due. So a stalled server does not delay its own measurement ("coordinated omission").
"""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from itertools import accumulate
from time import perf_counter, thread_time
from typing import Any, TextIO

from aiohttp import ClientSession
from tqdm import tqdm

from chairlift.loadtest.client import allow_many_connections, first_model, open_session, send
from chairlift.loadtest.config import DEFAULT_CONCURRENCY, BenchConfig
from chairlift.loadtest.recordings import Message
from chairlift.loadtest.records import INCOMPLETE_STREAM, BenchError, RequestFailure, RequestRecord
from chairlift.loadtest.summary import BenchResult
from chairlift.loadtest.workload import Conversation, Turn, Workload, build_workload

TICK_S = 0.01

Send = Callable[[int, float], Coroutine[Any, Any, None]]
"""Sends one arrival, given its index and the time it is due, and returns when its last reply has ended."""


async def make_test(config: BenchConfig) -> BenchResult:
    """Make the test that `config` describes. Raises `BenchError` if it cannot be made."""
    allow_many_connections()
    workload = build_workload(config)
    async with open_session(config) as session:
        resolved = config.resolved(config.model or await first_model(session, config.url))
        await _warm_up(session, workload, resolved)
        return await _measure(session, workload, resolved)


async def closed_loop(count: int, concurrency: int, send: Send) -> None:
    """Keep `concurrency` arrivals in flight until `count` were sent; each is due when it is sent."""
    indices = iter(range(count))

    async def keep_sending() -> None:
        for index in indices:
            await send(index, perf_counter())

    async with asyncio.TaskGroup() as lanes:
        for _ in range(min(concurrency, count)):
            lanes.create_task(keep_sending())


async def open_loop(offsets: Sequence[float], send: Send) -> None:
    """Send arrival i when `offsets[i]` seconds have passed, however many are still in flight."""
    start = perf_counter()
    async with asyncio.TaskGroup() as in_flight:
        for index, offset in enumerate(offsets):
            # Even when late this yields: tasks created before have yet to send.
            await _sleep_until(start + offset)
            in_flight.create_task(send(index, start + offset))


async def _sleep_until(moment: float) -> None:
    """Yield at least once, and do not return early, as an event loop's timers may by their resolution."""
    await asyncio.sleep(max(0.0, moment - perf_counter()))
    while perf_counter() < moment:
        await asyncio.sleep(0)


class Player:
    """Sends conversations, each turn with all turns and replies before it, and passes on a record of every request.

    The bodies of first turns are encoded ahead of the clock. `config` is resolved; where it has a schedule, its
    concurrency is the most requests in flight, and further ones wait here.
    """

    def __init__(
        self,
        session: ClientSession,
        config: BenchConfig,
        conversations: Sequence[Conversation],
        take: Callable[[RequestRecord], None],
    ) -> None:
        self._send = partial(send, session, config.endpoint_url)
        self._think_time = config.think_time
        self._fields = {
            "model": config.model,
            "temperature": config.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if config.ignore_eos else {})
        self._conversations = conversations
        self._first_bodies = [self._body(conversation[0], []) for conversation in conversations]
        self._first_indices = list(accumulate(map(len, conversations), initial=0))
        self._take = take
        is_limited = config.is_open_loop and config.concurrency is not None
        self._gate = asyncio.Semaphore(config.concurrency or 0) if is_limited else nullcontext()

    async def play(self, number: int, due_at: float) -> None:
        """All turns of one conversation, the first due at a time of `perf_counter`. Never raises."""
        history: list[Message] = []
        body, failure = self._first_bodies[number], None
        for position, turn in enumerate(self._conversations[number]):
            if position:
                due_at = perf_counter()
            if position and failure is None:
                due_at += self._think_time
                body = self._body(turn, history)
                await _sleep_until(due_at)
            record = RequestRecord(self._first_indices[number] + position, due_at, due_at, due_at, turn=position)
            record.asked_prompt_tokens, record.asked_output_tokens = turn.prompt_tokens, turn.output_tokens
            if failure is None:
                async with self._gate:
                    text = await self._send(record, body)
                history += [*turn.prompt.get("messages", ()), {"role": "assistant", "content": text}]
                failure = record.failure
            else:  # there is no reply to continue from
                record.failure = RequestFailure("not sent", "an earlier turn of the conversation failed")
            self._take(record)

    def _body(self, turn: Turn, history: list[Message]) -> bytes:
        prompt = {"messages": history + turn.prompt["messages"]} if history else turn.prompt
        return json.dumps(self._fields | {"max_tokens": turn.output_tokens} | prompt).encode()


async def _warm_up(session: ClientSession, workload: Workload, config: BenchConfig) -> None:
    """Raises `BenchError` if a request fails: a test of a server that is not ready shows nothing.

    Streams that break off are left to the measurement, which counts them.
    """
    records: list[RequestRecord] = []
    player = Player(session, config, workload.warm_up, records.append)
    await closed_loop(len(workload.warm_up), DEFAULT_CONCURRENCY, player.play)
    for record in records:
        if record.failure is not None and record.failure.label != INCOMPLETE_STREAM:
            raise BenchError(f"the warm-up request to {config.endpoint_url} failed: {record.failure}")


async def _measure(session: ClientSession, workload: Workload, config: BenchConfig) -> BenchResult:
    # Otherwise collecting what the imports left behind takes tens of milliseconds, in which no chunk is seen arriving.
    gc.collect()
    gc.freeze()
    try:
        async with watching(workload.num_requests) as watch:
            player = Player(session, config, workload.conversations, watch.add)
            started_at, cpu_at_start = perf_counter(), thread_time()
            if workload.offsets is not None:
                await open_loop(workload.offsets, player.play)
            else:
                assert config.concurrency is not None, "the configuration is not resolved"
                await closed_loop(len(workload.conversations), config.concurrency, player.play)
            duration_s = perf_counter() - started_at
            busy_share = (thread_time() - cpu_at_start) / duration_s
    finally:
        gc.unfreeze()
    records = sorted(watch.records, key=lambda record: record.index)
    return BenchResult(config, tuple(records), started_at, duration_s, tuple(watch.lags), busy_share)


class Watch:
    """Collects records and shows progress; also samples by how many seconds the event loop is late."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self.records: list[RequestRecord] = []
        self.lags: list[float] = []
        self._num_failed = 0
        self._bar = bar

    def add(self, record: RequestRecord) -> None:
        """Records a request that has ended."""
        self.records.append(record)
        if record.failure is not None:
            self._num_failed += 1
            self._bar.set_postfix_str(f"{self._num_failed} failed", refresh=False)
        self._bar.update()

    async def sample_lag(self) -> None:
        """Runs until it is cancelled."""
        while True:
            due_at = perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self.lags.append(max(0.0, perf_counter() - due_at))


@asynccontextmanager
async def watching(num_requests: int, stream: TextIO | None = None) -> AsyncIterator[Watch]:
    """A watch that samples until the context is left, and shows on a terminal alone (`disable=None`).

    `stream`: None is standard error.
    """
    with tqdm(total=num_requests, unit="request", disable=None, file=stream, dynamic_ncols=True) as bar:
        watch = Watch(bar)
        sampling = asyncio.create_task(watch.sample_lag())
        try:
            yield watch
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])
