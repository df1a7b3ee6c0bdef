"""Structured output in the engine: masks per row, beside free rows, under multistep, with all else that shapes it.

A grammar that breaks ends its request alone; so do masks that cannot be computed.
"""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from chairlift import LLM, AsyncLLM, SamplingParams
from chairlift.engine.sampling.compiled_grammar import CompiledGrammar
from chairlift.engine.sampling.masks import MaskThreads, TokenGrammar
from chairlift.engine.sampling.pending_masks import PendingMasks
from chairlift.engine.text.grammar import GrammarCompiler
from chairlift.engine.text.inputs import Generation
from chairlift.errors import InvalidRequest
from chairlift.params import CompletionOutput, RequestOptions, StructuredOutputs
from chairlift.scheduler import Request
from tests.engine.async_support import DEADLINE_S, clock_of, last, wait_until, wait_until_idle
from tests.engine.support import (
    END_TOKEN,
    GREEDY,
    PROMPTS,
    VOCAB_SIZE,
    assert_idle,
    core_of,
    make_llm,
    new_grammar,
    tokens_of,
)

NUMBER = StructuredOutputs(regex="[0-9]{3}(\\.[0-9]{2})?")
LARK = StructuredOutputs(grammar='start: "a" b\nb: "b" | "b" b "!"~2..2\n')
NAME, AGE = {"enum": ["Ada", "Bo"]}, {"type": "integer", "minimum": 10, "maximum": 99}
PERSON = {"type": "object", "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"]}


def ruled(outputs: StructuredOutputs, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **fields}, structured_outputs=outputs)


def answer(llm: LLM, params: SamplingParams, prompt: str = "hi") -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


