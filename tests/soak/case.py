"""A case: one request, and what is right for an answer to it."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.soak.reply import ParsedReply, Wrong

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"

Check = Callable[[ParsedReply], None]
"""Raises `Wrong` if a complete reply is not right."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What is right for a generated answer: this many choices, and what `check` says."""

    num_choices: int
    check: Check
    is_stream: bool


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """What is right for JSON of another kind: `check` is given the parsed body."""

    check: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is right for a bad request: this status, and in the error this `param`."""

    status: int
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One request and its right answer. `body` is sent as it is; None: none is sent."""

    kind: str
    path: str
    body: bytes | None
    right: Generated | JsonAnswer | Refusal
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)


def generation(
    rng: Random, kind: str, path: str, fields: dict[str, Any], check: Check, is_stream: bool | None = None
) -> Case:
    """A good request for text; whether it streams, and reports its usage, is drawn unless it is given."""
    prompt = fields.get("prompt", "")
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    num_choices = fields.get("n", 1) * (len(prompt) if is_list else 1)
    stream = rng.random() < 0.6 if is_stream is None else is_stream
    body = dict(fields)
    has_usage = not stream or path == RESPONSES
    if stream:
        body["stream"] = True
    if stream and path != RESPONSES:
        has_usage = rng.random() < 0.5
        body |= {"stream_options": {"include_usage": True}} if has_usage else {}

    def check_all(reply: ParsedReply) -> None:
        reply.check_complete(num_choices)
        if has_usage != (reply.usage is not None):
            raise Wrong(f"usage {reply.usage}, but it was {'' if has_usage else 'not '}asked for")
        check(reply)

    return Case(kind, path, json.dumps(body).encode(), Generated(num_choices, check_all, stream))


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def texts_check(is_right: Callable[[str, bool], bool]) -> Check:
    """Every choice's text must be right; the second argument tells whether it came to an end by itself."""

    def check(reply: ParsedReply) -> None:
        for index, choice in reply.choices.items():
            if not is_right(choice.text, choice.finish_reason == "stop"):
                raise Wrong(f"choice {index} ({choice.finish_reason}): {choice.text!r}")

    return check


def anything(_: ParsedReply) -> None:
    """For sampled text: whatever it says."""


Draw = Callable[[Random], Case]
"""Draws one request of a kind."""
