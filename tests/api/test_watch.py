"""/watch: everybody sees the newest snapshot, and nobody who watches costs the engine more than one look at a time."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from chairlift.api.errors import error_middleware
from chairlift.api.http.event_stream import PULSE, Pulse
from chairlift.api.pages import MAX_WATCHERS, SnapshotFeed, add_page_routes
from chairlift.engine.journal import Snapshot, SnapshotSource, short_id
from chairlift.errors import EngineClosed, EngineDead
from tests.api.conftest import SOCKET_BYTES, serving_app
from tests.engine.async_support import wait_until
from tests.support.fake_batch import FakeBatch

QUICK_S = 0.001


class Source:
    """A batch that is looked at; it counts the looks and moves on by a step at each."""

    def __init__(self, batch: FakeBatch, moves: bool = True) -> None:
        self.batch = batch
        self.moves = moves
        self.num_looks = 0
        self.num_cancelled = 0
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def read_snapshot(self) -> Snapshot:
        self.num_looks += 1
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        if self.moves:
            self.batch.step()
        return await self.batch.read_snapshot()


def busy(num_slots: int = 4) -> Source:
    """A batch that will not run empty while a test lasts."""
    batch = FakeBatch(num_slots, slot_len=100_000)
    for _ in range(num_slots):
        batch.add(num_prompt_tokens=8, num_output_tokens=90_000)
    return Source(batch)


def read(event: str) -> Any:
    assert event.startswith("data: {")
    assert event.endswith("}\n\n")
    return json.loads(event.removeprefix("data: "))


async def next_of(events: AsyncGenerator[str]) -> Any:
    return read(await asyncio.wait_for(anext(events), 10.0))


async def test_an_event_tells_of_slots_queue_launches_and_totals_and_leaves_defaults_out() -> None:
    batch = FakeBatch(num_slots=3, slot_len=64, token_budget=16)
    batch.add(num_prompt_tokens=10, num_output_tokens=3, num_reused=4)
    batch.add(num_prompt_tokens=30, num_output_tokens=5)
    batch.step()
    for length in (7, 9):
        batch.add(num_prompt_tokens=length, num_output_tokens=1)
    async with aclosing(SnapshotFeed(Source(batch, moves=False)).events()) as events:
        seen = await next_of(events)
    (seconds,) = (launch.pop("seconds") for launch in seen["launches"])
    assert 0.006 < seconds < 0.009
    assert seen.pop("time") == pytest.approx(seconds)
    first, second, third, fourth = (short_id(f"fake-{number}-0-0") for number in (1, 2, 3, 4))
    reused = {"num_reused": 4, "num_computed": 10, "num_prompt_tokens": 10, "num_tokens": 11}
    begun = {"num_computed": 10, "num_prompt_tokens": 30, "num_tokens": 30}
    totals = {"num_prompt_tokens": 10, "num_cached_tokens": 4, "num_generated_tokens": 1, "num_first_tokens": 1}
    decoding = {"state": "decoding", "request_id": first, **reused}
    assert seen == {
        "slot_len": 64,
        "slots": [decoding, {"state": "prefilling", "request_id": second, **begun}, {}],
        "num_waiting": 2,
        "waiting": [
            {"request_id": third, "num_prompt_tokens": 7, "seconds": 0.0},
            {"request_id": fourth, "num_prompt_tokens": 9, "seconds": 0.0},
        ],
        "num_launches": 1,
        "launches": [{"num_prefill_tokens": 16, "num_decode_rows": 0, "num_steps": 1}],
        "totals": {**totals, "seconds_to_first_token": pytest.approx(seconds)},
    }


def test_a_short_id_is_that_of_the_generation_whatever_its_sequence() -> None:
    assert short_id("123456789-17-0") == short_id("123456789-17-1") == "cbf43926"  # CRC-32's own check value
    assert short_id("123456780-17-0") != "cbf43926"


async def test_nobody_looks_while_nobody_watches() -> None:
    source = busy()
    feed = SnapshotFeed(source, interval_s=QUICK_S)
    async with aclosing(feed.events()) as events:
        await next_of(events)
        source.may_answer.clear()
        num_looks = source.num_looks + 1
        following = asyncio.ensure_future(anext(events))
        await wait_until(lambda: source.num_looks == num_looks, "the look that waits for the engine")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    await wait_until(lambda: source.num_cancelled == 1, "it is given up")
    source.may_answer.set()
    await asyncio.sleep(20 * QUICK_S)
    assert source.num_looks == num_looks
    assert feed.num_watchers == 0
    async with aclosing(feed.events()) as events:
        assert (await next_of(events))["num_launches"] >= 1
    assert source.num_looks > num_looks


async def test_who_is_slow_gets_the_newest_and_misses_the_rest() -> None:
    source = busy()
    feed = SnapshotFeed(source, interval_s=QUICK_S)
    async with aclosing(feed.events()) as slow, aclosing(feed.events()) as quick:
        assert (await next_of(slow))["num_launches"] == 1
        for _ in range(20):
            await next_of(quick)
        assert (await next_of(slow))["num_launches"] >= 20


async def test_nothing_is_sent_while_nothing_changes() -> None:
    source = busy()
    source.batch.step()
    source.moves = False
    async with aclosing(SnapshotFeed(source, interval_s=QUICK_S).events()) as events:
        await next_of(events)
        following = asyncio.ensure_future(anext(events))
        await wait_until(lambda: source.num_looks > 20, "it is looked at all the same")
        assert not following.done()
        source.batch.time += 1.0  # time alone is no change
        num_looks = source.num_looks
        await wait_until(lambda: source.num_looks > num_looks + 2, "and looked at again")
        assert not following.done()
        source.batch.step()
        assert read(await asyncio.wait_for(following, 10.0))["num_launches"] == 2


async def test_an_engine_that_is_gone_ends_the_streams_and_tells_who_comes_later() -> None:
    source = busy()
    feed = SnapshotFeed(source, interval_s=QUICK_S)
    async with aclosing(feed.events()) as events, aclosing(feed.events()) as late:
        await next_of(events)
        source.error = EngineDead("a step failed")
        assert len([event async for event in events]) <= 1  # one may have been on its way
        with pytest.raises(EngineDead, match="a step failed"):
            await next_of(late)
    source.error = None
    async with aclosing(feed.events()) as events:
        await next_of(events)


async def test_of_five_thousand_watchers_only_so_many_are_let_in_and_get_the_very_same_event_of_one_look() -> None:
    source = busy()
    feed = SnapshotFeed(source, interval_s=60.0)
    async with contextlib.AsyncExitStack() as stack:
        watchers = [await stack.enter_async_context(aclosing(feed.events())) for _ in range(MAX_WATCHERS)]
        first, *others = [await asyncio.wait_for(anext(events), 10.0) for events in watchers]
        assert all(event is first for event in others)
        for _ in range(5000 - MAX_WATCHERS):
            with pytest.raises(web.HTTPServiceUnavailable):
                await anext(feed.events())
        assert feed.num_watchers == MAX_WATCHERS
        assert source.num_looks == 1
    assert feed.num_watchers == 0


@asynccontextmanager
async def serving(
    source: SnapshotSource,
    client_timeout: float = 60.0,
    pulse: Pulse = Pulse(),  # noqa: B008 - left as it is
) -> AsyncIterator[str]:
    """The endpoint on the production's connections; its address."""
    app = web.Application(middlewares=[error_middleware])
    app[PULSE] = pulse
    add_page_routes(app, SnapshotFeed(source, interval_s=QUICK_S))
    async with serving_app(app, client_timeout=client_timeout) as url:
        yield f"{url}/watch"


