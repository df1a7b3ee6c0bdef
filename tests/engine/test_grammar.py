"""Structured output in the engine: masks per row, beside free rows, under multistep, with all else that shapes it."""

import json
import re
import threading
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.engine.sampling.masks import PendingMasks, TokenGrammar
from chairlift.engine.text.grammar import GrammarCompiler
from chairlift.engine.text.rehearsal import Rehearsal, Verdict
from chairlift.errors import InvalidRequest
from chairlift.params import CompletionOutput, StructuredOutputs
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

STEPS = pytest.mark.parametrize("steps", [1, 4])
NUMBER = StructuredOutputs(regex="[0-9]{3}(\\.[0-9]{2})?")
PERSON = StructuredOutputs(
    json={
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


def ruled(outputs: StructuredOutputs, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **fields}, structured_outputs=outputs)


def answer(llm: LLM, params: SamplingParams, prompt: str = "hi") -> CompletionOutput:
    return llm.generate(prompt, params)[0].outputs[0]


# --- answers


@STEPS
@pytest.mark.parametrize("temperature", [0.0, 1.0, 50.0])
def test_every_choice_is_what_its_grammar_says(tiny: str, steps: int, temperature: float) -> None:
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        (output,) = llm.generate("hi", ruled(PERSON, temperature=temperature, seed=3, n=6))
        assert_idle(llm)
    for choice in output.outputs:
        assert re.fullmatch(r'\{"name": "(Ada|Bo)", "age": [1-9][0-9]\}', choice.text)
        assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
        assert choice.token_ids == list(choice.text.encode())  # no end token: nothing could follow


@STEPS
def test_free_rows_say_what_they_say_alone(tiny: str, steps: int) -> None:
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        alone = tokens_of(llm.generate(PROMPTS, GREEDY))
        params = [GREEDY if index % 2 else ruled(NUMBER) for index in range(len(PROMPTS))]
        mixed = llm.generate(PROMPTS, params)
    assert tokens_of(mixed)[1::2] == alone[1::2]
    for output in mixed[::2]:
        assert re.fullmatch(r"[0-9]{3}(\.[0-9]{2})?", output.outputs[0].text)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.5, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"repetition_penalty": 3.0, "frequency_penalty": -2.0, "temperature": 1.0, "seed": 1},
        {"logit_bias": {ord("7"): 5.0}, "frequency_penalty": 1.5},
    ],
)
def test_steps_per_launch_change_nothing(tiny: str, fields: dict[str, Any]) -> None:
    structure = StructuredOutputs(regex="[0-9]{20}[a-f]{5,20}x")
    texts = []
    for steps in (1, 4, 9):
        with make_llm(tiny, max_steps_per_launch=steps) as llm:
            outputs = llm.generate(["hi", "ho", "free"], [ruled(structure, **fields)] * 2 + [GREEDY])
        texts.append(tokens_of(outputs))
    assert texts[0] == texts[1] == texts[2]


@STEPS
def test_penalties_count_only_the_tokens_that_were_kept(tiny: str, steps: int) -> None:
    """A presence penalty that is larger than all preferences gives each letter once."""
    bias = dict.fromkeys(b"abcd", 50.0)
    params = ruled(StructuredOutputs(regex="[a-d]{4}"), presence_penalty=2.0, frequency_penalty=2.0, logit_bias=bias)
    strong = params.model_copy(update={"repetition_penalty": 100.0})
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        assert sorted(answer(llm, strong).text) == ["a", "b", "c", "d"]


@STEPS
def test_the_end_of_the_grammar_is_the_end_whatever_else_is_asked_for(tiny: str, steps: int) -> None:
    open_ended = StructuredOutputs(regex="(ab)+")
    always_end = {END_TOKEN: 100.0}
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        for fields in ({"min_tokens": 30}, {"ignore_eos": True}, {"min_tokens": 30, "ignore_eos": True}):
            assert answer(llm, ruled(StructuredOutputs(choice=["yes"]), **fields)).text == "yes"
            choice = answer(llm, ruled(open_ended, logit_bias=always_end, **fields))
            assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", None)


@STEPS
def test_max_tokens_cuts_and_says_so(tiny: str, steps: int) -> None:
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        cut = answer(llm, ruled(StructuredOutputs(choice=["yes!"]), max_tokens=3))
        whole = answer(llm, ruled(StructuredOutputs(choice=["yes!"]), max_tokens=4))
    assert (cut.text, cut.finish_reason) == ("yes", "length")
    assert (whole.text, whole.finish_reason) == ("yes!", "stop")


@STEPS
def test_stop_strings_and_stop_tokens_end_it_too(tiny: str, steps: int) -> None:
    structure = StructuredOutputs(choice=["one, two, three"])
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        string = answer(llm, ruled(structure, stop=[", th"]))
        token = answer(llm, ruled(structure, stop_token_ids=[ord("w")]))
        assert_idle(llm)
    assert (string.text, string.finish_reason, string.stop_reason) == ("one, two", "stop", ", th")
    assert (token.text, token.finish_reason, token.stop_reason) == ("one, t", "stop", ord("w"))


