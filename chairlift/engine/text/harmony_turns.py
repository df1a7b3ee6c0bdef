"""Conversations for chat templates of harmony, the format of gpt-oss.

Such a template shows thoughts under a name of its own, one call in a message, no system message after the first, and
no tool without a description. It knows three efforts.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

Message = dict[str, Any]

_SIGN = re.compile(r"<\|channel\|>analysis<\|message\|>")
_EFFORTS = {"minimal": "low", "xhigh": "high"}
_SYSTEM = ("system", "developer")


def is_harmony(template: str) -> bool:
    """True if a chat template (Jinja source) writes harmony."""
    return _SIGN.search(template) is not None


def in_harmony(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages as the template shows them: each call alone, with its result behind it.

    ValueError for a system message that the template would leave out.
    """
    if any(message.get("role") in _SYSTEM for message in messages[1:]):
        raise ValueError("a system message must be the first message")
    shown: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message.get("role") == "tool"):
        several = list(run)
        if is_result and shown and shown[-1].get("tool_calls"):
            shown += _with_results(shown.pop(), several)
        else:
            shown += map(_with_thinking, several)
    return [apart for message in shown for apart in _with_results(message, [])]


def described(tools: Sequence[Any]) -> list[Any]:
    """Returns the tools, each with a description, which may be empty."""
    return [
        {**tool, "function": {"description": "", **tool["function"]}}
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        else tool
        for tool in tools
    ]


def with_known_effort(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the template's variables with the nearest effort that the model was taught."""
    effort = arguments.get("reasoning_effort")
    return {**arguments, "reasoning_effort": _EFFORTS[effort]} if effort in _EFFORTS else arguments


def _with_results(message: Message, results: Sequence[Message]) -> Iterator[Message]:
    """Yields a message for each call, and behind it what it returned; at the end, what no call is known for."""
    calls = message.get("tool_calls")
    if not calls:
        yield {name: value for name, value in message.items() if name != "tool_calls"}
        return
    left = list(results)
    for number, call in enumerate(calls):
        first = message if number == 0 else {"role": "assistant", "content": ""}
        yield {**first, "tool_calls": [call]}
        yield from (each for each in left if each.get("tool_call_id") == call.get("id"))
        left = [each for each in left if each.get("tool_call_id") != call.get("id")]
    yield from left


def _with_thinking(message: Message) -> Message:
    """Gives thoughts the template's name. Beside calls, of thoughts and content it takes one, so they are joined."""
    thoughts = message.get("thinking") or message.get("reasoning_content")
    if not thoughts:
        return message
    content = message.get("content")
    if message.get("tool_calls") and isinstance(content, str) and content:
        return {**message, "thinking": f"{thoughts}\n\n{content}", "content": ""}
    return {**message, "thinking": thoughts}