async def events_of(response: aiohttp.ClientResponse, num_events: int) -> list[Any]:
    return [read((await response.content.readuntil(b"\n\n")).decode()) for _ in range(num_events)]


async def test_a_silent_engine_is_told_from_a_dead_connection_by_comments(http: aiohttp.ClientSession) -> None:
    source = busy()
    source.moves = False
    async with serving(source, pulse=Pulse(0.02)) as url, http.get(url) as response:
        await events_of(response, 1)
        assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"


async def test_events_are_streamed_and_one_too_many_is_a_503_that_says_what_to_do(http: aiohttp.ClientSession) -> None:
    async with serving(busy()) as url, contextlib.AsyncExitStack() as stack:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as many:
            for _ in range(MAX_WATCHERS):
                await events_of(await stack.enter_async_context(many.get(url)), 1)
            async with http.get(url) as response:
                assert response.status == 503
                assert "Retry-After" in response.headers
                assert "close one, or try again later" in (await response.json())["error"]["message"]
            await stack.aclose()
        async with http.get(url) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            numbers = [event["num_launches"] for event in await events_of(response, 3)]
            assert numbers == sorted(set(numbers))


async def test_an_engine_that_was_gone_before_and_other_methods_are_errors_with_a_status(
    http: aiohttp.ClientSession,
) -> None:
    source = busy()
    source.error = EngineClosed("the engine was closed")
    async with serving(source) as url:
        async with http.get(url) as response:
            assert response.status == 503
            assert (await response.json())["error"]["message"] == "the engine was closed"
        for method in ("HEAD", "POST"):
            async with http.request(method, url) as response:
                assert response.status == 405


async def test_a_watcher_that_never_reads_costs_little_holds_nobody_up_and_is_cut_off(
    http: aiohttp.ClientSession, transports: list[asyncio.Transport]
) -> None:
    source = busy(num_slots=256)
    async with serving(source, client_timeout=1.0) as url:
        address = urlsplit(url)
        silent = socket.create_connection((address.hostname, address.port))
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        with contextlib.closing(silent):
            silent.sendall(b"GET /watch HTTP/1.1\r\nHost: a\r\n\r\n")
            await wait_until(lambda: bool(transports) and transports[0].get_write_buffer_size() > 0, "it is full")
            async with http.get(url) as response:
                num_seen = source.num_looks
                largest = 0
                while not transports[0].is_closing():
                    largest = max(largest, transports[0].get_write_buffer_size())
                    await events_of(response, 1)
                assert source.num_looks > num_seen + 5
                assert 0 < largest < 256 * 2**10
