"""The wall between the two threads: neither reaches what the other writes, but through the two seams."""

import gc
from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from pydantic import BaseModel

from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.core import EngineCore
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar
from chairlift.engine.sampling.masks import MaskThreads
from chairlift.engine.sampling.token_rules import TokenRules
from chairlift.params import StructuredOutputs
from chairlift.scheduler import Request, RequestState
from tests.engine.async_support import make_async_llm
from tests.engine.support import GREEDY

CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, torch.dtype, torch.device)
IMMUTABLE = (str, bytes, int, float, complex, bool, type(None), range, Enum, *CODE)
# Made once for many requests: their texts and tables stay as they are, and what they remember the loop never reads.
COMPILED = (CompiledGrammar, MaskThreads, TokenRules)


def reachable(roots: Iterable[object], walls: set[int]) -> dict[int, object]:
    """By id, all that can be reached from some objects without going through code, or one of the `walls`."""
    seen: dict[int, object] = {}
    to_do = list(roots)
    while to_do:
        each = to_do.pop()
        if id(each) in seen or id(each) in walls or isinstance(each, (*IMMUTABLE, *COMPILED)):
            continue
        if isinstance(each, BaseModel) and each.model_config.get("frozen"):
            continue
        seen[id(each)] = each
        to_do += _parts(each)
    return seen


def _parts(each: Any) -> Iterator[Any]:
    if is_frozen(each):  # what holds its fields is not to be found among them
        yield from (getattr(each, field.name, None) for field in fields(each))
        return
    yield from gc.get_referents(each)
    for closure in getattr(each, "__closure__", None) or ():
        yield closure.cell_contents


def is_frozen(each: object) -> bool:
    parameters = getattr(type(each), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


async def test_nothing_that_changes_is_reached_from_both_threads(tiny: str) -> None:
    structured = StructuredOutputs(regex="[a-z]{30}")
    cases: list[dict[str, Any]] = [
        {},
        {"n": 2, "logprobs": 2},
        {"bad_words": ["ab"], "min_tokens": 3},
        {"structured_outputs": structured},
    ]
    async with make_async_llm(tiny, max_batch_size=5) as engine:
        outputs = [engine.generate("hello", GREEDY.model_copy(update={"max_tokens": 150, **each})) for each in cases]
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
    values = (tuple, frozenset)
    shared = [each for name, each in theirs.items() if name in ours and not is_frozen(each)]
    return [each for each in shared if not isinstance(each, values)]