@pytest.fixture(scope="module", params=[1, 4], ids=["one step", "4 steps"])
def paced(tiny: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Yields engines of one and of several steps a launch."""
    with make_llm(tiny, max_steps_per_launch=request.param) as llm:
        yield llm
        assert_idle(llm)


@pytest.mark.parametrize("temperature", [0.0, 50.0])
def test_every_choice_is_what_its_grammar_says(paced: LLM, temperature: float) -> None:
    person = StructuredOutputs(json={**PERSON, "additionalProperties": False})
    (output,) = paced.generate("hi", ruled(person, temperature=temperature, seed=3, n=6))
    assert_idle(paced)
    for choice in output.outputs:
        assert re.fullmatch(r'\{"name": "(Ada|Bo)", "age": [1-9][0-9]\}', choice.text)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert choice.token_ids == list(choice.text.encode())  # no end token: nothing could follow


def test_keys_without_a_name_are_the_callers_choice(llm: LLM) -> None:
    schema, bias = {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"}, {ord(","): 100.0}
    closed, opened = (StructuredOutputs(json=schema, disable_additional_properties=each) for each in (None, False))
    assert answer(llm, ruled(closed, logit_bias=bias)).text == '{"a": 1}'
    assert answer(llm, ruled(opened, logit_bias=bias)).text.startswith('{"a": 1, "')


def test_free_rows_say_what_they_say_alone_and_each_other_obeys_its_own_grammar(paced: LLM) -> None:
    alone = tokens_of(paced.generate(PROMPTS, GREEDY))
    kinds = [ruled(NUMBER), GREEDY, ruled(StructuredOutputs(choice=["日本"])), ruled(LARK)]
    mixed = paced.generate(PROMPTS, kinds * 2)
    assert tokens_of(mixed)[1::4] == alone[1::4]
    texts = [output.outputs[0].text for output in mixed]
    assert all(re.fullmatch(r"[0-9]{3}(\.[0-9]{2})?", text) for text in texts[::4])
    assert texts[2::4] == ["日本", "日本"]
    assert all(re.fullmatch("ab+(!!)*", text) for text in texts[3::4])


SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.5, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 3.0, "frequency_penalty": -2.0, "temperature": 1.0, "seed": 1},
    {"logit_bias": {ord("7"): 5.0}, "frequency_penalty": 1.5},
]


def test_steps_per_launch_change_nothing(tiny: str) -> None:
    structure = StructuredOutputs(regex="[0-9]{10}[a-f]{3,9}x")
    texts = []
    for steps in (1, 4, 9):
        with make_llm(tiny, max_steps_per_launch=steps) as llm:
            params = [[ruled(structure, **fields)] * 2 + [GREEDY] for fields in SHAPES]
            texts.append([tokens_of(llm.generate(["hi", "ho", "free"], each)) for each in params])
    assert texts[0] == texts[1] == texts[2]


def test_penalties_count_only_the_tokens_that_were_kept(paced: LLM) -> None:
    """A penalty that is larger than all preferences gives each letter once."""
    penalties = {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    bias = dict.fromkeys(b"abcd", 50.0)
    choice = answer(paced, ruled(StructuredOutputs(regex="[a-d]{4}"), logit_bias=bias, **penalties))
    assert sorted(choice.text) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "fields", [{"min_tokens": 30}, {"ignore_eos": True}, {"min_tokens": 30, "ignore_eos": True}], ids=str
)
def test_the_end_of_the_grammar_is_the_end_whatever_else_is_asked_for(paced: LLM, fields: dict[str, Any]) -> None:
    assert answer(paced, ruled(StructuredOutputs(choice=["yes"]), **fields)).text == "yes"
    choice = answer(paced, ruled(StructuredOutputs(regex="(ab)+"), logit_bias={END_TOKEN: 100.0}, **fields))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 15}, ("one, two, three", "length", None)),
        ({"max_tokens": 16}, ("one, two, three!", "stop", None)),
        ({"stop": [", th"]}, ("one, two", "stop", ", th")),
        ({"stop_token_ids": [ord("w")]}, ("one, t", "stop", ord("w"))),
    ],
    ids=str,
)
def test_limits_stop_strings_and_stop_tokens_end_it_too(paced: LLM, fields: dict[str, Any], expected: object) -> None:
    choice = answer(paced, ruled(StructuredOutputs(choice=["one, two, three!"]), **fields))
    assert (choice.text, choice.finish_reason, choice.stop_reason) == expected
    assert_idle(paced)


def test_a_closed_engine_leaves_no_thread_behind(tiny: str) -> None:
    before = set(threading.enumerate())
    llm = make_llm(tiny)
    core = core_of(llm)  # somebody may still hold it
    answer(llm, ruled(NUMBER))
    threads = set(threading.enumerate()) - before
    llm.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), core


WORDS = GREEDY.model_copy(update={"structured_outputs": StructuredOutputs(regex="[a-z]{30}"), "max_tokens": 8})
UNFIT = """the grammar failed: Parser Error: token "!" doesn't satisfy the grammar; byte '!' fails parse"""


def take_what_does_not_fit(grammar: Any) -> None:
    assert not grammar.matcher.consume_token(ord("!"))
    assert grammar.matcher.is_error()


def fail_at_once(error: Exception) -> Callable[[Any], None]:
    def advance(_: int) -> bool:
        raise error

    return lambda grammar: setattr(grammar, "advance", advance)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (take_what_does_not_fit, UNFIT),
        (fail_at_once(ValueError("no luck")), "the grammar failed: no luck"),
        (fail_at_once(RuntimeError("no luck")), "the grammar failed: no luck"),
    ],
)
def test_a_grammar_that_breaks_ends_its_request_alone(
    paced: LLM, monkeypatch: pytest.MonkeyPatch, break_it: Callable[[TokenGrammar], None], said: str
) -> None:
    prompts, params = ["one", "bad", "free", "two"], [WORDS, WORDS, GREEDY, WORDS]
    one, _, free, two = paced.generate(prompts, params)
    prepare = paced.inputs.prepare

    def prepare_broken(*args: Any, **named: Any) -> Generation:
        generation = prepare(*args, **named)
        (request,) = generation.requests
        if generation.prompt != "bad" or request.new_grammar is None:
            return generation
        grammar = request.new_grammar()
        assert isinstance(grammar, TokenGrammar)
        break_it(grammar)
        return replace(generation, requests=[replace(request, new_grammar=lambda: grammar)])

    with monkeypatch.context() as patch:
        patch.setattr(paced.inputs, "prepare", prepare_broken)
        outputs = paced.generate(prompts, params)
    assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].error) == ("abort", said)
    assert [outputs[0].outputs, outputs[2].outputs, outputs[3].outputs] == [one.outputs, free.outputs, two.outputs]
    assert_idle(paced)


MakeGrammar = Callable[[CompiledGrammar, MaskThreads], TokenGrammar]


async def ruled_by(
    engine: AsyncLLM, make: MakeGrammar, prompt: str, params: SamplingParams, **wishes: Any
) -> Generation:
    """A generation whose sequences have grammars that `make` makes."""
    generation = await engine.prepare(prompt, params, **wishes)

    def begin(request: Request) -> TokenGrammar:
        assert request.new_grammar is not None
        usual = request.new_grammar()
        assert isinstance(usual, TokenGrammar)
        return make(usual.compiled, usual.threads)

    requests = [replace(each, new_grammar=partial(begin, each)) for each in generation.requests]
    return replace(generation, requests=requests)


class UncopiedGrammar(TokenGrammar):
    def __init__(self, *_: object) -> None:
        raise MemoryError("no luck")  # there is none for a copy of its matcher


class MasklessGrammar(TokenGrammar):
    def compute_mask(self) -> torch.Tensor:
        raise RuntimeError("no luck")


@pytest.mark.parametrize(
    ("make", "said", "num_tokens"),
    [
        (UncopiedGrammar, "the request could not be started: no luck", 0),
        (MasklessGrammar, "the grammar failed: RuntimeError: no luck", 1),  # under the mask that it begins with
    ],
)
async def test_a_grammar_that_cannot_be_begun_or_give_masks_ends_those_that_need_it_and_no_other(
    engine: AsyncLLM, make: MakeGrammar, said: str, num_tokens: int
) -> None:
    expected = await last(engine.generate("free", GREEDY))
    ruled = [await ruled_by(engine, make, prompt, WORDS) for prompt in ("one", "two")]
    free = await engine.prepare("free", GREEDY)
    one, beside, two = await asyncio.gather(*[last(engine.run(each)) for each in (ruled[0], free, ruled[1])])
    ends = [(choice.finish_reason, choice.error, len(choice.token_ids)) for choice in (one.outputs[0], two.outputs[0])]
    assert ends == [("abort", said, num_tokens)] * 2
    assert tokens_of([beside]) == tokens_of([expected])
    await wait_until_idle(engine)


