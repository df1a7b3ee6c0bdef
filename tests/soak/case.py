"""Cases: requests, and what is right for their answers, as far as that is cheap to know; bad ones deserve an error."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.soak.reply import ParsedReply, Wrong
from tests.soak.server import MAX_BODY_BYTES, MAX_SEQ_LEN

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
Check = Callable[[ParsedReply], None]
"""Raises `Wrong` if a complete reply is not right."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Holds what is right for a generated answer: what `check` says."""

    check: Check
    is_stream: bool


@dataclass(frozen=True, slots=True)
class JsonAnswer:
    """Holds what is right for JSON of another kind: `check` is given the parsed body."""

    check: Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Holds what is right for a bad request: this status, and in the error this `param`."""

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


def user(text: str) -> list[dict[str, str]]:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


# Greedy answers of the bundled model; they must not change whatever else is computed beside them.
KNOWN = {
    "What is 17 + 25?": "17 + 25 = 42.",
    "What is 80 - 33?": "80 - 33 = 47.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
}
PLACES = ["Rome", "Oslo", "Lima"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": PLACES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
WHERE = {"messages": user("Where?")}


def generation(
    rng: Random, kind: str, path: str, fields: dict[str, Any], check: Check, is_stream: bool | None = None
) -> Case:
    """A good request for text; whether it streams, and reports its usage, is drawn unless it is given."""
    prompt = fields.get("prompt", "")
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    num_choices = fields.get("n", 1) * (len(prompt) if is_list else 1)
    stream = rng.random() < 0.6 if is_stream is None else is_stream
    has_usage, body = not stream or path == RESPONSES or rng.random() < 0.5, dict(fields)
    if stream:
        body |= {"stream": True, **({"stream_options": {"include_usage": True}} if has_usage else {})}
    if path == RESPONSES:
        body.pop("stream_options", None)

    def check_all(reply: ParsedReply) -> None:
        reply.check_complete(num_choices)
        if has_usage != (reply.usage is not None):
            raise Wrong(f"usage {reply.usage}, but it was {'' if has_usage else 'not '}asked for")
        check(reply)

    return Case(kind, path, json.dumps(body).encode(), Generated(check_all, stream))


def texts_check(is_right: Callable[[str, bool], bool]) -> Check:
    """Every choice's text must be right; the second argument tells whether it came to an end by itself."""

    def check(reply: ParsedReply) -> None:
        for index, choice in reply.choices.items():
            if not is_right(choice.text, choice.finish_reason == "stop"):
                raise Wrong(f"choice {index} ({choice.finish_reason}): {choice.text!r}")

    return check


def scored_check(text: str) -> Check:
    """This, with a score for each byte, which is a token here, and one for the end token or the stop string."""

    def check(reply: ParsedReply) -> None:
        for choice in reply.choices.values():
            if (choice.text, choice.num_scored) != (text, len(text) + 1):
                raise Wrong(f"{choice.text!r}, {choice.num_scored} tokens scored")

    return check


def known_chat(rng: Random) -> Case:
    """Right in every choice, every time."""
    question, answer = rng.choice(list(KNOWN.items()))
    fields = {"messages": user(question), "temperature": 0, "n": rng.choice([1, 1, 2])}
    return generation(rng, "known chat", CHAT, fields, texts_check(lambda text, _: text == answer))


def known_completion(rng: Random) -> Case:
    """Echo, several prompts, and a stop string that takes the line's end away."""
    prompt = rng.choice([["17 + 25 =", "17 + 25 ="], "17 + 25 ="])
    fields = {"prompt": prompt, "echo": True, "stop": "\n", "temperature": 0, "logprobs": rng.choice([0, 3])}
    return generation(rng, "known completion", COMPLETIONS, fields, scored_check("17 + 25 = 42"))


def story(rng: Random) -> Case:
    """Sampled, several at once, with whatever changes sampling."""
    drawn = {
        "n": [1, 1, 2, 3],
        "max_tokens": range(1, 201),
        "temperature": [0.5, 1.0, 1.5],
        "top_p": [0.5, 1.0],
        "top_k": [-1, 5],
        "min_p": [0.0, 0.1],
        "seed": range(10**6),
        "presence_penalty": [0.0, 1.0],
        "frequency_penalty": [0.0, 0.5],
        "repetition_penalty": [1.0, 1.2],
        "logit_bias": [{}, {"101": -5}],
    }
    messages = [{"role": "system", "content": "You are kind."}, *user("Tell me a story about a fox.")]
    fields = {name: rng.choice(values) for name, values in drawn.items()}
    return generation(rng, "story", CHAT, {"messages": messages, **fields}, texts_check(lambda *_: True))


def scored_chat(rng: Random) -> Case:
    fields = {"messages": user("What is 17 + 25?"), "temperature": 0, "logprobs": True, "top_logprobs": 20}
    return generation(rng, "scored chat", CHAT, fields, scored_check("17 + 25 = 42."))


