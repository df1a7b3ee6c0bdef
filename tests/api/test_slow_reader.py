"""A client that reads slowly or no more, or leaves: it costs bounded memory and holds nobody up."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from chairlift.api import ServerConfig
from chairlift.api.http import Connection
from chairlift.engine.text.grammar import GrammarCompiler
from tests.api.conftest import SLOTS, Server
from tests.api.contract import text_of
from tests.api.fault_support import Gate, Launches, RawClient, forward_of, held, post, recorded, serving, until_idle
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


LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}
STAYING_TOKENS, LEAVING_TOKENS = 90, 150
STAYING = {"prompt": "Once upon a time", "max_tokens": STAYING_TOKENS, "temperature": 0, "ignore_eos": True}
LEAVING = {"prompt": "Tim went to the park. " * 8, "max_tokens": LEAVING_TOKENS, "temperature": 0, "ignore_eos": True}
PROMPT_BUDGET = 32  # the leaving one's prompt takes several steps

KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streaming": {"stream": True},
    "choices": {"stream": True, "n": 3},
    "prompts": {"prompt": [LEAVING["prompt"], "Tim. " * 20, "Tim"]},
}


def has_leaving_row(launches: Launches, is_right: Callable[[int, int], bool]) -> bool:
    """Whether the newest launch has a row of the leaving request of which (computed before, new) that is true."""
    latest = launches.latest
    leaving = [request for request in latest.requests if request.max_tokens == LEAVING_TOKENS]
    return any(is_right(request.num_computed, latest.rows[request.request_id]) for request in leaving)


async def in_first_chunk(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: has_leaving_row(launches, lambda computed, _: computed == 0))


async def in_later_chunk(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: has_leaving_row(launches, lambda computed, new: computed > 0 and new > 1))


async def in_decoding(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: has_leaving_row(launches, lambda computed, new: computed > 0 and new == 1))


async def within_a_launch_of_several_steps(gate: Gate, launches: Launches) -> None:
    await advance(gate, lambda: launches.latest.num_steps == 4 and has_leaving_row(launches, lambda *_: True))
    for _ in range(2):  # the third of the four is held now
        gate.allow()
        await gate.entered()


PHASES = [in_first_chunk, in_later_chunk, in_decoding, within_a_launch_of_several_steps]


async def advance(gate: Gate, is_there: Callable[[], bool]) -> None:
    """Forward pass by forward pass; returns while one is held."""
    while not is_there():
        gate.allow()
        await gate.entered()


def assert_nothing_more_was_computed(launches: Launches, num_before: int) -> None:
    """After the launch that was running when the client left, only the staying one's rows are computed."""
    later = launches.all[num_before:]
    assert {request.max_tokens for launch in later for request in launch.requests} == {STAYING_TOKENS}
    assert {(launch.num_free_slots, len(launch.rows)) for launch in later} == {(SLOTS - 1, 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("until_phase", PHASES)
async def test_leaving_frees_every_slot_within_the_launch_and_nothing_more_is_computed(
    until_phase: Callable[[Gate, Launches], Awaitable[None]], kind: str
) -> None:
    async with serving(max_num_batched_tokens=PROMPT_BUDGET, max_steps_per_launch=4) as server:
        alone = await text_of(server, STAYING)
        with recorded(server.llm) as launches, held(forward_of(server.llm), "hidden") as gate:
            staying = asyncio.create_task(text_of(server, STAYING))
            await gate.entered()
            leaving = await post(server, {**LEAVING, **KINDS[kind]})
            await wait_until(lambda: server.api.num_active == 2 and server.llm.num_unfinished > 1, "both are there")
            await until_phase(gate, launches)
            await leave_now(server, leaving)
            num_before = len(launches.all)
            gate.open()
            assert await staying == alone
            await until_idle(server)
        assert_nothing_more_was_computed(launches, num_before)


async def leave_now(server: Server, leaving: RawClient, num_staying: int = 1) -> None:
    """Returns once the server has let go of that request: before the step that is held back comes to its end."""
    leaving.reset()
    await wait_until(lambda: server.api.num_active == server.llm.num_unfinished == num_staying, "one has left")


async def test_leaving_between_two_steps_frees_the_slot_before_the_next() -> None:
    async with serving() as server:
        with recorded(server.llm) as launches, held(server.llm._core, "step") as gate:
            staying = asyncio.create_task(text_of(server, STAYING))
            await gate.entered()
            leaving = await post(server, {**LEAVING, "prompt": "Tim", "stream": True})
            await wait_until(lambda: server.llm.num_unfinished == 2, "both are there")
            for _ in range(5):
                gate.allow()
                await gate.entered()
            await leave_now(server, leaving)
            gate.allow()  # the step that was about to be taken when the client left
            await gate.entered()
            num_before = len(launches.all)
            assert server.num_free_slots == SLOTS - 1
            gate.open()
            await staying
            await until_idle(server)
        assert_nothing_more_was_computed(launches, num_before)


@pytest.mark.parametrize("kind", KINDS)
async def test_leaving_while_queued_is_never_computed(kind: str) -> None:
    async with serving(max_batch_size=1) as server:
        with recorded(server.llm) as launches, held(forward_of(server.llm), "hidden") as gate:
            staying = asyncio.create_task(text_of(server, STAYING))
            await gate.entered()
            leaving = await post(server, {**LEAVING, **KINDS[kind]})
            await wait_until(lambda: server.llm.num_unfinished > 1, "both are there")
            gate.allow(3)
            await wait_until(lambda: server.llm._core._scheduler.num_waiting > 0, "it is queued")
            await leave_now(server, leaving)
            gate.open()
            await staying
            await until_idle(server, num_slots=1)
        assert {request.max_tokens for launch in launches.all for request in launch.requests} == {STAYING_TOKENS}


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_mask_of_a_grammar_is_computed(stream: bool) -> None:
    async with serving(max_steps_per_launch=4) as server:
        alone = await text_of(server, STAYING)
        constrained = {**LEAVING, "prompt": "Tim", "guided_regex": "[a-z ]{100,200}"}
        await text_of(server, {**constrained, "max_tokens": 1})
        assert isinstance(server.llm.inputs.grammars, GrammarCompiler)
        (workers,) = server.llm.inputs.grammars._mask_threads
        with recorded(server.llm) as launches, held(workers, "_compute") as gate:
            leaving = await post(server, {**constrained, "stream": stream})
            await gate.entered()
            assert await text_of(server, STAYING) == alone  # who has no grammar does not wait
            await leave_now(server, leaving, num_staying=0)
            num_before = len(launches.all)
            gate.open()
            assert await text_of(server, STAYING) == alone
            await until_idle(server)
        assert_nothing_more_was_computed(launches, num_before)


async def test_leaving_while_the_prompt_is_tokenized_starts_nothing() -> None:
    async with serving() as server:
        with recorded(server.llm) as launches, held(server.llm.inputs, "prepare") as gate:
            leaving = await post(server, LEAVING)
            await gate.entered()
            leaving.close()
            await wait_until(lambda: server.api.num_active == 0, "it has left")
        assert (await text_of(server, {**STAYING, "max_tokens": 3})) != ""
        assert {request.max_tokens for launch in launches.all for request in launch.requests} <= {3}
        await until_idle(server)


async def test_leaving_politely_is_leaving_too() -> None:
    async with serving() as server:
        leaving = await post(server, {**LONG, "stream": True})
        assert (await leaving.head()).startswith("HTTP/1.1 200 OK\r\n")
        await leaving.chunk()
        leaving.close()
        await until_idle(server)


async def test_many_that_leave_at_any_time_leave_nothing_behind_and_one_that_stays_is_answered_as_if_alone(
    server: Server,
) -> None:
    alone = await text_of(server, STAYING)
    for _ in range(3):
        staying = asyncio.create_task(text_of(server, STAYING))
        await wait_until(lambda: server.llm.num_unfinished == 1, "it is there")
        leaving = [await post(server, {**LONG, "n": 1 + index % 2, "stream": index % 3 == 0}) for index in range(6)]
        for index, client in enumerate(leaving):
            if index % 2:
                await wait_until(
                    lambda: server.num_free_slots < SLOTS - 1 or server.llm.num_unfinished == 1, "some run"
                )
            client.reset()
        assert await staying == alone
        await until_idle(server)