async def test_while_a_mask_never_comes_others_go_on_its_request_may_end_or_be_left_and_the_next_is_right(
    engine: AsyncLLM,
) -> None:
    entered, may_go_on = threading.Event(), threading.Event()

    class HeldGrammar(TokenGrammar):
        def compute_mask(self) -> torch.Tensor:
            entered.set()
            assert may_go_on.wait(DEADLINE_S)
            return super().compute_mask()

    expected = tokens_of([await last(engine.generate("hi", WORDS))])
    left = await ruled_by(engine, HeldGrammar, "left", WORDS.model_copy(update={"n": 2}))
    leaving = asyncio.create_task(last(engine.run(left)))
    assert await asyncio.to_thread(entered.wait, DEADLINE_S)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert engine.num_unfinished == 0
    await wait_until_idle(engine)  # while the mask is still being computed
    with clock_of(engine) as clock:
        held = await ruled_by(engine, HeldGrammar, "stuck", WORDS, options=RequestOptions(timeout=5.0))
        stuck = asyncio.create_task(last(engine.run(held)))
        await wait_until(lambda: core_of(engine).cache.slots_remaining == 1, "it runs")
        assert len((await last(engine.generate("free", GREEDY))).outputs[0].token_ids) == 12
        clock.advance(6.0)
        (output,) = (await stuck).outputs
    assert (output.finish_reason, output.stop_reason) == ("abort", "timeout")
    await wait_until_idle(engine)
    may_go_on.set()
    assert tokens_of([await last(engine.generate("hi", WORDS))]) == expected


def walk(grammar: TokenGrammar, text: str) -> list[bool]:
    return [grammar.advance(byte) for byte in text.encode()]


def allowed_under(pending: PendingMasks | None, num_rows: int = 1) -> list[list[int]]:
    """Returns what the masks leave of each row."""
    assert pending is not None
    logits = torch.zeros(num_rows, VOCAB_SIZE)
    pending.apply(logits)
    assert not logits[logits.isfinite()].any()
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def test_a_mask_follows_its_sequence_which_says_when_nothing_can_follow(compiler: GrammarCompiler) -> None:
    first, second = (new_grammar(compiler, StructuredOutputs(choice=["ab", "abc"])) for _ in range(2))
    assert walk(first, "ab") == [False, False]
    allowed = []
    for byte in b"abc":
        allowed += allowed_under(PendingMasks.of([second]))
        assert second.advance(byte) is (byte == ord("c"))
    assert allowed == [[ord("a")], [ord("b")], [ord("c"), END_TOKEN]]
    assert first.advance(END_TOKEN)


def test_a_token_that_does_not_fit_is_an_error_of_its_sequence_alone(compiler: GrammarCompiler) -> None:
    first, second = new_grammar(compiler, NUMBER), new_grammar(compiler, NUMBER)
    assert walk(first, "123.4") == [False] * 5
    assert walk(second, "1x") == [False, False]
    pending = PendingMasks.of([second])
    assert allowed_under(pending) == [[]]
    assert pending is not None
    assert "doesn't satisfy the grammar" in (pending.error_of(0) or "")
    assert pending.stop_reason_of(0) is None
    assert walk(first, "5") == [True]


def test_masks_touch_only_the_rows_that_have_a_grammar(compiler: GrammarCompiler) -> None:
    digits = new_grammar(compiler, StructuredOutputs(regex="[0-2]"))
    everything = list(range(VOCAB_SIZE))
    assert allowed_under(PendingMasks.of([None, digits, None]), 3) == [everything, [48, 49, 50], everything]
    assert PendingMasks.of([None, None]) is None


TEXTS = ['with "quotes"', "back\\slash", "line\nbreak\ttab\r", "日本😀é", "\x00\x01\x7f\x80", "/*//%|()[]", "a" * 500]


@pytest.mark.parametrize("text", TEXTS)
def test_a_choice_is_taken_literally(compiler: GrammarCompiler, text: str) -> None:
    *before, last = walk(new_grammar(compiler, StructuredOutputs(choice=[text])), text)
    assert (set(before) | {False}, last) == ({False}, True)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "minimum"),
        ({"grammar": "root ::= elsewhere"}, "elsewhere"),
        ({"grammar": "root ::= root"}, "compiled"),
        ({"grammar": "start: start"}, "compiled"),
    ],
)
def test_what_cannot_be_compiled_is_refused(compiler: GrammarCompiler, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        new_grammar(compiler, StructuredOutputs(**fields))
    assert caught.value.param == "structured_outputs"
