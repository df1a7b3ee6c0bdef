"""Grammars made to be costly: to compile, to keep, and to compute masks for."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from tests.attacks.attacker import CHAT, COMPLETIONS, RESPONSES, Shot, post
from tests.attacks.harness import Target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

SHORT = {"max_tokens": 4}
FINE_OR_REFUSED = frozenset({200, 400, 429, 503})


def chained_references(length: int) -> dict[str, Any]:
    names = [f"d{number}" for number in range(length)]
    rules = {name: {"$ref": f"#/$defs/{after}"} for name, after in pairwise(names)}
    return {"$defs": {**rules, names[-1]: {"type": "string"}}, "$ref": "#/$defs/d0"}


def chained_properties(length: int) -> dict[str, Any]:
    names = [f"d{number}" for number in range(length)]
    rules = {
        name: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{after}"}}, "required": ["a"]}
        for name, after in pairwise(names)
    }
    return {"$defs": {**rules, names[-1]: {"type": "string"}}, "$ref": "#/$defs/d0"}


def doubling_references(length: int, word: str) -> dict[str, Any]:
    rules = {f"d{number}": {word: [{"$ref": f"#/$defs/d{number + 1}"}] * 2} for number in range(length)}
    return {"$defs": {**rules, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def chained_rules(length: int) -> str:
    rules = [f"r{number}: r{number + 1}" for number in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


def chained_terminals(length: int) -> str:
    terminals = [f"T{number}: T{number + 1}" for number in range(length)]
    return "\n".join(["start: T0", *terminals, f'T{length}: "a"'])


def many_terminals(length: int) -> str:
    names = [f"T{number}" for number in range(length)]
    return "\n".join(["start: " + " | ".join(names), *(f'{name}: "{name}"' for name in names)])


SCHEMAS: dict[str, dict[str, Any]] = {
    "2,500 chained references": chained_references(2_500),
    "1,200 chained properties": chained_properties(1_200),
    "30 doubling alternatives": doubling_references(30, "anyOf"),
    "30 doubling conjunctions": doubling_references(30, "allOf"),
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

REGEXES: dict[str, list[str]] = {
    "a? x 130,000": ["a?" * 130_000],
    "a? x 20,000": ["a?" * 20_000],
    "24 that are squared": [f"((a{{1000}}){{1000}}){{{n + 2}}}" + "b" * 40 for n in range(24)],
    "brackets": ["(" * 100_000 + "a" + ")" * 100_000],
    "many of everything": ["(.|a|b|.*){0,1000}" * 100],
    "alternatives of classes": ["(" + "|".join(f"\\p{{L}}{{{n}}}" for n in range(1, 300)) + ")"],
    "a conjunction": ["&".join(f"(.*a.{{{n}}})" for n in range(10, 40))],
    "a complement": ["~(.*a.{20}b)"],
}

GRAMMARS: dict[str, str] = {
    "a chain of 3,000 rules": chained_rules(3_000),
    "a chain of 10,000 terminals": chained_terminals(10_000),
    "10,000 terminals": many_terminals(10_000),
    "a rule that is itself": "start: start",
    "empty alternatives": "start: e*\ne: | e e |",
    "a rule a million times": 'start: "a"~1000000',
    "brackets": "start: " + "(" * 50_000 + '"a"' + ")" * 50_000,
    "doubling rules": "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)) + '\nr40: "a"',
    "a doubling terminal": "start: T0\n" + "\n".join(f"T{n}: T{n + 1} T{n + 1}" for n in range(25)) + '\nT25: "a"',
    "GBNF": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1}" for n in range(3_000)) + '\nr3000 ::= "a"',
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


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_compiled_or_refused_at_nobody_elses_cost(target: Target, name: str) -> None:
    target.withstand(lambda attacker: attacker.fire_all(schema_shots(SCHEMAS[name], name)))


@pytest.mark.parametrize("name", REGEXES)
def test_a_regular_expression_is_compiled_or_refused_at_nobody_elses_cost(target: Target, name: str) -> None:
    by_all_ways = len(REGEXES[name]) == 1
    shots = [shot for regex in REGEXES[name] for shot in list(text_shots("regex", regex, name))[: 1 + by_all_ways]]
    target.withstand(lambda attacker: attacker.fire_all(shots))


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_grammar_is_compiled_or_refused_at_nobody_elses_cost(target: Target, name: str) -> None:
    target.withstand(lambda attacker: attacker.fire_all(text_shots("grammar", GRAMMARS[name], name)))


def test_ten_thousand_long_choices_are_compiled_or_refused_at_nobody_elses_cost(target: Target) -> None:
    choices = [f"{number} " + "a" * 900 for number in range(10_000)]
    shot = post(COMPLETIONS, {"prompt": "a", **SHORT, "guided_choice": choices}, allowed=FINE_OR_REFUSED)
    target.withstand(lambda attacker: attacker.fire(shot))


def test_the_client_of_a_grammar_that_takes_for_ever_leaves_and_nothing_is_left_of_it(target: Target) -> None:
    bodies = [{"prompt": "a", **SHORT, "guided_regex": "a?" * 130_000 + "b" * number} for number in range(4)]
    shots = [post(COMPLETIONS, body, leaves_after=1.0) for body in bodies]
    target.withstand(lambda attacker: attacker.fire_at_once(shots), linger_s=3.0)


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


@pytest.mark.parametrize("name", SLOW_MASKS)
def test_a_mask_that_comes_late_costs_its_own_row_its_turn_and_no_other(target: Target, name: str) -> None:
    body = {"prompt": "a", "n": 4, "max_tokens": 1500, "logit_bias": {"97": 100}, **SLOW_MASKS[name]}
    shot = post(COMPLETIONS, body, name, leaves_after=5.0, allowed=FINE_OR_REFUSED)
    target.withstand(lambda attacker: attacker.fire(shot))


def test_honest_structures_are_still_served_after_all_of_this(target: Target) -> None:
    schema = {
        "type": "object",
        "properties": {f"field_{n}": {"type": "string", "maxLength": 3} for n in range(40)},
        "required": ["field_1"],
    }
    shots = [
        post(COMPLETIONS, {"prompt": "a", "max_tokens": 50, "guided_json": schema}, allowed=frozenset({200})),
        post(COMPLETIONS, {"prompt": "a", "guided_regex": "[a-z]{3,20}"}, allowed=frozenset({200})),
        post(COMPLETIONS, {"prompt": "a", "guided_choice": ["yes", "no"] * 50}, allowed=frozenset({200})),
    ]
    target.withstand(lambda attacker: attacker.fire_all(shots))
