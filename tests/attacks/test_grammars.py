"""Grammars made to be costly: to compile, to keep, and to compute masks for."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.attacks.attacker import CHAT, COMPLETIONS, RESPONSES, Shot, post
from tests.attacks.harness import Attack, Target, each_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SHORT = {"max_tokens": 4}
FINE_OR_REFUSED = frozenset({200, 400, 429, 503})


def chained(length: int, wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Each definition refers to the next one."""
    rules = {f"d{n}": wrap({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
    return {"$defs": {**rules, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chained_rules(letter: str, length: int, step: str = "{0}{2}", begin: str = "start: ", colon: str = ":") -> str:
    """A chain: each rule is made of the next one."""
    lines = [f"{letter}{n}{colon} " + step.format(letter, n, n + 1) for n in range(length)]
    return "\n".join([f"{begin}{letter}0", *lines, f'{letter}{length}{colon} "a"'])


def many_terminals(length: int) -> str:
    names = [f"T{number}" for number in range(length)]
    return "\n".join(["start: " + " | ".join(names), *(f'{name}: "{name}"' for name in names)])


SCHEMAS: dict[str, dict[str, Any]] = {
    "2,500 chained references": chained(2_500, lambda next_one: next_one),
    "1,200 chained properties": chained(
        1_200, lambda next_one: {"type": "object", "properties": {"a": next_one}, "required": ["a"]}
    ),
    "30 doubling alternatives": chained(30, lambda next_one: {"anyOf": [next_one] * 2}),
    "30 doubling conjunctions": chained(30, lambda next_one: {"allOf": [next_one] * 2}),
    "a reference to itself": {"$ref": "#"},
    "a reference in a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a billion items": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "a text of a billion": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9},
    "a pattern squared": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "a pattern of a?": {"type": "string", "pattern": "^" + "a?" * 20_000 + "$"},
    "20,000 optional properties": {
        "type": "object",
        "properties": {f"p{n}": {"type": "number"} for n in range(20_000)},
    },
    "100,000 words": {"enum": [f"word {n}" for n in range(100_000)]},
    "a tiny multiple": {"type": "number", "multipleOf": 1e-300},
    "a reference abroad": {"$ref": "http://127.0.0.1:1/schema.json"},
}

REGEXES: dict[str, str] = {
    "a? x 130,000": "a?" * 130_000,
    "a? x 20,000": "a?" * 20_000,
    "brackets": "(" * 100_000 + "a" + ")" * 100_000,
    "many of everything": "(.|a|b|.*){0,1000}" * 100,
    "alternatives of classes": "(" + "|".join(f"\\p{{L}}{{{n}}}" for n in range(1, 300)) + ")",
    "a conjunction": "&".join(f"(.*a.{{{n}}})" for n in range(10, 40)),
    "a complement": "~(.*a.{20}b)",
}

GRAMMARS: dict[str, str] = {
    "a chain of 3,000 rules": chained_rules("r", 3_000),
    "a chain of 10,000 terminals": chained_rules("T", 10_000),
    "10,000 terminals": many_terminals(10_000),
    "a rule that is itself": "start: start",
    "empty alternatives": "start: e*\ne: | e e |",
    "a rule a million times": 'start: "a"~1000000',
    "brackets": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "doubling rules": chained_rules("r", 40, "{0}{2} {0}{2}"),
    "a doubling terminal": chained_rules("T", 25, "{0}{2} {0}{2}"),
    "GBNF": chained_rules("r", 3_000, begin="root ::= ", colon=" ::="),
}


def schema_shots(schema: dict[str, Any], label: str) -> Iterator[Shot]:
    """By every way that a schema can come."""
    options: dict[str, Any] = {"label": label, "allowed": FINE_OR_REFUSED}
    messages = {"messages": [{"role": "user", "content": "Hello!"}], **SHORT}
    named = {"name": "s", "schema": schema}
    function = {"name": "look", "parameters": schema, "strict": True}
    yield post(CHAT, {**messages, "guided_json": schema}, **options)
    yield post(CHAT, {**messages, "response_format": {"type": "json_schema", "json_schema": named}}, **options)
    tools = [{"type": "function", "function": function}]
    yield post(CHAT, {**messages, "tools": tools, "tool_choice": "required"}, **options)
    yield post(CHAT, {**messages, "tools": tools}, **options)
    yield post(COMPLETIONS, {"prompt": "a", **SHORT, "structured_outputs": {"json": json.dumps(schema)}}, **options)
    response = {"input": "Hello!", "max_output_tokens": 16}
    yield post(RESPONSES, {**response, "text": {"format": {"type": "json_schema", **named}}}, **options)
    yield post(RESPONSES, {**response, "tools": [{"type": "function", **function}]}, **options)


def text_shots(kind: str, text: str, label: str) -> Iterator[Shot]:
    """By both ways that a regular expression or a grammar can come."""
    options: dict[str, Any] = {"label": label, "allowed": FINE_OR_REFUSED}
    yield post(COMPLETIONS, {"prompt": "a", **SHORT, f"guided_{kind}": text}, **options)
    messages = [{"role": "user", "content": "Hello!"}]
    yield post(CHAT, {"messages": messages, **SHORT, "n": 8, "structured_outputs": {kind: text}}, **options)


def squared_shots() -> Iterator[Shot]:
    for n in range(12):
        yield next(text_shots("regex", f"((a{{1000}}){{1000}}){{{n + 2}}}" + "b" * 40, "squared"))


def choices_shots() -> Iterator[Shot]:
    choices = [f"{number} " + "a" * 900 for number in range(10_000)]
    yield post(COMPLETIONS, {"prompt": "a", **SHORT, "guided_choice": choices}, allowed=FINE_OR_REFUSED)


# Masks. The rows go on for seconds, and the bystander's row is in the same batch.

AMBIGUOUS = 'start: s\ns: s s | "a"'  # a quarter of a second for the mask of the 800th token
VERY_AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "a" | "b"'
SLOW_MASKS: dict[str, dict[str, str]] = {
    "an ambiguous grammar": {"guided_grammar": AMBIGUOUS},
    "a very ambiguous grammar": {"guided_grammar": VERY_AMBIGUOUS},
    "empty words": {"guided_grammar": 'start: s\ns: s s | e "a" e | "a"\ne: | e e'},
    "a? x 20,000": {"guided_regex": "a?" * 20_000},
    "a long way back": {"guided_regex": "(.*a.{12})*[a-z ]*"},
}


def slow_masks(fields: dict[str, str], label: str) -> list[Shot]:
    body = {"prompt": "a", "n": 4, "max_tokens": 1500, "logit_bias": {"97": 100}, **fields}
    return [post(COMPLETIONS, body, label, leaves_after=3.0, allowed=FINE_OR_REFUSED)]


ATTACKS: dict[str, Attack] = {
    **{f"schema: {name}": each_of(partial(schema_shots, schema, name)) for name, schema in SCHEMAS.items()},
    **{f"regex: {name}": each_of(partial(text_shots, "regex", text, name)) for name, text in REGEXES.items()},
    "regex: 12 that are squared": each_of(squared_shots),
    **{f"grammar: {name}": each_of(partial(text_shots, "grammar", text, name)) for name, text in GRAMMARS.items()},
    "choices: ten thousand long ones": each_of(choices_shots),
    **{f"masks that come late: {name}": slow_masks(fields, name) for name, fields in SLOW_MASKS.items()},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_forces_a_structure_is_compiled_or_refused_and_obeyed_at_nobody_elses_cost(
    target: Target, name: str
) -> None:
    target.withstand(ATTACKS[name])


def test_the_client_of_a_grammar_that_takes_for_ever_leaves_and_nothing_is_left_of_it(target: Target) -> None:
    bodies = [{"prompt": "a", **SHORT, "guided_regex": "a?" * 130_000 + "b" * number} for number in range(4)]
    shots = [post(COMPLETIONS, body, leaves_after=1.0) for body in bodies]
    target.withstand(lambda attacker: attacker.fire_at_once(shots), linger_s=2.0)


def test_honest_structures_are_still_served_after_all_of_this(target: Target) -> None:
    properties = {f"field_{n}": {"type": "string", "maxLength": 3} for n in range(40)}
    schema = {"type": "object", "properties": properties, "required": ["field_1"]}
    fields = ({"guided_json": schema}, {"guided_regex": "[a-z]{3,20}"}, {"guided_choice": ["yes", "no"] * 50})
    bodies = [{"prompt": "a", "max_tokens": 50, **each} for each in fields]
    target.withstand([post(COMPLETIONS, body, allowed=frozenset({200})) for body in bodies])
