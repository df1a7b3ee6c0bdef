"""Thoughts before an answer, however the text is cut."""

import pytest

from chairlift.api.tools import AnswerReader, CallPiece, ContentPiece, ReasoningPiece, Thoughts, ToolFamily
from tests.api.tools.reading import assert_streams

MAY_BEGIN, HAS_BEGUN = Thoughts("<think>", "</think>", False), Thoughts("<think>", "</think>", True)


def told(thoughts: Thoughts, texts: list[str], family: ToolFamily | None = None) -> tuple[str, str, list[str]]:
    """Reasoning, content, and the names of calls. Reasoning comes before all else."""
    reader = AnswerReader(family, thoughts=thoughts)
    pieces = [piece for text in texts for piece in reader.push(text)] + reader.finish()
    kinds = [isinstance(piece, ReasoningPiece) for piece in pieces]
    assert kinds == sorted(kinds, reverse=True)
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    content = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
    return reasoning, content, [piece.name for piece in pieces if isinstance(piece, CallPiece) and piece.name]


@pytest.mark.parametrize(
    ("thoughts", "text", "reasoning", "content"),
    [
        (MAY_BEGIN, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (MAY_BEGIN, "\n<think>Hm.</think>Yes.\n", "Hm.", "Yes.\n"),
        (MAY_BEGIN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (MAY_BEGIN, "<think>\nHm", "Hm", ""),
        (MAY_BEGIN, "<think>Hm </thi", "Hm </thi", ""),
        (MAY_BEGIN, "Yes.", "", "Yes."),
        (MAY_BEGIN, "\n Yes. <think>no</think>", "", "\n Yes. <think>no</think>"),
        (MAY_BEGIN, "<thin", "", "<thin"),
        (MAY_BEGIN, "", "", ""),
        (HAS_BEGUN, "Hm.\n\nHm.\n</think>\n\nYes.", "Hm.\n\nHm.", "Yes."),
        (HAS_BEGUN, "<think>\nHm.</think>Yes. </think>", "Hm.", "Yes. </think>"),
        (HAS_BEGUN, "</think>\n\n  Yes.", "", "  Yes."),
        (HAS_BEGUN, " Hm\n", " Hm\n", ""),
    ],
)
def test_thoughts_end_where_the_mark_stands(thoughts: Thoughts, text: str, reasoning: str, content: str) -> None:
    for texts in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        assert told(thoughts, texts) == (reasoning, content, [])


@pytest.mark.parametrize("family", [ToolFamily.HERMES, ToolFamily.QWEN3_CODER, ToolFamily.LLAMA3_JSON])
def test_calls_are_looked_for_behind_the_thoughts_only(family: ToolFamily) -> None:
    calls = {
        ToolFamily.HERMES: '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ToolFamily.QWEN3_CODER: "<tool_call><function=f></function></tool_call>",
        ToolFamily.LLAMA3_JSON: '{"name": "f", "parameters": {}}',
    }
    text = f"{calls[family]}</think>\n\n{calls[family]}"
    for texts in ([text], list(text)):
        assert told(HAS_BEGUN, texts, family) == (calls[family], "", ["f"])


def test_thoughts_stream_at_once() -> None:
    assert_streams(
        AnswerReader(None, thoughts=MAY_BEGIN),
        ("<thi", []),
        ("nk>\n", []),
        ("Hm. ", [ReasoningPiece("Hm. ")]),
        ("So\n</", [ReasoningPiece("So")]),
        ("b>", [ReasoningPiece("\n</b>")]),
        ("</think>", []),
        ("\n\nYes", [ContentPiece("Yes")]),
    )