def long_prompt(rng: Random) -> Case:
    """Longer than a step's budget, so that it is computed in pieces; sometimes as token ids."""
    text = "Once upon a time there was a fox. " * rng.randint(6, 13)
    prompt: Any = rng.choice([text, list(text.encode()), [list(text.encode()), [79, 110, 99, 101]]])
    fields = {"prompt": prompt, "max_tokens": rng.randint(1, 60), "stop": [" the ", "xyz"]}
    return generation(rng, "long prompt", COMPLETIONS, fields, texts_check(lambda text, _: " the " not in text))


def full_slot(rng: Random) -> Case:
    """To the very end of the slot, with much said about each token: what slow readers choke on."""
    fields = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 496, "logprobs": 20, "n": 2}
    is_right = texts_check(lambda _, has_stopped: not has_stopped)
    return generation(rng, "full slot", COMPLETIONS, fields, is_right, is_stream=True)


def only_prompt(rng: Random) -> Case:
    """Nothing new, but what there is, scored."""
    text = "The opposite of hot is"
    fields = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 1}
    return generation(rng, "only the prompt", COMPLETIONS, fields, texts_check(lambda answer, _: answer == text))


def regex(rng: Random) -> Case:
    pattern = rng.choice([r"[a-f]{3,8}-[0-9]{2}", r"(yes|no)(, (yes|no)){0,3}", r"\d{1,3}\.\d{1,3}"])
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 30, "n": rng.choice([1, 2])}
    fields |= {"guided_regex": pattern} if rng.random() < 0.5 else {"structured_outputs": {"regex": pattern}}
    is_right = texts_check(lambda text, ended: not ended or re.fullmatch(pattern, text) is not None)
    return generation(rng, "regex", COMPLETIONS, fields, is_right)


def choice(rng: Random) -> Case:
    """One of a few texts, or of more than some grammars can hold."""
    places = PLACES if rng.random() < 0.9 else [f"{place} {number}" for place in PLACES for number in range(1000)]
    fields = {**WHERE, "guided_choice": places, "max_tokens": 20, "temperature": 1.5}
    return generation(rng, "choice", CHAT, fields, texts_check(lambda text, _: text in places))


def json_schema(rng: Random) -> Case:
    response_format = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    fields = {**WHERE, "response_format": response_format, "n": rng.choice([1, 2]), "max_tokens": 60}
    is_right = texts_check(lambda text, ended: not ended or _is_weather(text))
    return generation(rng, "JSON schema", CHAT, fields, is_right)


def tool_call(rng: Random) -> Case:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
    tool_choice = rng.choice(["required", {"type": "function", "function": {"name": "weather"}}])
    fields = {**WHERE, "tools": tools, "tool_choice": tool_choice, "parallel_tool_calls": False, "max_tokens": 150}
    return generation(rng, "tool call", CHAT, fields, _check_call)


