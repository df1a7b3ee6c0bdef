"""A client that reads slowly or no more, or leaves: it costs bounded memory and holds nobody up."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from chairlift.api import ServerConfig
from chairlift.api.http.connections import Connection
from chairlift.engine.text.grammar import GrammarCompiler
from tests.api.conftest import SLOTS, SOCKET_BYTES, Server, SharedServer, in_loop, shared
from tests.api.contract import text_of
from tests.api.fault_support import Gate, Launches, RawClient, forward_of, held, post, recorded, serving, until_idle
from tests.engine.async_support import wait_until
from tests.support.engines import core_of

SHORT_S, LONG_S = 0.4, 30.0  # a test that had to wait for the longer one would fail
MOST_BUFFERED = 256 * 2**10  # a stream's own and the transport's buffer, and one event over
TOKENS = 150
GREEDY: dict[str, Any] = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 0}
VERBOSE = {
    **GREEDY,
    "max_tokens": TOKENS,
    "n": SLOTS,
    "logprobs": 5,
    "stream": True,
}  # half a megabyte of events


@asynccontextmanager
async def unread(
    body: dict[str, Any], engine: Any = None, **timeouts: float
) -> AsyncIterator[tuple[Server, RawClient]]:
    """A server, and a client that has asked it and reads nothing yet."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    config = ServerConfig(port=0, **{"client_timeout": LONG_S, **timeouts})
    async with (
        serving(config=config, **engine or {}) as server,
        await post(server, body, sock=sock, limit=SOCKET_BYTES) as client,
    ):
        yield server, client


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
    async with unread({**VERBOSE, "stream": stream}, client_timeout=SHORT_S) as (server, _):
        await ended(server)
        start = time.monotonic()
        await wait_until(lambda: server.api.num_active == 0 and transports[0].is_closing(), "it is cut off")
        assert time.monotonic() - start < LONG_S / 2
        await until_idle(server)


async def test_what_a_silent_reader_costs_is_bounded_and_others_are_served(transports: list[asyncio.Transport]) -> None:
    async with unread(VERBOSE) as (server, silent):
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
            assert set(choices_of(await other.read_all())) == {0}
        assert server.api.num_active == 1
        silent.reset()
        await until_idle(server)


@pytest.mark.usefixtures("transports")
async def test_a_slow_reader_gets_all_of_it_in_the_end() -> None:
    async with unread(VERBOSE) as (server, slow):
        await ended(server)
        async with await post(server, VERBOSE) as quick:
            await quick.head()
            expected = choices_of(await quick.read_all())
        await slow.head()
        assert choices_of(await slow.read_all()) == expected
        assert len(expected) == SLOTS
        assert all(len(text) > TOKENS / 2 for text in expected.values())
        await until_idle(server)


@pytest.mark.usefixtures("transports")
async def test_a_reader_that_pauses_for_less_than_the_timeout_again_and_again_is_not_cut_off() -> None:
    async with unread(VERBOSE, client_timeout=1.0) as (_, slow):
        await slow.head()
        pieces: list[str] = []
        while piece := await slow.chunk():
            pieces.append(piece)
            if len(pieces) in (20, 40, 60, 80, 100):
                await asyncio.sleep(0.25)  # together longer than the timeout
        assert set(choices_of(pieces)) == set(range(SLOTS))


async def test_a_hung_engine_leaves_no_silent_reader_behind(transports: list[asyncio.Transport]) -> None:
    async with unread(VERBOSE, {"step_timeout": 0.5}, client_timeout=SHORT_S) as (server, _):
        await wait_until(lambda: bool(transports) and transports[0].get_write_buffer_size() > 2**14, "it is full")
        with held(forward_of(server.llm), "hidden"):
            await asyncio.wait_for(server.llm.died.wait(), 10.0)
            await wait_until(lambda: server.api.num_active == 0 and transports[0].is_closing(), "it is cut off")


async def test_a_reply_that_fits_into_the_buffer_and_is_never_read_does_not_keep_its_connection_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[Connection] = []
    connection_lost = Connection.connection_lost

    def note(self: Connection, error: BaseException | None) -> None:
        lost.append(self)
        connection_lost(self, error)

    monkeypatch.setattr(Connection, "connection_lost", note)
    short = {**VERBOSE, "n": 1, "max_tokens": 20}
    async with unread(short, idle_timeout=SHORT_S, client_timeout=SHORT_S) as (server, _):
        await wait_until(lambda: server.llm.num_unfinished > 0, "it has come in")
        await wait_until(lambda: len(lost) == 1, "the connection is over")


STAYING_TOKENS, LEAVING_TOKENS = 90, 150
STAYING = {**GREEDY, "max_tokens": STAYING_TOKENS}
LEAVING = {**GREEDY, "prompt": "Tim went to the park. " * 8, "max_tokens": LEAVING_TOKENS}
KINDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "streaming": {"stream": True},
    "choices": {"stream": True, "n": 3},
    "prompts": {"prompt": [LEAVING["prompt"], "Tim. " * 20, "Tim"]},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def alone(shared_server: SharedServer) -> str:
    """Returns what the staying one is told if nobody else is there."""
    async with shared_server.lent() as server:
        return await text_of(server, STAYING)


# A prompt of one that leaves takes several steps.
shared_small_steps = shared(ServerConfig(), max_num_batched_tokens=32, max_steps_per_launch=4)
shared_single_slot = shared(ServerConfig(), max_batch_size=1)


@in_loop
async def small_steps(shared_small_steps: SharedServer) -> AsyncIterator[Server]:
    async with shared_small_steps.lent() as server:
        yield server


@in_loop
async def single_slot(shared_single_slot: SharedServer) -> AsyncIterator[Server]:
    async with shared_single_slot.lent() as server:
        yield server


