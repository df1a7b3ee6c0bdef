"""A case: one request, and what is right for an answer to it; and bad requests, with the errors that they deserve."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.soak.reply import ParsedReply, Wrong
from tests.soak.server import MAX_BODY_BYTES, MAX_SEQ_LEN

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
Check = Callable[[ParsedReply], None]
"""Raises `Wrong` if a complete reply is not right."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What is right for a generated answer: what `check` says."""

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

    return Case(kind, path, json.dumps(body).encode(), Generated(check_all, stream))


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


# --- bad requests


HELLO = user("Hello!")
# Fields beside a good prompt, and the field that the error must name.
_PROMPTS: list[tuple[str, dict[str, Any]]] = [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "Hello"})]

_WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": MAX_SEQ_LEN * 2}, "max_tokens"),
    ({"n": 1.5}, "n"),
    ({"n": 129}, "n"),
    ({"top_p": 0}, "top_p"),
    ({"temperature": -1}, "temperature"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stream_options": {}}, "stream_options"),
    ({"priority": 2**31}, "priority"),
    ({"timeout": 0}, "timeout"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"guided_json": {"type": "strin"}}, "guided_json"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
]

_WRONG_PROMPTS: list[Any] = ["", [], [[]], ["a", ""], [1, "a"], [99_999], [-1], 3, None, {}, [65] * 600, "a" * 9000]
_NO_JSON = [b"", b"{", b'{"prompt": "a"', b"\xff\xfe", b"null", b"[]", b"[" * 50_000, b'{"prompt": "\\ud800"}']


def wrong_field(rng: Random) -> Case:
    """A streaming request is refused as a whole one is: with a status."""
    fields, param = rng.choice(_WRONG_FIELDS)
    stream = {"stream": True} if rng.random() < 0.5 and "stream_options" not in fields else {}
    path, prompt = rng.choice(_PROMPTS)
    return _bad("wrong field", path, {**prompt, **fields, **stream}, Refusal(400, param))


def wrong_prompt(rng: Random) -> Case:
    return _bad("wrong prompt", COMPLETIONS, {"prompt": rng.choice(_WRONG_PROMPTS)}, Refusal(400, "prompt"))


def wrong_messages(rng: Random) -> Case:
    messages: Any = rng.choice([[], [{"role": "user"}], [{"role": "god", "content": "a"}], "hello", user("a" * 2000)])
    return _bad("wrong messages", CHAT, {"messages": messages}, Refusal(400, "messages"))


def wrong_response(rng: Random) -> Case:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"n": 2}, "n"),
    ]
    fields, param = rng.choice(wrong)
    return _bad("wrong response", RESPONSES, {"input": "Hello!", **fields}, Refusal(400, param))


def wrong_tools(rng: Random) -> Case:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}
    named = {"type": "function", "function": {"name": "g"}}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": [tool], "tool_choice": "required"}, "tools"),
        ({"tools": [tool], "tool_choice": named}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "no name!"}}]}, "tools"),
    ]
    fields, param = rng.choice(wrong)
    return _bad("wrong tools", CHAT, {"messages": HELLO, **fields}, Refusal(400, param))


def no_json(rng: Random) -> Case:
    path = rng.choice([CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
    return Case("no JSON", path, rng.choice(_NO_JSON), Refusal(400))


def wrong_encoding(rng: Random) -> Case:
    headers = {"Content-Encoding": rng.choice(["gzip", "deflate"])}
    return Case("wrong encoding", COMPLETIONS, b"neither", Refusal(400), headers=headers)


def huge_body(rng: Random) -> Case:
    size = MAX_BODY_BYTES + rng.choice([1, 1000, 300_000])
    return Case("huge body", rng.choice([CHAT, COMPLETIONS]), b"a" * size, Refusal(413))


def more_than_ever_fits(rng: Random) -> Case:
    wrong: list[tuple[dict[str, Any], str]] = [({"prompt": ["a"] * 17}, "prompt"), ({"prompt": "a", "n": 17}, "n")]
    fields, param = rng.choice(wrong)
    return _bad("more than ever fits", COMPLETIONS, fields, Refusal(400, param))


def other_model(rng: Random) -> Case:
    if rng.random() < 0.5:
        return Case("other model", "/v1/models/gpt", None, Refusal(404, "model"), method="GET")
    return _bad("other model", CHAT, {"messages": HELLO, "model": "gpt"}, Refusal(404, "model"))


def nowhere(rng: Random) -> Case:
    if rng.random() < 0.5:
        return _bad("nowhere", rng.choice(["/v2", "/v1", "/v1/chat", "/v1/embeddings"]), {}, Refusal(404))
    return Case("nowhere", rng.choice([CHAT, COMPLETIONS]), None, Refusal(405), method=rng.choice(["GET", "DELETE"]))


def _bad(kind: str, path: str, body: dict[str, Any], refusal: Refusal) -> Case:
    return Case(kind, path, json.dumps(body).encode(), refusal)


BAD: dict[Draw, int] = {
    wrong_field: 4,
    wrong_prompt: 2,
    wrong_messages: 1,
    wrong_tools: 1,
    wrong_response: 1,
    no_json: 1,
    wrong_encoding: 1,
    huge_body: 1,
    more_than_ever_fits: 1,
    other_model: 1,
    nowhere: 1,
}
"""Ways to draw a bad request, and how often each is taken."""
