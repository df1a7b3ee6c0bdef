"""What two threads may share, which is nothing that changes, and what crosses from one process to another."""

import gc
import pickle
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import pytest
import torch
from pydantic import BaseModel

from chairlift import errors
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.core import EngineCore
from chairlift.engine.process import PackedUpdate
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar
from chairlift.engine.sampling.masks import MaskThreads
from chairlift.engine.sampling.token_rules import TokenRules
from chairlift.engine.thread import Update
from chairlift.params import FinishReason, Logprob, RequestTimes, StructuredOutputs
from chairlift.scheduler import Request, RequestState, TokenEvent
from tests.engine.async_support import make_async_llm
from tests.engine.test_poison import greedy

CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, torch.dtype, torch.device)
IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), range, Enum, *CODE)
# Made once for many requests: their texts and tables stay as they are, and what they remember the loop never reads.
COMPILED = (CompiledGrammar, MaskThreads, TokenRules)


def reachable(roots: Iterable[object], walls: set[int]) -> dict[int, object]:
    """By id, all that can be reached from some objects without going through code, or one of the `walls`."""
    seen: dict[int, object] = {}
    to_do = list(roots)
    while to_do:
        each: Any = to_do.pop()
        if id(each) in seen or id(each) in walls or isinstance(each, (*IMMUTABLE, *COMPILED)):
            continue
        if isinstance(each, BaseModel) and each.model_config.get("frozen"):
            continue
        seen[id(each)] = each
        if is_frozen(each):  # what holds its fields is not to be found among them
            to_do += [getattr(each, field.name, None) for field in fields(each)]
        else:
            to_do += gc.get_referents(each)
            to_do += [closure.cell_contents for closure in getattr(each, "__closure__", None) or ()]
    return seen


def is_frozen(each: object) -> bool:
    parameters = getattr(type(each), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


async def test_nothing_that_changes_is_reached_from_both_threads(tiny: str) -> None:
    cases: list[dict[str, Any]] = [
        *({}, {"n": 2, "logprobs": 2}, {"bad_words": ["ab"], "min_tokens": 3}),
        {"structured_outputs": StructuredOutputs(regex="[a-z]{30}")},
    ]
    async with make_async_llm(tiny, max_batch_size=5) as engine:
        outputs = [engine.generate("hello", greedy(max_tokens=150, **each)) for each in cases]
        for each in outputs:
            await anext(each)
        shared = await engine._call(lambda core: shared_by(engine, core))
        for each in outputs:
            await each.aclose()
    assert [repr(each)[:200] for each in shared] == []


def shared_by(engine: AsyncLLM, core: EngineCore) -> list[object]:
    """What can change and is reached from the loop's side as well as from the engine's, between two steps."""
    thread = engine._engine
    ours = reachable([engine._outputs, engine._mailboxes], {id(core), id(thread)})
    theirs = reachable([core._scheduler, core._journal, core._launches, core._runner], {id(core), id(thread)})
    assert any(isinstance(each, Request) for each in ours.values())
    assert any(isinstance(each, RequestState) for each in theirs.values())
    shared = [each for name, each in theirs.items() if name in ours and not is_frozen(each)]
    return [each for each in shared if not isinstance(each, (tuple, frozenset))]


# --- between processes

BEGIN = TokenEvent("a", [5], None, times=RequestTimes(1.0, 2.0, 3.0), num_prompt_tokens=7)
PLAIN = TokenEvent("a", [6], None, token_seconds=0.25)
LAUNCH = TokenEvent("b", [200_000, 1, 2, 3], None, token_seconds=0.125)
SCORED = TokenEvent("b", [4], None, logprobs=[{4: Logprob(-0.5, 1)}], token_seconds=0.5)
REFUSED = TokenEvent("c", [], FinishReason.ABORT, error="full", rejection=errors.QueueFull("full", 2.5))
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
    assert isinstance(refused.rejection, errors.QueueFull)
    assert (refused.request_id, str(refused.rejection), refused.rejection.retry_after) == ("c", "full", 2.5)
    assert arrived.death is None


def test_an_engines_death_arrives_in_words() -> None:
    packed = PackedUpdate.of(Update(death=RuntimeError("no luck")), {})
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