def response(rng: Random) -> Case:
    """The same answers, and the same calls, by `/v1/responses`."""
    if rng.random() < 0.5:
        question, answer = rng.choice(list(KNOWN.items()))
        is_right = texts_check(lambda text, _: text == answer)
        return generation(rng, "response", RESPONSES, {"input": question, "temperature": 0}, is_right)
    tool = {"type": "function", "name": "weather", "parameters": WEATHER}
    fields = {"input": user("Where?"), "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    return generation(rng, "response", RESPONSES, {**fields, "max_output_tokens": 150}, _check_call)


def tokenize(rng: Random) -> Case:
    text = "".join(rng.choices("abc äöü 中文 😀", k=rng.randint(1, 200)))

    def check(body: Any) -> None:
        if bytes(body["tokens"]).decode() != text or body["count"] != len(body["tokens"]):
            raise Wrong(f"{text!r} became {body}")

    return Case("tokenize", "/tokenize", json.dumps({"prompt": text}).encode(), JsonAnswer(check))


def models(rng: Random) -> Case:
    """JSON objects, as which all JSON is read."""
    path = rng.choice(["/v1/models", "/v1/models/bundled", "/version", "/openapi.json"])
    return Case("models", path, None, JsonAnswer(lambda _: None), method="GET")


def _check_call(reply: ParsedReply) -> None:
    """One call, with arguments that fit, unless the tokens ran out."""
    for answer in reply.choices.values():
        is_called = [name for name, arguments in answer.calls if _is_weather(arguments)] == ["weather"]
        if answer.finish_reason != "length" and not (is_called and answer.finish_reason == "tool_calls"):
            raise Wrong(f"{answer}")


def _is_weather(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"place", "days"} and value["place"] in PLACES and value["days"] in range(1, 10)


GOOD: dict[Callable[[Random], Case], int] = {
    known_chat: 6,
    known_completion: 4,
    story: 5,
    scored_chat: 2,
    long_prompt: 3,
    full_slot: 1,
    only_prompt: 1,
    regex: 2,
    choice: 2,
    json_schema: 2,
    tool_call: 2,
    response: 3,
    tokenize: 1,
    models: 1,
}
"""Ways to draw a good request, and how often each is taken."""


def bad(path: str, body: Any, param: str | None = None, status: int = 400, **others: Any) -> Case:
    raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    return Case("", path, raw, Refusal(status, param), **others)


HELLO, TOOL = {"messages": user("Hello!")}, {"type": "function", "function": {"name": "g"}}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}]
_UNNAMED = [{"type": "function", "function": {"name": "no name!"}}]
_WRONG_FIELDS: list[dict[str, Any]] = [
    *({"temprature": 1}, {"max_tokens": "many"}, {"max_tokens": MAX_SEQ_LEN * 2}, {"n": 1.5}, {"n": 129}, {"top_p": 0}),
    *({"temperature": -1}, {"stop": [""]}, {"logit_bias": {"99999": 1}}, {"stream_options": {}}, {"priority": 2**31}),
    *({"timeout": 0}, {"cache_salt": ""}, {"guided_regex": "("}, {"guided_grammar": "start: nothing"}),
    *({"guided_json": {"type": "strin"}}, {"guided_json": {"$ref": "#/nowhere"}}, {"guided_choice": []}),
    {"guided_regex": "a", "guided_choice": ["b"]},
]  # the error must name the last one
_WRONG_PROMPTS: list[Any] = ["", [], [[]], ["a", ""], [1, "a"], [99_999], [-1], 3, None, {}, [65] * 600, "a" * 9000]
_WRONG_MESSAGES = [[], [{"role": "user"}], [{"role": "god", "content": "a"}], "hello", user("a" * 2000)]
_NO_JSON = [b"", b"{", b'{"prompt": "a"', b"\xff\xfe", b"null", b"[]", b"[" * 50_000, b'{"prompt": "\\ud8"}']
BAD: dict[str, list[Case]] = {
    "wrong field": [  # a streaming request is refused as a whole one is: with a status
        bad(path, {**prompt, **fields, **stream}, list(fields)[-1])
        for path, prompt in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "Hello"}))
        for fields in _WRONG_FIELDS
        for stream in ({}, {"stream": True})
        if not (stream and "stream_options" in fields)
    ],
    "wrong prompt": [bad(COMPLETIONS, {"prompt": prompt}, "prompt") for prompt in _WRONG_PROMPTS],
    "wrong messages": [bad(CHAT, {"messages": messages}, "messages") for messages in _WRONG_MESSAGES],
    "wrong tools": [
        bad(CHAT, {**HELLO, "tools": _TOOLS, "tool_choice": "required"}, "tools"),
        bad(CHAT, {**HELLO, "tools": _TOOLS, "tool_choice": TOOL}, "tool_choice"),
        bad(CHAT, {**HELLO, "tool_choice": "required"}, "tool_choice"),
        bad(CHAT, {**HELLO, "tools": _UNNAMED}, "tools"),
    ],
    "wrong response": [
        bad(RESPONSES, {"input": "Hello!", name: value}, name)
        for name, value in {"max_output_tokens": 0, "previous_response_id": "resp_1", "n": 2}.items()
    ],
    "no JSON": [bad(path, body) for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize") for body in _NO_JSON],
    "wrong encoding": [
        bad(COMPLETIONS, b"neither", headers={"Content-Encoding": encoding}) for encoding in ("gzip", "deflate")
    ],
    "huge body": [
        bad(path, b"a" * (MAX_BODY_BYTES + excess), status=413)
        for path in (CHAT, COMPLETIONS)
        for excess in (1, 1000, 300_000)
    ],
    "more than ever fits": [
        bad(COMPLETIONS, {"prompt": ["a"] * 17}, "prompt"),
        bad(COMPLETIONS, {"prompt": "a", "n": 17}, "n"),
    ],
    "other model": [
        bad("/v1/models/gpt", None, "model", 404, method="GET"),
        bad(CHAT, {**HELLO, "model": "gpt"}, "model", 404),
    ],
    "nowhere": [
        *(bad(path, {}, status=404) for path in ("/v2", "/v1", "/v1/chat", "/v1/images")),
        *(bad(path, None, None, 405, method=method) for path in (CHAT, COMPLETIONS) for method in ("GET", "DELETE")),
    ],
}


def bad_case(rng: Random, kind: str | None = None) -> Case:
    """Makes a bad case of that kind, or of a kind that is drawn."""
    kind = kind or rng.choices(list(BAD), [4, 2, *[1] * (len(BAD) - 2)])[0]
    return replace(rng.choice(BAD[kind]), kind=kind)