@asynccontextmanager
async def beside_one_that_stays(
    server: Server, alone: str, body: dict[str, Any], held_call: str = "hidden"
) -> AsyncIterator[tuple[Launches, Gate, RawClient]]:
    """A client that is going to leave, beside one that stays and is answered as if alone. Steps wait at the gate."""
    owner = forward_of(server.llm) if held_call == "hidden" else core_of(server.llm)
    with recorded(server.llm) as launches, held(owner, held_call) as gate:
        staying = asyncio.create_task(text_of(server, STAYING))
        await gate.entered()
        leaving = await post(server, {**LEAVING, **body})
        await wait_until(lambda: server.api.num_active == 2 and server.llm.num_unfinished > 1, "both are there")
        yield launches, gate, leaving
        gate.open()
        assert await staying == alone
        await until_idle(server, server.llm.config.num_slots)


async def leave_now(server: Server, leaving: RawClient, num_staying: int = 1) -> None:
    """Returns once the server has let go of that request: before the step that is held back comes to its end."""
    leaving.reset()
    await wait_until(lambda: server.api.num_active == server.llm.num_unfinished == num_staying, "one has left")


def tokens_of(launches: Launches, first: int = 0) -> set[int | None]:
    """By which the requests are known of which something was computed, from that launch on."""
    return {request.max_tokens for launch in launches.all[first:] for request in launch.requests}


def assert_nothing_more_was_computed(launches: Launches, num_before: int) -> None:
    """After the launch that was running when the client left, only the staying one's rows are computed."""
    assert tokens_of(launches, num_before) == {STAYING_TOKENS}
    assert {(each.num_free_slots, len(each.rows)) for each in launches.all[num_before:]} == {(SLOTS - 1, 1)}


def phases_of(launches: Launches) -> set[str]:
    """Returns where the leaving request is in the newest launch."""
    found = set()
    for request in launches.latest.requests:
        if request.max_tokens == LEAVING_TOKENS:
            is_chunk = launches.latest.rows[request.request_id] > 1
            is_first = launches.latest.starts[request.request_id] == 0
            found.add("first chunk" if is_first else "later chunk" if is_chunk else "decoding")
            found.add(f"a launch of {launches.latest.num_steps} steps")
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", ["first chunk", "later chunk", "decoding", "a launch of 4 steps"])
async def test_leaving_frees_every_slot_within_the_launch_and_nothing_more_is_computed(
    small_steps: Server, alone: str, phase: str, kind: str
) -> None:
    async with beside_one_that_stays(small_steps, alone, KINDS[kind]) as (launches, gate, leaving):
        while phase not in phases_of(launches):
            gate.allow()
            await gate.entered()
        for _ in range(2 if phase == "a launch of 4 steps" else 0):  # the third of the four is held now
            gate.allow()
            await gate.entered()
        await leave_now(small_steps, leaving)
        num_before = len(launches.all)
    assert_nothing_more_was_computed(launches, num_before)


async def test_leaving_between_two_steps_frees_the_slot_before_the_next(server: Server, alone: str) -> None:
    leaver = {"prompt": "Tim", "stream": True}
    async with beside_one_that_stays(server, alone, leaver, held_call="step") as (launches, gate, leaving):
        for _ in range(5):
            gate.allow()
            await gate.entered()
        await leave_now(server, leaving)
        gate.allow()  # the step that was about to be taken when the client left
        await gate.entered()
        num_before = len(launches.all)
        assert server.num_free_slots == SLOTS - 1
    assert_nothing_more_was_computed(launches, num_before)


@pytest.mark.parametrize("kind", KINDS)
async def test_leaving_while_queued_is_never_computed(single_slot: Server, alone: str, kind: str) -> None:
    async with beside_one_that_stays(single_slot, alone, KINDS[kind]) as (launches, gate, leaving):
        gate.allow(3)
        await wait_until(lambda: core_of(single_slot.llm).scheduler.num_waiting > 0, "it is queued")
        await leave_now(single_slot, leaving)
    assert tokens_of(launches) == {STAYING_TOKENS}


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_while_the_mask_of_a_grammar_is_computed(small_steps: Server, alone: str, stream: bool) -> None:
    server = small_steps
    constrained = {**LEAVING, "prompt": "Tim", "guided_regex": f"[a-z ]{{{100 + stream},200}}"}
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


async def test_leaving_while_the_prompt_is_tokenized_starts_nothing(server: Server) -> None:
    with recorded(server.llm) as launches:
        with held(server.llm.inputs, "prepare") as gate:
            leaving = await post(server, LEAVING)
            await gate.entered()
            leaving.close()
            await wait_until(lambda: server.api.num_active == 0, "it has left")
        assert (await text_of(server, {**STAYING, "max_tokens": 3})) != ""
    assert tokens_of(launches) == {3}


async def test_many_that_leave_at_any_time_leave_nothing_behind_and_one_that_stays_is_answered_as_if_alone(
    server: Server, alone: str
) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 450, "ignore_eos": True}
    for _ in range(3):
        staying = asyncio.create_task(text_of(server, STAYING))
        await wait_until(lambda: server.llm.num_unfinished == 1, "it is there")
        leaving = [await post(server, {**body, "n": 1 + index % 2, "stream": index % 3 == 0}) for index in range(6)]
        (await leaving[0].head(), await leaving[0].chunk())
        leaving[0].close()  # politely, which is leaving, too
        for index, client in enumerate(leaving[1:]):
            if index % 2 == 0:
                await wait_until(
                    lambda: server.num_free_slots < SLOTS - 1 or server.llm.num_unfinished == 1, "some run"
                )
            client.reset()
        assert await staying == alone
        await until_idle(server)
