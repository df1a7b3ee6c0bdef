"""Changes a conversation before the chat template shows it to the model."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter

from chairlift.engine.text.chat_template import Message

TURNS_WARNING = (
    "messages in a row were joined, and later system messages shown as the user's, because the chat template takes one"
    " system message, at the beginning, and speakers in turn"
)

_BILLING = "x-anthropic-billing-header:"
_BILLING_LINE = re.compile(_BILLING + r"[^\n]*\n*")
_JOINED = ("system", "user")  # roles


def without_billing_line(messages: Sequence[Message]) -> Sequence[Message]:
    """Removes the billing line that begins Claude Code's system prompts: it means nothing to a model, and it differs in
    every request, so that no two prompts would share a prefix.
    """
    first = messages[0] if messages else {}
    if first.get("role") != "system" or not first["content"].startswith(_BILLING):
        return messages
    return [{**first, "content": _BILLING_LINE.sub("", first["content"], count=1)}, *messages[1:]]


def speakers_in_turn(messages: Sequence[Message]) -> list[Message]:
    """The same conversation for a template that refuses it: one system message, at the beginning, and no two messages
    of the user in a row.

    Agents add system messages as they go on. These become the user's where they are, so that a prompt begins as the one
    before it did. Every `content` is a text.
    """
    num_leading = next((i for i, each in enumerate(messages) if each["role"] != "system"), len(messages))
    later = ({**each, "role": "user"} if each["role"] == "system" else each for each in messages[num_leading:])
    return _joined([*messages[:num_leading], *later])


def _joined(messages: Iterable[Message]) -> list[Message]:
    turns: list[Message] = []
    for role, run in groupby(messages, key=itemgetter("role")):
        turn = list(run)
        if role in _JOINED:
            turn = [{**turn[0], "content": "\n\n".join(each["content"] for each in turn)}]
        turns += turn
    return turns