def test_all_kinds_of_structure_in_one_batch(tiny: str) -> None:
    kinds = [
        StructuredOutputs(json='{"const": [1, {"b": null, "a": "é"}]}'),
        StructuredOutputs(regex="é{2}"),
        StructuredOutputs(choice=["日本"]),
        StructuredOutputs(grammar='start: "a" b\nb: "b" | "b" b "!"~2..2\n'),
        StructuredOutputs(grammar='root ::= "x" y\ny ::= "z"\n'),
    ]
    with make_llm(tiny) as llm:
        outputs = llm.generate(["hi"] * 5, [ruled(kind) for kind in kinds])
    texts = [output.outputs[0].text for output in outputs]
    assert json.loads(texts[0]) == [1, {"b": None, "a": "é"}]
    assert list(json.loads(texts[0])[1]) == ["b", "a"]
    assert texts[1:3] == ["éé", "日本"]
    assert re.fullmatch("ab+(!!)*", texts[3])
    assert texts[4] == "xz"


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


def test_a_grammar_is_compiled_once_for_all_choices_and_prompts(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    perform = Rehearsal.perform

    def note(self: Rehearsal, outputs: str) -> Verdict:
        compiled.append(outputs)
        return perform(self, outputs)

    monkeypatch.setattr(Rehearsal, "perform", note)
    with make_llm(tiny) as llm:
        outputs = llm.generate(["hi", "ho"], ruled(NUMBER, n=5))
        llm.generate("hi", ruled(NUMBER))
    assert len(tokens_of(outputs)) == 10
    assert len(compiled) == 1


# --- the compiler


def walk(grammar: TokenGrammar, text: str) -> list[bool]:
    return [grammar.advance(byte) for byte in text.encode()]


def test_a_grammar_says_when_nothing_can_follow(compiler: GrammarCompiler) -> None:
    assert walk(new_grammar(compiler, StructuredOutputs(choice=["ab", "abc"])), "ab") == [False, False]
    assert walk(new_grammar(compiler, StructuredOutputs(choice=["ab", "abc"])), "abc") == [False, False, True]
    grammar = new_grammar(compiler, StructuredOutputs(choice=["ab", "abc"]))
    walk(grammar, "ab")
    assert grammar.advance(END_TOKEN)


def test_a_token_that_does_not_fit_is_an_error(compiler: GrammarCompiler) -> None:
    grammar = new_grammar(compiler, NUMBER)
    assert walk(grammar, "1x") == [False, False]
    pending = PendingMasks.of([grammar])
    assert pending is not None
    logits = torch.zeros(1, VOCAB_SIZE)
    pending.apply(logits)
    assert not logits.isfinite().any()
    assert "doesn't satisfy the grammar" in (pending.error_of(0) or "")
    assert pending.stop_reason_of(0) is None


def test_each_sequence_goes_its_own_way(compiler: GrammarCompiler) -> None:
    first = new_grammar(compiler, NUMBER)
    walk(first, "123.4")
    second = new_grammar(compiler, NUMBER)
    assert walk(second, "999") == [False, False, False]
    assert walk(first, "5") == [True]


@pytest.mark.parametrize(
    "text",
    ['with "quotes"', "back\\slash", "line\nbreak\ttab\r", "日本😀é", "\x00\x01\x7f\x80", "/*//%|()[]", "a" * 500],
)
def test_a_choice_is_taken_literally(compiler: GrammarCompiler, text: str) -> None:
    *before, last = walk(new_grammar(compiler, StructuredOutputs(choice=[text])), text)
    assert (set(before) | {False}, last) == ({False}, True)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        (StructuredOutputs(regex="(a"), "unclosed group"),
        (StructuredOutputs(json={"type": "nonsense"}), "Invalid type: nonsense"),
        (StructuredOutputs(json="{"), "cannot be compiled"),
        (StructuredOutputs(json={"type": "integer", "minimum": 2, "maximum": 1}), "minimum"),
        (StructuredOutputs(grammar="start: x"), "unknown name"),
        (StructuredOutputs(grammar="root ::= elsewhere"), "elsewhere"),
        (StructuredOutputs(grammar="root ::= root"), "compiled"),
        (StructuredOutputs(grammar="start: start"), "compiled"),
    ],
)
def test_what_cannot_be_compiled_or_can_never_end_is_refused_with_the_reason(
    compiler: GrammarCompiler, outputs: StructuredOutputs, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        new_grammar(compiler, outputs)
    assert caught.value.param == "structured_outputs"


# --- masks


def test_masks_touch_only_the_rows_that_have_a_grammar(compiler: GrammarCompiler) -> None:
    digits = new_grammar(compiler, StructuredOutputs(regex="[0-2]"))
    pending = PendingMasks.of([None, digits, None])
    assert pending is not None
    logits = torch.zeros(3, VOCAB_SIZE)
    pending.apply(logits)
    assert torch.equal(logits[[0, 2]], torch.zeros(2, VOCAB_SIZE))
    assert logits[1].isfinite().nonzero().flatten().tolist() == [48, 49, 50]
    assert PendingMasks.of([None, None]) is None


def test_a_mask_follows_its_sequence_and_lets_it_end(compiler: GrammarCompiler) -> None:
    grammar = new_grammar(compiler, StructuredOutputs(choice=["ab", "abc"]))
    allowed = []
    for byte in b"abc":
        pending = PendingMasks.of([grammar])
        assert pending is not None
        logits = torch.zeros(1, VOCAB_SIZE)
        pending.apply(logits)
        allowed.append(logits[0].isfinite().nonzero().flatten().tolist())
        grammar.advance(byte)
    assert allowed == [[ord("a")], [ord("b")], [ord("c"), END_TOKEN]]
