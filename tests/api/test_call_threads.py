"""Work off the event loop: clients take turns, nobody takes all, nothing waits without a bound, nothing is kept."""

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from pydantic import BaseModel

from chairlift.api import jobs
from chairlift.api.http import bodies as module
from chairlift.api.http.bodies import CallThreads
from chairlift.api.replies.choices import ChatReply
from chairlift.errors import ClientTooBusy, ServerTooBusy
from chairlift.params import RequestOutput
from tests.api.conftest import Server
from tests.api.contract import CHAT
from tests.api.fault_support import held, post, until_idle
from tests.engine.async_support import DEADLINE_S, wait_until


class Calls:
    """Calls that end when they are told to, in the order in which they were begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)

    def call(self, name: str) -> str:
        self.begun.append(name)
        assert self._may_end.acquire(timeout=DEADLINE_S)
        return name

    def end(self, num_calls: int = 1) -> None:
        self._may_end.release(num_calls)


@asynccontextmanager
async def closing(workers: CallThreads) -> AsyncIterator[CallThreads]:
    try:
        yield workers
    finally:
        workers.close()


def begin(workers: CallThreads, client: str, calls: Calls, name: str) -> asyncio.Task[str]:
    return asyncio.create_task(workers.for_client(client)(calls.call, name))


async def test_clients_take_turns_however_many_calls_one_of_them_has() -> None:
    calls = Calls()
    async with closing(CallThreads(1)) as workers:
        tasks = [begin(workers, "a", calls, f"a{number}") for number in range(4)]
        tasks += [begin(workers, "b", calls, f"b{number}") for number in range(2)]
        await wait_until(lambda: calls.begun == ["a0"], "the first began")
        calls.end(6)
        assert await asyncio.gather(*tasks) == ["a0", "a1", "a2", "a3", "b0", "b1"]
        assert calls.begun == ["a0", "a1", "b0", "a2", "b1", "a3"]


async def test_a_client_leaves_one_thread_to_the_others() -> None:
    calls = Calls()
    async with closing(CallThreads(2)) as workers:
        tasks = [begin(workers, "a", calls, f"a{number}") for number in range(3)]
        await wait_until(lambda: calls.begun == ["a0"], "the first began")
        tasks.append(begin(workers, "b", calls, "b"))
        await wait_until(lambda: calls.begun == ["a0", "b"], "another client's call runs beside it")
        calls.end(4)
        await asyncio.gather(*tasks)


async def test_the_call_of_a_client_that_left_before_its_turn_is_not_made() -> None:
    calls = Calls()
    async with closing(CallThreads(1, max_per_client=2)) as workers:
        first, leaving = begin(workers, "a", calls, "first"), begin(workers, "a", calls, "leaving")
        await wait_until(lambda: calls.begun == ["first"], "the first began")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        last = begin(workers, "a", calls, "last")  # takes the place of the one that left
        calls.end(2)
        assert (await first, await last) == ("first", "last")
        assert calls.begun == ["first", "last"]


async def test_turns_of_clients_that_leave_at_once_are_given_to_the_next() -> None:
    calls = Calls()
    async with closing(CallThreads(1)) as workers:
        first, second, third = (begin(workers, name, calls, name) for name in "abc")
        await wait_until(lambda: calls.begun == ["a"], "the first began")
        calls.end(2)
        while "b" in workers._waiting:
            await asyncio.sleep(0)
        second.cancel()  # its turn has come just now, and the third's comes when it gives it up
        third.cancel()
        endings = await asyncio.gather(first, second, third, return_exceptions=True)
        assert [type(ending) for ending in endings] == [str, asyncio.CancelledError, asyncio.CancelledError]
        assert await asyncio.wait_for(begin(workers, "d", calls, "d"), DEADLINE_S) == "d"
        assert calls.begun == ["a", "d"]


async def test_a_call_that_runs_counts_even_if_its_client_has_left() -> None:
    calls = Calls()
    async with closing(CallThreads(1, max_per_client=1)) as workers:
        leaving = begin(workers, "a", calls, "leaving")
        await wait_until(lambda: calls.begun == ["leaving"], "it began")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        with pytest.raises(ClientTooBusy, match="1 of your requests are being checked; send fewer at once"):
            await begin(workers, "a", calls, "next")
        calls.end(2)
        assert await begin(workers, "b", calls, "other") == "other"
        assert await asyncio.wait_for(workers.for_client("a")(str, 5), DEADLINE_S) == "5"


async def test_a_call_that_fails_after_its_client_has_left_is_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    has_begun, may_fail = threading.Event(), threading.Event()

    def fail() -> None:
        has_begun.set()
        assert may_fail.wait(DEADLINE_S)
        raise ValueError("nobody hears this")

    async with closing(CallThreads(1)) as workers:
        leaving = asyncio.create_task(workers.for_client("a")(fail))
        await wait_until(has_begun.is_set, "it began")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        may_fail.set()
        assert await workers.for_client("a")(str, 5) == "5"
    gc.collect()
    assert caplog.records == []


async def test_what_waits_is_bounded_for_each_client_and_for_all() -> None:
    calls = Calls()
    async with closing(CallThreads(1, max_per_client=2, max_waiting=2)) as workers:
        tasks = [begin(workers, client, calls, client) for client in ("a", "a", "b")]
        await wait_until(lambda: calls.begun == ["a"], "the first began")
        with pytest.raises(ClientTooBusy):
            await begin(workers, "a", calls, "a")
        with pytest.raises(ServerTooBusy, match="2 requests wait to be checked"):
            await begin(workers, "c", calls, "c")
        calls.end(3)
        await asyncio.gather(*tasks)


async def test_a_call_that_does_not_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    async with closing(CallThreads(1)) as workers:
        task = begin(workers, "a", calls, "a")
        await wait_until(lambda: calls.begun == ["a"], "it began")
        states = [workers.is_stuck]
        monkeypatch.setattr(module, "_STUCK_AFTER_S", 0.0)
        states.append(workers.is_stuck)
        calls.end()
        await task
        assert [*states, workers.is_stuck] == [False, True, False]


class Heavy:
    """Stands for a body."""


def fail(heavy: Heavy) -> None:
    raise ValueError(repr(heavy))


@pytest.mark.parametrize("function", [fail, id])
async def test_nothing_of_a_call_is_kept_once_it_is_over(function: Callable[[Heavy], object]) -> None:
    """Without the collector of garbage: it comes by too rarely for bodies of ten megabytes."""
    gc.disable()
    try:
        async with closing(CallThreads(1)) as workers:
            heavy = Heavy()
            is_there = weakref.ref(heavy)
            with contextlib.suppress(ValueError):
                await workers.for_client("a")(function, heavy)
            del heavy
            await wait_until(lambda: is_there() is None, "it is gone")
    finally:
        gc.enable()


async def test_where_the_system_has_no_thread_left_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with closing(CallThreads(2)) as workers:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ServerTooBusy, match="no thread for this request"):
            await workers.for_client("a")(str, 5)
        monkeypatch.undo()
        assert await workers.for_client("a")(str, 5) == "5"


async def test_a_check_that_does_not_end_is_seen_in_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(server.llm.inputs, "prepare") as gate:
        async with await post(server, {"prompt": "Once", "max_tokens": 1}):
            await gate.entered()
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{server.url}/health") as response:
                    assert response.status == 200
                monkeypatch.setattr(module, "_STUCK_AFTER_S", 0.0)
                async with http.get(f"{server.url}/health") as response:
                    assert response.status == 503
                    message = (await response.json())["error"]["message"]
        assert message == "a request has been in checks for too long; restart the server if this lasts"


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

        def whole(self, outputs: list[RequestOutput]) -> BaseModel:
            threads.add(threading.current_thread().name)
            return super().whole(outputs)

    body = {"messages": [{"role": "user", "content": "Hi!"}], "max_tokens": 30, "ignore_eos": True, "stream": stream}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jobs, "ChatReply", Watched)
        for num_top in (0, 20):
            async with await post(server, {**body, "logprobs": True, "top_logprobs": num_top}, CHAT) as client:
                assert "200 OK" in await client.head()
                if stream:
                    assert (await client.rest())[-1].endswith("data: [DONE]\n\n")
            await until_idle(server)
    assert {name.partition("_")[0] for name in threads} == {"MainThread", "chairlift-worker"}
