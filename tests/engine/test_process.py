"""The connection between the engine's process and a worker: what arrives, and what ends it."""

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from chairlift import AsyncLLM, errors
from chairlift.engine.process import PackedUpdate, RemoteReader
from chairlift.engine.process.connection import ProcessConnection
from chairlift.engine.process.messages import EnginesGrammar, NumberedAdd
from chairlift.engine.thread import Update
from chairlift.params import FinishReason, Logprob, RequestTimes, TokenLogprobs
from chairlift.prompt_work import PromptScores, scores_in
from chairlift.scheduler import Request, TokenEvent
from tests.engine.async_support import DEADLINE_S, last, make_async_llm, wait_until, wait_until_idle
from tests.engine.support import GREEDY

BEGIN = TokenEvent("a", [5], None, times=RequestTimes(1.0, 2.0, 3.0), num_prompt_tokens=7)
PLAIN = TokenEvent("a", [6], None, token_seconds=0.25)
LAUNCH = TokenEvent("b", [200_000, 1, 2, 3], None, token_seconds=0.125)
SCORED = TokenEvent("b", [4], None, logprobs=[{4: Logprob(-0.5, 1)}], token_seconds=0.5)
REFUSED = TokenEvent("c", [], FinishReason.ABORT, error="full", rejection=errors.QueueFull("full", 2.5))
END = TokenEvent("a", [2], FinishReason.STOP, has_end_token=True, times=RequestTimes(1.0, 2.0, 3.0), token_seconds=0.5)


def packed_at_once(update: Update, numbers: dict[str, int]) -> PackedUpdate:
    (packed,) = PackedUpdate.in_parts(update, numbers)
    return packed


def test_sequences_beyond_the_first_four_billion_are_told_apart() -> None:
    packed = packed_at_once(Update([replace(PLAIN, request_id="a"), LAUNCH]), {"a": 1, "b": 2**32 + 1})
    arrived = packed.unpack({1: "a", 2**32 + 1: "b"})
    assert [event.request_id for event in arrived.events] == ["a", "b"]


def test_the_scores_of_a_long_prompt_travel_in_parts_of_limited_size() -> None:
    scores: list[TokenLogprobs | None] = [{token: Logprob(-1.0, 1) for token in range(21)} for _ in range(500)]
    begin = replace(BEGIN, prompt_result=PromptScores(scores))
    parts = PackedUpdate.in_parts(Update([PLAIN, begin, SCORED, END]), {"a": 1, "b": 2})
    assert [part.num_scores for part in parts] == [2037, 2037, 2037, 2037, 2037, 316]
    events = [event for part in parts for event in part.unpack({1: "a", 2: "b"}).events]
    assert [position for event in events for position in scores_in(event.prompt_result)] == scores
    assert (events[0], events[-2:]) == (PLAIN, [SCORED, END])
    assert [event.new_token_ids for event in events] == [[6], [], [], [], [], [], [5], [4], [2]]


@asynccontextmanager
async def connected(end: ProcessConnection) -> AsyncIterator[ProcessConnection]:
    """The other end of a connection, which knows no services."""
    loop, other = asyncio.get_running_loop(), ProcessConnection({})
    ours, theirs = socket.socketpair()
    await loop.create_unix_connection(lambda: end, sock=ours)
    transport, _ = await loop.create_unix_connection(lambda: other, sock=theirs)
    yield other
    transport.abort()
    await wait_until(end.lost.is_set, "the connection has ended")


async def request_of(engine: AsyncLLM) -> Request:
    (request,) = (await engine.prepare("hi", GREEDY)).requests
    return request


async def test_news_that_cannot_be_sent_end_the_connection_and_its_requests(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_async_llm(tiny) as engine:
        end = RemoteReader(engine, {})
        async with connected(end) as worker:
            worker.post(NumberedAdd([await request_of(engine)], {}))  # no number stands for its sequence
            await asyncio.wait_for(worker.lost.wait(), DEADLINE_S)
        assert (await last(engine.generate("hi", GREEDY))).finished
        await wait_until_idle(engine)
    assert caplog.records[-1].getMessage() == "a connection between the server's processes failed"


async def test_a_message_that_cannot_be_executed_ends_the_connection(
    tiny: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_async_llm(tiny) as engine:
        end = RemoteReader(engine, {})
        async with connected(end) as worker:
            request = replace(await request_of(engine), new_grammar=EnginesGrammar(7))
            worker.post(NumberedAdd([request], {request.request_id: 1}))
            await asyncio.wait_for(worker.lost.wait(), DEADLINE_S)
    assert caplog.records[-1].getMessage() == "a connection between the server's processes failed"


async def test_an_end_that_answers_no_ping_is_silent_until_it_does() -> None:
    answers = asyncio.Event()
    end = ProcessConnection({"ping": answers.wait})
    async with connected(end) as other:
        watching = asyncio.create_task(other.watch(0.2))
        await asyncio.wait_for(other.silent.wait(), DEADLINE_S)
        answers.set()
        await wait_until(lambda: not other.silent.is_set(), "it answers")
        assert not watching.done()
    await asyncio.wait_for(watching, DEADLINE_S)


def test_news_arrive_in_their_order_and_those_that_say_no_more_than_tokens_travel_in_columns() -> None:
    events = [BEGIN, PLAIN, LAUNCH, SCORED, PLAIN, END, REFUSED]
    numbers = {"a": 1, "b": 2, "c": 3}
    packed: PackedUpdate = pickle.loads(pickle.dumps(packed_at_once(Update(events), numbers)))
    assert packed.others[:-1] == [BEGIN, SCORED, END]
    assert (list(packed.numbers), list(packed.counts)) == ([1, 1, 2, 2, 1, 1, 3], [0, 1, 4, 0, 1, 0, 0])
    assert (list(packed.tokens), list(packed.seconds)) == ([6, 200_000, 1, 2, 3, 6], [0.25, 0.125, 0.25])
    names = {1: "a", 2: "b", 3: "c"}
    arrived = packed.unpack(names)
    *others, refused = arrived.events
    assert others == events[:-1]
    assert [event.token_seconds for event in others] == [None, 0.25, 0.125, 0.5, 0.25, 0.5]
    assert (numbers, names) == ({"b": 2}, {2: "b"})
    assert isinstance(refused.rejection, errors.QueueFull)
    assert (refused.request_id, str(refused.rejection), refused.rejection.retry_after) == ("c", "full", 2.5)
    assert arrived.death is None


def test_an_engines_death_arrives_in_words() -> None:
    packed = packed_at_once(Update(death=RuntimeError("no luck")), {})
    assert isinstance(packed.death, errors.EngineDead)
    assert str(packed.death) == "a step failed: RuntimeError: no luck"


ERRORS = [
    *(errors.InvalidGrammar("it is wrong", 3), errors.ContextLengthExceeded("too long", "prompt")),
    *(errors.GrammarsBusy("64 others"), errors.QueueFull("full", 3.0), errors.CacheFull(3, 1), errors.InvalidApiKey()),
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_arrives_as_it_is(error: errors.ChairliftError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
