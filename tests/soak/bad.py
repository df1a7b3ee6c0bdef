"""Bad requests: each kind draws one, and knows the error that it deserves."""

import json
from random import Random
from typing import Any

from tests.soak.case import CHAT, COMPLETIONS, RESPONSES, Case, Draw, Refusal, user
from tests.soak.server import MAX_BODY_BYTES, MAX_SEQ_LEN

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
