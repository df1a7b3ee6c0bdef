"""What the tests of odd characters in calls share."""

import json
from collections.abc import Callable, Iterable
from typing import Any

from chairlift.api.replies.reply import Reply
from chairlift.params import CompletionOutput, FinishReason, RequestOutput

TOOL = {"name": "f", "parameters": {"type": "object"}}
ODD = [
    '<tool_call>{"name": "f", "arguments": {"a": "x\ny\x00 \\ud83d"}}</tool_call>',
    '<tool_call>{"arguments": {"a": "x\ny\x00 \\ud83d"}, "name": "f"}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\ny\\u0000 \\\\ud83d\\"}"}</tool_call>',
]
READ = {"a": "x\ny\0 \ufffd"}


def told_of(reply: Reply, text: str) -> Any:
    """The whole reply to a request, parsed."""
    output = RequestOutput("r", None, [1], [CompletionOutput(0, text, [1], FinishReason.STOP)])
    return json.loads(reply.whole([output]).model_dump_json())


def streamed_of(reply: Reply, text: str) -> Iterable[Any]:
    """The payloads of a stream of single characters."""
    growing, events = CompletionOutput(0, "", [1], None), reply.opening([[1]])
    output = RequestOutput("r", None, [1], [growing])
    for character in text:
        growing.text += character
        events += reply.news(0, output)
    growing.finish_reason = FinishReason.STOP
    events += [*reply.news(0, output), *reply.closing()]
    return [json.loads(event.partition("data: ")[2]) for event in events if "[DONE]" not in event]


def check(new_reply: Callable[[], Reply], whole: Callable[[Any], str], piece: Callable[[Any], str | None]) -> None:
    """`whole`: the arguments in a whole reply; `piece`: those in an event; None: there are none."""
    for text in ODD:
        pieces = [told for payload in streamed_of(new_reply(), text) if (told := piece(payload)) is not None]
        assert json.loads(whole(told_of(new_reply(), text))) == json.loads("".join(pieces)) == READ
