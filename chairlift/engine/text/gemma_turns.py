"""Conversations for chat templates of Gemma 4 that show what a call returned within the turn that made the call.

Such a template takes results from a field of the assistant's message, `tool_responses`, and shows messages of tools as
turns that the model was never taught.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

Message = dict[str, Any]

_RESPONSES = re.compile(r"<\|tool_response>")
_TAKES_TOOLS = re.compile(r"role['\"]?\]? *(==|!=) *['\"]tool['\"]")


def takes_responses(template: str) -> bool:
    """True if a chat template (Jinja source) takes results in the message with the calls, and only there."""
    return _RESPONSES.search(template) is not None and _TAKES_TOOLS.search(template) is None


def with_responses(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with each run of tools' messages as a field of the one before it, which made the calls.

    What the assistant says next, without calls, is of the same turn. What it said before the calls is a turn before it,
    because the template shows what a message says at its end.
    """
    shown: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message.get("role") == "tool"):
        several = list(run)
        if is_result and shown and shown[-1].get("tool_calls"):
            shown += _answered(shown.pop(), several)
        elif shown and "tool_responses" in shown[-1] and _is_answer(several[0]):
            shown[-1] = {**shown[-1], "content": several[0].get("content")}
            shown += several[1:]
        else:
            shown += several
    return shown


def _is_answer(message: Message) -> bool:
    return message.get("role") == "assistant" and not message.get("tool_calls")


def _answered(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    if message.get("content"):
        yield {name: value for name, value in message.items() if name != "tool_calls"}
    names = {call.get("id"): call["function"]["name"] for call in message["tool_calls"]}
    responses = [
        {"name": names.get(each.get("tool_call_id"), "unknown"), "response": _value_of(each.get("content"))}
        for each in results
    ]
    yield {**message, "content": "", "tool_responses": responses}


def _value_of(content: Any) -> Any:
    """An object that is written in JSON, or else the text."""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    try:
        value: object = json.loads(content)
    except (ValueError, TypeError, RecursionError):
        return content
    return value if isinstance(value, dict) else content
