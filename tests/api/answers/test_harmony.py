"""Answers in harmony: what is read from messages on channels, wherever the text is cut, and how turns are shown."""

from typing import Any

import pytest

from chairlift.api.answers import AnswerReader
from chairlift.api.answers.harmony import Harmony
from chairlift.api.answers.text import CallPiece, ReasoningPiece
from chairlift.engine.text.harmony_turns import described, in_harmony, with_known_effort
from tests.api.answers.calls import Call

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
F = Call("f", '{"a": 1}')

Item = str | Call | tuple[str]
"""Content, a call, or the text of reasoning."""


def items_of(texts: list[str], form: Harmony, max_calls: int | None) -> list[Item]:
    reader = AnswerReader(form, max_calls)
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.push("", is_last=True, is_whole=True)
    items: list[Item] = []
    for piece in pieces:
        last = items[-1] if items else None
        if isinstance(piece, CallPiece):
            if piece.name is not None:
                items.append(Call(piece.name, piece.text))
            elif isinstance(last, Call):
                items[-1] = Call(last.name, last.arguments + piece.text)
        elif isinstance(piece, ReasoningPiece):
            items[-1:] = [(last[0] + piece.text,)] if isinstance(last, tuple) else [*items[-1:], (piece.text,)]
        else:
            items[-1:] = [last + piece.text] if isinstance(last, str) else [*items[-1:], piece.text]
    return items


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (f"{ANALYSIS}Hm.\n{NEXT}{FINAL}Four. <|return|>", [("Hm.\n",), "Four. "]),
        (f"{FINAL}Four <b>", ["Four <b>"]),
        (f"{ANALYSIS}Hm.{NEXT}{TO_F}" + '{"a": 1}<|call|>', [("Hm.",), F]),
        ('<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [F]),
        (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', [F]),
        (' to=f<|channel|>analysis code<|message|>{"a": 1}<|call|>', [F]),  # models forget namespaces and channels
        (f"{TO_F}<|call|>", [Call("f", "{}")]),
        (f"{TO_F}" + '{"a": 1}}<|call|>', [F]),
        (f"{TO_F}" + '{"a": <|call|>', [Call("f", '{"a": null}')]),
        (f"<|channel|>commentary<|message|>I look.{NEXT}{TO_F}" + '{"a": 1}', ["I look.", F]),
        (f"{ANALYSIS}One.{ANALYSIS}Two.{NEXT}{FINAL}Three.", [("One.\n\nTwo.",), "Three."]),  # an end is forgotten
        (f"{ANALYSIS}Hm.{NEXT} to=functions", [("Hm.",)]),
        (f"{ANALYSIS}Hm", [("Hm",)]),
        ("<|channel|>fina", []),
        ("<|channel|>final Four.", ["Four."]),
        ("Four.", ["Four."]),
        (" to be", [" to be"]),
        ("", []),
    ],
)
def test_messages_are_read_by_their_heads_wherever_they_are_cut(text: str, items: list[Item]) -> None:
    ways = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    assert [items_of(texts, Harmony("assistant"), None) for texts in ways] == [items] * len(ways)


@pytest.mark.parametrize(
    ("begun", "text", "items"),
    [
        ("assistant<|channel|>analysis<|message|>", f", so.{NEXT}{FINAL}Yes.", [(", so.",), "Yes."]),
        ("assistant<|channel|>final<|message|>", " and four.", [" and four."]),
        ("assistant to=functions.f<|channel|>commentary json<|message|>", '{"a": 1}', [F]),
        ("", f"<|start|>assistant{FINAL}Four.", ["Four."]),
    ],
)
def test_a_message_may_have_begun_in_the_prompt(begun: str, text: str, items: list[Item]) -> None:
    assert items_of([text], Harmony(begun), None) == items


def test_nothing_is_read_after_the_last_wanted_call_and_no_calls_without_tools() -> None:
    two = f"{TO_F}" + '{"a": 1}<|call|><|start|>assistant' + f"{TO_F}" + '{"a": 1}<|call|>'
    assert items_of([two], Harmony(), 1) == [F]
    assert items_of([two], Harmony(), None) == [F, F]
    assert items_of([two], Harmony(has_calls=False), None) == ['{"a": 1}\n\n{"a": 1}']


def call(name: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": {}}}


def test_the_template_gets_each_call_alone_with_its_result_and_thoughts_under_its_name() -> None:
    both: list[Any] = [call("a"), call("b")]
    result_a, result_b = ({"role": "tool", "content": name, "tool_call_id": name} for name in "ab")
    lost = {"role": "tool", "content": "?", "tool_call_id": "c"}
    asked: Any = {"role": "user", "content": "Hi"}
    thought: Any = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    shown = in_harmony([asked, {**thought, "tool_calls": both}, result_b, lost, result_a, asked, thought])
    assert shown == [
        asked,
        {**thought, "content": "", "thinking": "Hm.\n\nI look.", "tool_calls": [call("a")]},
        result_a,
        {"role": "assistant", "content": "", "tool_calls": [call("b")]},
        result_b,
        lost,
        asked,
        {**thought, "thinking": "Hm."},
    ]


def test_a_system_message_that_the_template_would_leave_out_is_refused() -> None:
    with pytest.raises(ValueError, match="a system message must be the first message"):
        in_harmony([{"role": "user", "content": "Hi"}, {"role": "system", "content": "Be brief."}])


def test_tools_have_descriptions_and_efforts_are_those_that_are_known() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert described([tool]) == [{"type": "function", "function": {"description": "", "name": "f"}}]
    efforts = ["minimal", "low", "medium", "high", "xhigh"]
    known = [with_known_effort({"reasoning_effort": effort})["reasoning_effort"] for effort in efforts]
    assert known == ["low", "low", "medium", "high", "high"]
    assert with_known_effort({"a": 1}) == {"a": 1}
