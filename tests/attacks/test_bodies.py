"""Bodies made to be costly: counts, texts, lists, nesting, and every field of every endpoint filled to the limit."""

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import httpx
import pytest

from tests.attacks.attacker import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    MAX_BODY,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Attacker,
    Shot,
    post,
)
from tests.attacks.harness import Attack, Target, each_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

HELLO = {"role": "user", "content": "Hello!"}
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HELLO], "max_tokens": 1},
    COMPLETIONS: {"prompt": "Hello!", "max_tokens": 1},
    RESPONSES: {"input": "Hello!", "max_output_tokens": 16},
    MESSAGES: {"messages": [HELLO], "max_tokens": 1},
    COUNT_TOKENS: {"messages": [HELLO]},
    TOKENIZE: {"prompt": "Hello!"},
    DETOKENIZE: {"tokens": [72, 105]},
}
FILLING = MAX_BODY - 2000
MOST_VALUES = 2**18 - 1000  # what a body may hold, in numbers; a list counts for 4, a name for 8, an object for 4
LONG = {"max_tokens": 1900, "ignore_eos": True}
REFUSED = frozenset({400, 413, 422, 429, 503})
_TOKEN_A = 97  # the bundled tokenizer's tokens are bytes


def repeated(piece: str, begin: str = "[", end: str = "]", size: int = FILLING) -> bytes:
    """JSON that repeats a piece, which ends in a comma in lists, up to a size."""
    text = (begin + piece * ((size - len(begin) - len(end)) // len(piece))).removesuffix(",") + end
    return text.encode()


def many_keys(size: int = FILLING) -> bytes:
    return ("{" + ",".join(f'"{number}":"a"' for number in range(size // 13)) + "}").encode()


FILLERS: dict[str, Callable[[], bytes]] = {
    "ones": partial(repeated, "1,"),
    "texts": partial(repeated, '"a",'),
    "objects": partial(repeated, "{},"),
    "lists of ones": partial(repeated, "[1],"),
    "keys": many_keys,
    "one key again and again": partial(repeated, '"a":"a",', "{", "}"),
    "text": partial(repeated, "a", '"', '"'),
    "escapes": partial(repeated, "\\u0000", '"', '"'),
    "lone surrogates": partial(repeated, "\\ud800", '"', '"'),
    "wide characters": partial(repeated, "\\ud83d\\ude00", '"', '"'),
    "digits": partial(repeated, "1", "", ""),
    "nesting": lambda: b"[" * (FILLING // 2) + b"]" * (FILLING // 2),
    "nested objects": lambda: b'{"a":' * (FILLING // 6) + b"1" + b"}" * (FILLING // 6),
    # What is weighed and found light enough; most of the others are refused by their weight, whatever the field.
    "light ones": partial(repeated, "1,", size=2 * MOST_VALUES),
    "light texts": partial(repeated, '"a",', size=4 * MOST_VALUES),
    "light objects": partial(repeated, "{},", size=3 * MOST_VALUES // 5),
    "light lists of ones": partial(repeated, "[1],", size=4 * MOST_VALUES // 5),
    "light keys": partial(many_keys, 13 * MOST_VALUES // 9),
}


@cache
def filling(name: str) -> bytes:
    """Made once, so that the attacker's own work takes no processor from the server."""
    return FILLERS[name]()


def filled(path: str, raw: bytes, *where: str | int, base: dict[str, Any] | None = None) -> bytes:
    """The endpoint's plain body, or `base`, with raw JSON at a place: `filled(CHAT, raw, "messages", 0, "content")`."""
    mark = "\0here\0"
    body: Any = json.loads(json.dumps(BASES[path] if base is None else base))
    node = body
    for step in where[:-1]:
        node = node[step]
    node[where[-1]] = mark
    if where[0] == "messages" and path == TOKENIZE:
        body.pop("prompt", None)
    begin, end = json.dumps(body).encode().split(json.dumps(mark).encode())
    return begin + raw + end


def fill(path: str, filler: str, *where: str | int, **options: Any) -> Shot:
    base = options.pop("base", None)
    label = f"{filler} in {'.'.join(map(str, where))}"
    return Shot(path, lambda: filled(path, filling(filler), *where, base=base), label, **options)


# Counts


def count_shots() -> Iterator[Shot]:
    for path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES):
        names = ("n", "max_tokens", "min_tokens", "max_completion_tokens", "max_output_tokens", "logprobs", "top_k")
        for name in (*names, "top_logprobs", "best_of", "seed", "priority", "truncate_prompt_tokens", "timeout"):
            for number in (10**8, 10**30, -(10**30), 10**4000):
                yield post(path, {**BASES[path], name: number}, f"{name} of {len(str(number))} digits")


def prompts_shots() -> Iterator[Shot]:
    """They are counted before they are prepared."""
    for prompt, n in ((["a"] * 100_000, 128), ([[97]] * 1_000_000, 128), (["a"] * 1025, 2), ([97] * 3_000_000, 1)):
        yield post(COMPLETIONS, {"prompt": prompt, "n": n}, f"{len(prompt)} prompts or tokens", allowed=REFUSED)


COUNTED = [post(path, {**BASES[path], "n": 10**8}, allowed=frozenset({400})) for path in (CHAT, COMPLETIONS, RESPONSES)]


# Rows that are costly in every step


def rows_of(n: int = 128, **fields: Any) -> Shot:
    body = {"prompt": "a", "n": n, "logit_bias": {str(_TOKEN_A): 100}, **LONG, **fields}
    return post(COMPLETIONS, body, ", ".join(fields) or "n", leaves_after=2.0)


# The first one holds back a thousand characters; the others are compared with ever shorter ends of them, in vain.
STOPS = ["a" * 1023 + "b", *("b" + chr(34 + number) + "a" * 1022 for number in range(63))]

COSTLY_ROWS = {
    "none": rows_of(),
    "stop strings": rows_of(stop=STOPS),
    "stop strings, streamed": rows_of(stop=STOPS, stream=True),
    "stop strings that all match": rows_of(stop=["a" * (1000 - number) + "b" for number in range(64)]),
    "stop tokens": rows_of(stop_token_ids=list(range(100, 261)) * 6),
    "biases": rows_of(logit_bias={str(token): 1.0 for token in range(256)}, temperature=1.0, top_k=50, top_p=0.9),
    "bad words": rows_of(bad_words=["a" * (1000 - number % 900) + chr(98 + number % 20) for number in range(1024)]),
    "repetition": rows_of(repetition_detection={"max_pattern_size": 1024, "min_count": 1024}),
    "penalties": rows_of(presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=1.5, top_k=5, min_p=0.01),
    "logprobs, streamed": rows_of(logprobs=5, stream=True),
}


BODY = {"messages": [HELLO], "n": 128, "max_tokens": 40, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
LARGE_REPLY = post(CHAT, BODY, "n = 128 with 20 logprobs", allowed=frozenset({200}))


# Bodies at the limit, in the places where issues were found

ENTRANCES = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES, "tokens": DETOKENIZE}
READ = [name for name in FILLERS if "light" in name] + ["text", "escapes", "wide characters", "digits"]

LARGE_BODIES: dict[str, list[Shot]] = {
    **{field: [fill(path, filler, field) for filler in FILLERS] for field, path in ENTRANCES.items()},
    **{field: [fill(CHAT, filler, field) for filler in READ] for field in ("stop", "tools", "metadata", "logit_bias")},
}


TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"messages": [HELLO, {"role": "assistant", "tool_calls": [CALL]}], "max_tokens": 1}
WITH_TOOL = {"messages": [HELLO], "tools": [TOOL], "max_tokens": 1}
WITH_PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1}
WITH_SCHEMA = {
    "messages": [HELLO],
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
    "max_tokens": 1,
}
INPUT_ITEMS = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 16}

MANY_BLOCKS = repeated('{"type":"text","text":"' + "a" * 850 + '"},')  # about as many as a body may hold

DEEP_PLACES: list[Shot] = [
    *(fill(CHAT, filler, "messages", 0, "content") for filler in ("text", "escapes", "wide characters", "nesting")),
    fill(CHAT, "text", "messages", 0, "name"),
    *(fill(CHAT, filler, "messages", 0, "content", base=WITH_PARTS) for filler in ("ones", "objects", "texts")),
    fill(CHAT, "text", "messages", 0, "content", 0, "text", base=WITH_PARTS),
    fill(CHAT, "text", "messages", 1, "tool_calls", 0, "function", "arguments", base=CALLING),
    fill(CHAT, "ones", "messages", 1, "tool_calls", base=CALLING),
    fill(CHAT, "keys", "tools", 0, "function", "parameters", base=WITH_TOOL),
    fill(CHAT, "nested objects", "tools", 0, "function", "parameters", base=WITH_TOOL),
    fill(CHAT, "text", "tools", 0, "function", "description", base=WITH_TOOL),
    fill(CHAT, "text", "tools", 0, "function", "name", base=WITH_TOOL),
    fill(CHAT, "keys", "response_format", "json_schema", "schema", base=WITH_SCHEMA),
    fill(CHAT, "text", "response_format", "json_schema", "name", base=WITH_SCHEMA),
    fill(CHAT, "keys", "chat_template_kwargs"),
    fill(CHAT, "text", "model"),
    fill(RESPONSES, "text", "input", 0, "content", 0, "text", base=INPUT_ITEMS),
    fill(RESPONSES, "ones", "input", 0, "content", base=INPUT_ITEMS),
    *(fill(MESSAGES, filler, "messages", 0, "content") for filler in ("text", "ones", "objects", "nesting")),
    Shot(MESSAGES, partial(filled, MESSAGES, MANY_BLOCKS, "messages", 0, "content"), "many blocks"),
    fill(MESSAGES, "text", "system"),
    fill(COUNT_TOKENS, "text", "messages", 0, "content"),
    fill(TOKENIZE, "text", "messages", 0, "content", base={"messages": [HELLO]}),
]


def deep(depth: int) -> str:
    return "[" * depth + "]" * depth


def deep_bodies() -> Iterator[Shot]:
    """Never a 503: they are refused for what they are."""
    return (replace(shot, allowed=frozenset({200, 400, 413, 422})) for shot in _deep_bodies())


def _deep_bodies() -> Iterator[Shot]:
    for path in BASES:
        for depth in (1_000, 100_000, FILLING):
            yield Shot(path, b"[" * depth, f"{depth} brackets")
    for field in ("metadata", "messages", "tools", "chat_template_kwargs", "prediction", "guided_json", "model"):
        for depth in (150, 1_000, 100_000):
            yield Shot(CHAT, filled(CHAT, deep(depth).encode(), field), f"{depth} deep in {field}")
    for depth in (900, 5_000, 100_000):
        call = {**CALL, "function": {"name": "look", "arguments": '{"a":' + deep(depth) + "}"}}
        messages = [HELLO, {"role": "assistant", "tool_calls": [call]}]
        yield post(CHAT, {**CALLING, "messages": messages}, f"arguments {depth} deep")
        yield post(CHAT, {**BASES[CHAT], "guided_json": deep(depth)}, f"schema {depth} deep")
        objects = '{"a":' * depth + "1" + "}" * depth
        yield post(CHAT, {**BASES[CHAT], "guided_json": objects}, f"schema of objects {depth} deep")
    for opening in ("<|", "{{", "{%", "<tool_call>", "\ufdfa", "a\u0300", "\x00"):
        messages = [{"role": "user", "content": opening * 100_000}]
        yield post(TOKENIZE, {"messages": messages}, f"100,000 {opening!r}")


ODD_BODIES = {
    "bytes that are no UTF-8": (b'{"prompt":"', b"\xff", b'"}'),
    "overlong UTF-8": (b'{"prompt":"', b"\xc0\xaf", b'"}'),
    "zeros": (b"", b"\0", b""),
    "blanks": (b"", b" ", b"{}"),
    "one key again and again": (b"{", b'"n":1,', b'"n":1}'),
    "an unknown key again and again": (b"{", b'"a":1,', b'"b":1}'),
    "an unfinished text": (b'{"prompt":"', b"a", b""),
    "backslashes": (b'{"prompt":"', b"\\\\", b'"}'),
    "exponents": (b'{"seed":[', b"1e999999999,", b"1]}"),
    "minus signs": (b"", b"-", b""),
}


def odd_bodies() -> Iterator[Shot]:
    for path in (CHAT, TOKENIZE):
        for label, (begin, piece, end) in ODD_BODIES.items():
            yield Shot(path, begin + piece * (FILLING // len(piece)) + end, label)
        yield Shot(path, many_keys(), "unknown keys, each once")


# Work off the loop


def tools_body(num_bytes: int) -> dict[str, Any]:
    """A tool whose schema has very many properties; templates print each of them."""
    properties = {f"property_{number}": {"type": "string", "description": "d"} for number in range(num_bytes // 60)}
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:100]}
    return {**WITH_TOOL, "tools": [{**TOOL, "function": {"name": "look", "parameters": parameters}}]}


async def tool_clients_leave(attacker: Attacker) -> None:
    body = json.dumps(tools_body(600_000)).encode()
    await attacker.fire_at_once(Shot(CHAT, body, "0.6 MB of tools", leaves_after=2.0) for _ in range(7))


async def tokenize_much(attacker: Attacker) -> None:
    for text in ("a", "a b", "\u4e2d", " ", "aA1!"):
        await attacker.fire(Shot(TOKENIZE, partial(filled, TOKENIZE, repeated(text, '"', '"'), "prompt"), repr(text)))
    tokens = repeated("97,")
    await attacker.fire_at_once([Shot(DETOKENIZE, filled(DETOKENIZE, tokens, "tokens"), "tokens")] * 3)


async def tokenize_and_leave(attacker: Attacker) -> None:
    body = filled(TOKENIZE, filling("text"), "prompt")
    await attacker.fire_at_once(Shot(TOKENIZE, body, "10 MB", leaves_after=1.0) for _ in range(7))


async def fill_the_queue_with_large_bodies(attacker: Attacker) -> None:
    labels = filled(COMPLETIONS, repeated("a", '{"a":"', '"}'), "metadata", base={**LONG, "prompt": "a", "n": 16})
    await attacker.fire_at_once(Shot(COMPLETIONS, labels, "10 MB that wait", leaves_after=6.0) for _ in range(40))


async def repeat_metadata_in_every_event(attacker: Attacker) -> None:
    labels = filled(RESPONSES, repeated("a", '{"a":"', '"}'), "metadata", base={**BASES[RESPONSES], "stream": True})
    await attacker.fire_at_once(Shot(RESPONSES, labels, "10 MB of metadata", leaves_after=3.0) for _ in range(4))


# All of it


ATTACKS: dict[str, Attack] = {
    "choices are counted before anything is made for them": COUNTED,
    "numbers of many digits": each_of(count_shots),
    "prompts are counted before they are prepared": each_of(prompts_shots),
    **{f"costly rows: {name}": [shot] for name, shot in COSTLY_ROWS.items()},
    "a large reply": [LARGE_REPLY],
    **{f"large values of a wrong shape in {field}": shots for field, shots in LARGE_BODIES.items()},
    "large values deep in a body": DEEP_PLACES,
    "deep nesting is a 400 wherever it is": each_of(deep_bodies),
    "what is no JSON or odd JSON": each_of(odd_bodies),
    "tools, and leaves": tool_clients_leave,
    "tokenize": tokenize_much,
    "tokenize, and leaves": tokenize_and_leave,
    "bodies that wait": fill_the_queue_with_large_bodies,
    "metadata in every event": repeat_metadata_in_every_event,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_body_that_is_costly_costs_nobody_else_and_nothing_once_its_client_left(target: Target, name: str) -> None:
    target.withstand(ATTACKS[name], linger_s=0.5 if callable(ATTACKS[name]) else 0.3)


# Every field of every endpoint


def described_fields(target: Target) -> dict[str, dict[str, str]]:
    """The fields of each endpoint that takes a body, and which JSON type the description names first for each."""
    description = httpx.get(f"{target.process.url}/openapi.json").json()
    schemas = description["components"]["schemas"]
    fields: dict[str, dict[str, str]] = {}
    for path, operations in description["paths"].items():
        if "post" in operations and "requestBody" in operations["post"]:
            reference = operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            properties = schemas[reference.rpartition("/")[2]]["properties"]
            fields[path] = {name: type_of(schema, schemas) for name, schema in properties.items()}
    return fields


def type_of(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """The type that takes most: a list before an object before a text before anything else."""
    if "$ref" in schema:
        return type_of(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    kinds = [type_of(each, schemas) for each in schema.get("anyOf", schema.get("oneOf", []))]
    kinds.append(schema.get("type", "other"))
    return next((kind for kind in ("array", "object", "string") if kind in kinds), "other")


FITTING = {"array": "light texts", "object": "light keys", "string": "text", "other": "digits"}


@pytest.mark.parametrize("path", list(BASES))
def test_every_field_filled_to_the_limit_is_answered_and_holds_up_nobody(target: Target, path: str) -> None:
    fields = described_fields(target)
    assert set(fields) >= set(BASES)
    before = itertools.takewhile(lambda each: each != path, BASES)  # a field is declared once for all that have it
    known = set().union(*(fields[each] for each in before))
    shots = [fill(path, FITTING[kind], name) for name, kind in fields[path].items()]
    shots += [fill(path, "light ones", name) for name in fields[path] if name not in known]
    target.withstand(shots)


def test_no_endpoint_with_a_body_is_left_out(target: Target) -> None:
    others, fillers = described_fields(target).keys() - BASES.keys(), ("ones", "keys", "text", "nesting")
    target.withstand([Shot(path, partial(filling, filler), filler) for path in others for filler in fillers])
