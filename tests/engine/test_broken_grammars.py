"""A grammar that breaks ends its request alone; so do masks that cannot be computed."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from chairlift import LLM
from chairlift.engine.sampling.masks import TokenGrammar
from chairlift.engine.text.inputs import Generation
from chairlift.params import RequestOptions, RequestOutput, StructuredOutputs
from tests.engine.async_support import DEADLINE_S, clock_of, last, make_async_llm, wait_until_idle
from tests.engine.support import GREEDY, assert_idle, make_llm, tokens_of

WORDS = GREEDY.model_copy(update={"structured_outputs": StructuredOutputs(regex="[a-z]{30}"), "max_tokens": 8})


def generate_with_broken(llm: LLM, break_it: Callable[[TokenGrammar], object]) -> list[RequestOutput]:
    """Three requests with a grammar and a free one between; the second of the three is broken."""
    prepare = llm.inputs.prepare

    def prepare_broken(*args: Any, **kwargs: Any) -> Generation:
        generation = prepare(*args, **kwargs)
        if generation.prompt == "bad":
            (request,) = generation.requests
            assert request.new_grammar is not None
            grammar = request.new_grammar()
            assert isinstance(grammar, TokenGrammar)
            break_it(grammar)
            return replace(generation, requests=[replace(request, new_grammar=lambda: grammar)])
        return generation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.inputs, "prepare", prepare_broken)
        return llm.generate(["one", "bad", "free", "two"], [WORDS, WORDS, GREEDY, WORDS])


def take_what_does_not_fit(grammar: TokenGrammar) -> None:
    assert not grammar.matcher.consume_token(ord("!"))
    assert grammar.matcher.is_error()


def fail_at_once(error: Exception) -> Callable[[TokenGrammar], object]:
    def break_it(grammar: TokenGrammar) -> None:
        def advance(_: int) -> bool:
            raise error

        monkey: Any = grammar
        monkey.advance = advance

    return break_it


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (
            take_what_does_not_fit,
            """the grammar failed: Parser Error: token "!" doesn't satisfy the grammar; byte '!' fails parse""",
        ),
        (fail_at_once(ValueError("no luck")), "the grammar failed: no luck"),
        (fail_at_once(RuntimeError("no luck")), "the grammar failed: no luck"),
    ],
)
@pytest.mark.parametrize("steps", [1, 4])
def test_a_grammar_that_breaks_ends_its_request_alone(
    tiny: str, break_it: Callable[[TokenGrammar], object], said: str, steps: int
) -> None:
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        one, _, free, two = llm.generate(["one", "bad", "free", "two"], [WORDS, WORDS, GREEDY, WORDS])
        outputs = generate_with_broken(llm, break_it)
        assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].error) == ("abort", said)
        assert [outputs[0].outputs, outputs[2].outputs, outputs[3].outputs] == [one.outputs, free.outputs, two.outputs]
        assert_idle(llm)


def test_a_grammar_whose_matcher_cannot_be_copied_ends_its_request_alone(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no luck")

    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(["free"], GREEDY))
        monkeypatch.setattr(TokenGrammar, "__init__", fail)
        constrained, free = llm.generate(["one", "free"], [WORDS, GREEDY])
        (output,) = constrained.outputs
        assert (output.finish_reason, output.error) == ("abort", "the request could not be started: no luck")
        assert tokens_of([free]) == expected
        monkeypatch.undo()
        assert_idle(llm)


def test_masks_that_cannot_be_computed_end_the_requests_that_need_them_and_no_other(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: TokenGrammar) -> torch.Tensor:
        raise RuntimeError("no luck")

    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(["free"], GREEDY))
        monkeypatch.setattr(TokenGrammar, "compute_mask", fail)
        one, free, two = llm.generate(["one", "free", "two"], [WORDS, GREEDY, WORDS])
        assert [one.outputs[0].error, two.outputs[0].error] == ["the grammar failed: RuntimeError: no luck"] * 2
        assert [len(one.outputs[0].token_ids), len(two.outputs[0].token_ids)] == [1, 1]  # under the first mask
        assert tokens_of([free]) == expected
        monkeypatch.undo()
        assert_idle(llm)


async def test_leaving_while_the_mask_is_computed_frees_the_slot_and_the_next_grammar_is_right(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_async_llm(tiny) as engine:
        expected = tokens_of([await last(engine.generate("hi", WORDS))])
        gate = Gate(monkeypatch)
        leaving = asyncio.create_task(last(engine.generate("left", WORDS.model_copy(update={"n": 2}))))
        assert await asyncio.to_thread(gate.entered.wait, DEADLINE_S)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert engine.num_unfinished == 0
        await wait_until_idle(engine)  # while the mask is still being computed
        gate.may_go_on.set()
        assert tokens_of([await last(engine.generate("hi", WORDS))]) == expected


async def test_others_go_on_while_a_mask_never_comes_and_a_deadline_ends_its_request(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_async_llm(tiny) as engine:
        gate = Gate(monkeypatch)
        with clock_of(engine) as clock:
            stuck = asyncio.create_task(last(engine.generate("stuck", WORDS, options=RequestOptions(timeout=5.0))))
            assert await asyncio.to_thread(gate.entered.wait, DEADLINE_S)
            free = await last(engine.generate("free", GREEDY))
            assert len(free.outputs[0].token_ids) == 12
            clock.now += 6.0
            output = await stuck
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", "timeout")
        assert not gate.may_go_on.is_set()
        await wait_until_idle(engine)
        gate.may_go_on.set()


class Gate:
    """Masks after the first token wait until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        compute = TokenGrammar.compute_mask

        def wait_and_compute(grammar: TokenGrammar) -> torch.Tensor:
            self.entered.set()
            assert self.may_go_on.wait(DEADLINE_S)
            return compute(grammar)

        monkeypatch.setattr(TokenGrammar, "compute_mask", wait_and_compute)
