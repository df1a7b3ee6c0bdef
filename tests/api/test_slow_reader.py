"""A client that reads slowly, or no more: it costs bounded memory, holds nobody up, and is cut off in the end."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift.api.config import ServerConfig
from chairlift.api.http.connections import Connection
from tests.api.conftest import SLOTS, Server
from tests.api.fault_support import RawClient, forward_of, held, post, serving, until_idle
from tests.engine.async_support import wait_until

SOCKET_BYTES = 4096
SHORT_S, LONG_S = 0.4, 30.0  # a test that had to wait for the longer one would fail
MOST_BUFFERED = 256 * 2**10  # a stream's own and the transport's buffer, and one event over
TOKENS = 250
VERBOSE: dict[str, Any] = {  # more than a megabyte of events
    "prompt": "Once upon a time",
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "n": SLOTS,
    "logprobs": 5,
    "stream": True,
}


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[asyncio.Transport]]:
    """Connections of the server, whose sockets hold little."""
    seen: list[asyncio.Transport] = []
    connection_made = Connection.connection_made

    def shrink(self: Connection, transport: asyncio.BaseTransport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        assert isinstance(transport, asyncio.Transport)
        seen.append(transport)
        connection_made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", shrink)
    yield seen
    seen.clear()


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Connections that are over."""
    over: list[Connection] = []
    connection_lost = Connection.connection_lost

    def note(self: Connection, error: BaseException | None) -> None:
        over.append(self)
        connection_lost(self, error)

    monkeypatch.setattr(Connection, "connection_lost", note)
    return over


async def post_and_read_nothing(server: Server, body: dict[str, Any]) -> RawClient:
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    return await post(server, body, sock=sock, limit=SOCKET_BYTES)


async def ended(server: Server) -> None:
    """The engine has made everything, and given the slots back."""
    await wait_until(lambda: server.num_free_slots < SLOTS, "it runs")
    await wait_until(lambda: server.num_free_slots == SLOTS, "the engine's work is done")


def choices_of(pieces: list[str]) -> dict[int, str]:
    """Each choice's text, of a stream that ended well."""
    events = "".join(pieces).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    texts: dict[int, str] = {}
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_stops_reading_is_cut_off_in_time(
    transports: list[asyncio.Transport], stream: bool
) -> None:
    config = ServerConfig(port=0, client_timeout=SHORT_S)
    async with serving(config=config) as server:
        async with await post_and_read_nothing(server, {**VERBOSE, "stream": stream}):
            await ended(server)
            start = time.monotonic()
            await wait_until(lambda: server.api.num_active == 0 and transports[0].is_closing(), "it is cut off")
            assert time.monotonic() - start < LONG_S / 2
        await until_idle(server)


async def test_what_a_silent_reader_costs_is_bounded_and_others_are_served(transports: list[asyncio.Transport]) -> None:
    async with (
        serving(config=ServerConfig(port=0, client_timeout=LONG_S)) as server,
        await post_and_read_nothing(server, VERBOSE) as silent,
    ):
        await wait_until(lambda: server.llm.num_unfinished == 1, "it has come in")
        (mailbox,) = server.llm._mailboxes.values()
        largest = 0
        await wait_until(lambda: server.num_free_slots < SLOTS, "it runs")
        while server.num_free_slots < SLOTS:
            largest = max(largest, transports[0].get_write_buffer_size())
            assert len(mailbox._changed) <= 1
            await asyncio.sleep(0.005)
        assert 2**14 < largest < MOST_BUFFERED
        async with await post(server, {**VERBOSE, "n": 1, "max_tokens": 5}) as other:
            await other.head()
            assert set(choices_of(await other.rest())) == {0}
        assert server.api.num_active == 1
        silent.reset()
        await until_idle(server)


@pytest.mark.usefixtures("transports")
async def test_a_slow_reader_gets_all_of_it_in_the_end() -> None:
    async with serving(config=ServerConfig(port=0, client_timeout=LONG_S)) as server:
        async with await post(server, VERBOSE) as quick:
            await quick.head()
            expected = choices_of(await quick.rest())
        async with await post_and_read_nothing(server, VERBOSE) as slow:
            await ended(server)
            await slow.head()
            pieces = await slow.rest()
        assert len(expected) == SLOTS
        assert choices_of(pieces) == expected
        assert all(len(text) > TOKENS / 2 for text in expected.values())
        await until_idle(server)


@pytest.mark.usefixtures("transports")
async def test_a_reader_that_pauses_for_less_than_the_timeout_again_and_again_is_not_cut_off() -> None:
    timeout_s, pause_s = 1.0, 0.25
    async with (
        serving(config=ServerConfig(port=0, client_timeout=timeout_s)) as server,
        await post_and_read_nothing(server, VERBOSE) as slow,
    ):
        await slow.head()
        pieces: list[str] = []
        while piece := await slow.chunk():
            pieces.append(piece)
            if len(pieces) in (30, 60, 90, 120, 150):  # together longer than the timeout
                await asyncio.sleep(pause_s)
        assert set(choices_of(pieces)) == set(range(SLOTS))


async def test_a_hung_engine_leaves_no_silent_reader_behind(transports: list[asyncio.Transport]) -> None:
    async with (
        serving(config=ServerConfig(port=0, client_timeout=SHORT_S), step_timeout=0.5) as server,
        await post_and_read_nothing(server, VERBOSE),
    ):
        await wait_until(lambda: bool(transports) and transports[0].get_write_buffer_size() > 2**14, "it is full")
        with held(forward_of(server.llm), "hidden"):
            await asyncio.wait_for(server.llm.died.wait(), 10.0)
            await wait_until(lambda: server.api.num_active == 0 and transports[0].is_closing(), "it is cut off")


async def test_a_reply_that_fits_into_the_buffer_and_is_never_read_does_not_keep_its_connection_for_ever(
    lost: list[Connection],
) -> None:
    config = ServerConfig(port=0, idle_timeout=SHORT_S, client_timeout=SHORT_S)
    async with (
        serving(config=config) as server,
        await post_and_read_nothing(server, {**VERBOSE, "n": 1, "max_tokens": 20}),
    ):
        await wait_until(lambda: server.llm.num_unfinished > 0, "it has come in")
        await wait_until(lambda: len(lost) == 1, "the connection is over")
