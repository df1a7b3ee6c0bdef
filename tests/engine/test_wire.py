"""What crosses the socket between an engine's process and a worker."""

import pickle

import pytest

from chairlift.engine.process import PackedUpdate
from chairlift.engine.thread import Update
from chairlift.errors import (
    CacheFull,
    ChairliftError,
    ContextLengthExceeded,
    EngineDead,
    GrammarsBusy,
    InvalidApiKey,
    InvalidGrammar,
    QueueFull,
)
from chairlift.params import FinishReason, Logprob, RequestTimes
from chairlift.scheduler import TokenEvent

BEGIN = TokenEvent("a", [5], None, times=RequestTimes(1.0, 2.0, 3.0), num_prompt_tokens=7)
PLAIN = TokenEvent("a", [6], None, token_seconds=0.25)
LAUNCH = TokenEvent("b", [200_000, 1, 2, 3], None, token_seconds=0.125)
SCORED = TokenEvent("b", [4], None, logprobs=[{4: Logprob(-0.5, 1)}], token_seconds=0.5)
REFUSED = TokenEvent("c", [], FinishReason.ABORT, error="full", rejection=QueueFull("full", 2.5))
END = TokenEvent("a", [2], FinishReason.STOP, has_end_token=True, times=RequestTimes(1.0, 2.0, 3.0), token_seconds=0.5)


def test_news_arrive_in_their_order_and_those_that_say_no_more_than_tokens_travel_in_columns() -> None:
    events = [BEGIN, PLAIN, LAUNCH, SCORED, PLAIN, END, REFUSED]
    numbers = {"a": 1, "b": 2, "c": 3}
    packed: PackedUpdate = pickle.loads(pickle.dumps(PackedUpdate.of(Update(events), numbers)))
    assert packed.others[:-1] == [BEGIN, SCORED, END]
    assert (list(packed.numbers), list(packed.counts)) == ([1, 1, 2, 2, 1, 1, 3], [0, 1, 4, 0, 1, 0, 0])
    assert (list(packed.tokens), list(packed.seconds)) == ([6, 200_000, 1, 2, 3, 6], [0.25, 0.125, 0.25])
    names = {1: "a", 2: "b", 3: "c"}
    arrived = packed.unpack(names)
    *others, refused = arrived.events
    assert others == events[:-1]
    assert [event.token_seconds for event in others] == [None, 0.25, 0.125, 0.5, 0.25, 0.5]
    assert (numbers, names) == ({"b": 2}, {2: "b"})
    assert isinstance(refused.rejection, QueueFull)
    assert (refused.request_id, str(refused.rejection), refused.rejection.retry_after) == ("c", "full", 2.5)
    assert arrived.death is None


def test_an_engines_death_arrives_in_words() -> None:
    packed = PackedUpdate.of(Update(death=RuntimeError("no luck")), {})
    assert isinstance(packed.death, EngineDead)
    assert str(packed.death) == "a step failed: RuntimeError: no luck"


@pytest.mark.parametrize(
    "error",
    [
        InvalidGrammar("it is wrong", 3),
        ContextLengthExceeded("too long", "prompt"),
        GrammarsBusy("64 others"),
        QueueFull("full", 3.0),
        CacheFull(3, 1),
        InvalidApiKey(),
    ],
)
def test_an_error_arrives_as_it_is(error: ChairliftError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))
