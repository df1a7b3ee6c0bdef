"""Holds what the tests of odd characters in calls share."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from chairlift.api.replies.reply import Reply
from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.params import FinishReason

TOOL = {"name": "f", "parameters": {"type": "object"}}
ODD = [
    '<tool_call>{"name": "f", "arguments": {"a": "x\ny\x00 \\ud83d"}}</tool_call>',
    '<tool_call>{"arguments": {"a": "x\ny\x00 \\ud83d"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\ny\\u0000 \\\\ud83d\\"}"}</tool_call>',
]
READ = {"a": "x\ny\0 \ufffd"}


def delta_of(text: str, finish_reason: FinishReason | None = None) -> RequestDelta:
    """New text of a request's only choice."""
    return RequestDelta("r", None, [1], [CompletionDelta(0, text, [1], [], [], 1, finish_reason)])


def told_of(reply: Reply, text: str) -> Any:
    """The whole reply to a request, parsed."""
    output = delta_of(text, FinishReason.STOP)
    return json.loads(reply.whole([output]).model_dump_json())


def streamed_of(reply: Reply, text: str) -> Iterable[Any]:
    """The payloads of a stream of single characters."""
    events = reply.opening([[1]])
    for character in text:
        events += reply.news(0, delta_of(character))
    events += [*reply.news(0, delta_of("", FinishReason.STOP)), *reply.closing()]
    return [json.loads(event.partition("data: ")[2]) for event in events if "[DONE]" not in event]


def check(new_reply: Callable[[], Reply], whole: Callable[[Any], str], piece: Callable[[Any], str | None]) -> None:
    """`whole`: the arguments in a whole reply; `piece`: those in an event; None: there are none."""
    for text in ODD:
        pieces = [told for payload in streamed_of(new_reply(), text) if (told := piece(payload)) is not None]
        assert json.loads(whole(told_of(new_reply(), text))) == json.loads("".join(pieces)) == READ
