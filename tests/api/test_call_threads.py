"""Work off the event loop: clients take turns, nobody takes all, nothing waits without a bound, nothing is kept."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest

from chairlift.api.http import threads as module
from chairlift.api.http.threads import CallThreads
from chairlift.api.openai import routes
from chairlift.api.openai.chat import ChatCompletion
from chairlift.api.openai.replies import ChatReply
from chairlift.engine.async_llm import OffLoop
from chairlift.engine.text.deltas import RequestDelta
from chairlift.errors import ClientTooBusy, ServerTooBusy
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS
from tests.api.fault_support import held, post, until_idle
from tests.engine.async_support import DEADLINE_S, wait_until


class Calls:
    """Calls of some threads that end when they are told to, in the order in which they were begun."""

    def __init__(self, threads: CallThreads) -> None:
        self.threads = threads
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)

    def begin(self, client: str, name: str = "") -> asyncio.Task[str]:
        return asyncio.create_task(self.threads.for_client(client)(self._call, name or client))

    def _call(self, name: str) -> str:
        self.begun.append(name)
        assert self._may_end.acquire(timeout=DEADLINE_S)
        return name

    async def until_begun(self, *names: str) -> None:
        await wait_until(lambda: self.begun == [*names], f"these began: {names}")

    def end(self, num_calls: int = 1) -> None:
        self._may_end.release(num_calls)


@pytest.fixture
def make() -> Iterator[Callable[..., Calls]]:
    """Makes threads that are closed at the end."""
    with ExitStack() as stack:

        def make_calls(num_threads: int, **limits: int) -> Calls:
            return Calls(stack.enter_context(closing(CallThreads(num_threads, **limits))))

        yield make_calls


Make = Callable[..., Calls]


async def test_clients_take_turns_however_many_calls_one_of_them_has(make: Make) -> None:
    calls = make(1)
    tasks = [calls.begin(name[0], name) for name in ("a0", "a1", "a2", "a3", "b0", "b1")]
    await calls.until_begun("a0")
    calls.end(6)
    assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "b0", "b1"]
    assert calls.begun == ["a0", "a1", "b0", "a2", "b1", "a3"]


async def test_a_client_leaves_one_thread_to_the_others(make: Make) -> None:
    calls = make(2)
    tasks = [calls.begin("a", f"a{number}") for number in range(3)]
    await calls.until_begun("a0")
    tasks.append(calls.begin("b"))
    await calls.until_begun("a0", "b")
    calls.end(4)
    await asyncio.gather(*tasks)


async def test_the_call_of_a_client_that_left_before_its_turn_is_not_made(make: Make) -> None:
    calls = make(1, max_per_client=2)
    first, leaving = calls.begin("a", "first"), calls.begin("a", "leaving")
    await calls.until_begun("first")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    last = calls.begin("a", "last")  # takes the place of the one that left
    calls.end(2)
    assert (await first, await last) == ("first", "last")
    assert calls.begun == ["first", "last"]


async def test_turns_of_clients_that_leave_at_once_are_given_to_the_next(make: Make) -> None:
    calls = make(1)
    first, second, third = (calls.begin(name) for name in "abc")
    await calls.until_begun("a")
    calls.end(2)
    while "b" in calls.threads._waiting:
        await asyncio.sleep(0)
    second.cancel()  # its turn has come just now, and the third's comes when it gives it up
    third.cancel()
    endings = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [type(ending) for ending in endings] == [str, asyncio.CancelledError, asyncio.CancelledError]
    assert await asyncio.wait_for(calls.begin("d"), DEADLINE_S) == "d"
    assert calls.begun == ["a", "d"]


async def test_a_call_that_runs_counts_even_if_its_client_has_left(make: Make) -> None:
    calls = make(1, max_per_client=1)
    leaving = calls.begin("a")
    await calls.until_begun("a")
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    with pytest.raises(ClientTooBusy, match="1 of your requests are being checked; send fewer at once"):
        await calls.begin("a")
    calls.end(2)
    assert await calls.begin("b") == "b"
    assert await asyncio.wait_for(calls.threads.for_client("a")(str, 5), DEADLINE_S) == "5"


async def test_a_failure_after_its_client_left_is_no_complaint(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    calls = make(1)
    with held(calls, "_call") as gate:
        leaving = calls.begin("a")
        await gate.entered()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gate.fail(ValueError("nobody hears this"))
        assert await calls.threads.for_client("a")(str, 5) == "5"
    gc.collect()
    assert caplog.records == []


async def test_what_waits_is_bounded_for_each_client_and_for_all(make: Make) -> None:
    calls = make(1, max_per_client=2, max_waiting=2)
    tasks = [calls.begin(client) for client in ("a", "a", "b")]
    await calls.until_begun("a")
    with pytest.raises(ClientTooBusy):
        await calls.begin("a")
    with pytest.raises(ServerTooBusy, match="2 requests wait to be checked"):
        await calls.begin("c")
    calls.end(3)
    await asyncio.gather(*tasks)


class Heavy:
    """Stands for a body."""


def fail(heavy: Heavy) -> None:
    raise ValueError(repr(heavy))


@pytest.mark.parametrize("function", [fail, id])
async def test_nothing_of_a_call_is_kept_once_it_is_over(make: Make, function: Callable[[Heavy], object]) -> None:
    """Without the collector of garbage: it comes by too rarely for bodies of ten megabytes."""
    gc.disable()
    try:
        heavy = Heavy()
        is_there = weakref.ref(heavy)
        with suppress(ValueError):
            await make(1).threads.for_client("a")(function, heavy)
        del heavy
        await wait_until(lambda: is_there() is None, "it is gone")
    finally:
        gc.enable()


async def test_a_call_without_a_thread_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = make(2).threads
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(ServerTooBusy, match="no thread for this request"):
            await threads.for_client("a")(str, 5)
    assert await threads.for_client("a")(str, 5) == "5"


async def test_a_check_that_does_not_end_is_seen_in_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiohttp.ClientSession(server.url) as http:
        with held(server.llm.inputs, "prepare") as gate:
            async with await post(server, {"prompt": "Once", "max_tokens": 1}):
                await gate.entered()
                assert (await http.get("/health")).status == 200
                monkeypatch.setattr(module, "_STUCK_AFTER_S", 0.0)
                async with http.get("/health") as response:
                    message = (await response.json())["error"]["message"]
                    assert response.status == 503
        assert message == "checking a request takes too long; restart the server if this lasts"
        await until_idle(server)
        while (await http.get("/health")).status != 200:  # until the call has left its thread
            await asyncio.sleep(0.001)


async def test_small_requests_do_not_wait_behind_large_ones(server: Server) -> None:
    """Nor does another client's large one behind all of this one's."""
    with held(server.llm.inputs, "decode") as gate:
        large = {"tokens": [5] * 40_000}
        async with await post(server, large, "/detokenize"), await post(server, large, "/detokenize"):
            await gate.entered()
            async with await post(server, {"prompt": "Once", "max_tokens": 1}) as small:
                assert "200 OK" in await small.head()
        gate.open()
    await until_idle(server)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_of_many_scored_tokens_is_made_elsewhere(server: Server, stream: bool) -> None:
    """And is the same as that of a few."""
    threads = set()

    class Watched(ChatReply):
        def closing(self) -> list[str]:
            threads.add(threading.current_thread().name)
            return super().closing()

        def whole(self, outputs: list[RequestDelta]) -> ChatCompletion:
            threads.add(threading.current_thread().name)
            return super().whole(outputs)

    body = {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 30, "ignore_eos": True, "stream": stream}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "ChatReply", Watched)
        for num_top in (0, 20):
            async with await post(server, {**body, "logprobs": True, "top_logprobs": num_top}, CHAT) as client:
                assert "200 OK" in await client.head()
                if stream:
                    assert (await client.read_all())[-1].endswith("data: [DONE]\n\n")
            await until_idle(server)
    assert {name.partition("_")[0] for name in threads} == {"MainThread", "chairlift-worker"}


@pytest.mark.parametrize(
    ("path", "fields", "num_turns"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hi!"}]}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "Hi!"}], "response_format": {"type": "json_object"}}, 2),
        (COMPLETIONS, {"prompt": ["a", "b", "c"]}, 3),
    ],
)
async def test_a_request_takes_one_turn_and_one_more_per_further_prompt_or_grammar(
    server: Server, path: str, fields: dict[str, Any], num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, for_client = list[object](), CallThreads.for_client

    def counted(threads: CallThreads, client: str) -> OffLoop:
        off_loop = for_client(threads, client)

        async def run(function: Callable[..., Any], /, *args: Any) -> Any:
            turns.append(function)
            return await off_loop(function, *args)

        return run

    monkeypatch.setattr(CallThreads, "for_client", counted)
    async with await post(server, {**fields, "max_tokens": 1}, path) as client:
        assert "200 OK" in await client.head()
    assert len(turns) == num_turns
    await until_idle(server)
