"""Schemas prepared for the grammar engine. The judge of what is written under them is jsonschema-rs."""

import json
from random import Random
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from llguidance import LLMatcher

from chairlift.errors import InvalidGrammar
from chairlift.schemas import BOUNDS, KNOWN_FORMATS, ONE_OF, Schema, make_enforceable
from tests.api.answers.calls import byte_tokenizer, generate

TEXT: Schema = {"type": "string"}
YES: Schema = {"const": True}
STYLE: Any = {"whitespace_flexible": False, "coerce_one_of": True}


def prepared(schema: Schema, closes_objects: bool = True) -> Schema:
    return make_enforceable(schema, closes_objects).schema


def left_out(schema: Schema) -> tuple[str, ...]:
    return make_enforceable(schema, closes_objects=True).left_out


def problem_of(schema: Schema) -> str:
    """The grammar engine's own complaint about a schema; empty if it can read it."""
    return LLMatcher.validate_grammar(source_of(schema), byte_tokenizer())


def source_of(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=STYLE)


def test_a_format_is_an_annotation_and_known_ones_are_enforced() -> None:
    kept = {name: prepared({**TEXT, "format": name}) for name in ("uuid", "json-pointer", "int64", "unknown")}
    assert kept == {"uuid": {**TEXT, "format": "uuid"}, "json-pointer": TEXT, "int64": TEXT, "unknown": TEXT}
    assert [name for name in KNOWN_FORMATS if problem_of({**TEXT, "format": name})] == []


def test_a_property_called_format_is_none() -> None:
    schema = {"type": "object", "properties": {"format": TEXT, "oneOf": TEXT}, "additionalProperties": True}
    assert prepared(schema) == schema
    assert prepared({"enum": [{"format": "x"}]}) == {"enum": [{"format": "x"}]}


@pytest.mark.parametrize(
    ("written", "enforced"),
    [
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
        ({**TEXT, "maxLength": 2**63 - 1}, TEXT),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 3}),
        ({"type": "integer", "maximum": 3, "exclusiveMaximum": False}, {"type": "integer", "maximum": 3}),
        ({"$schema": "https://spec.openapis.org/oas/3.1/dialect/base", **TEXT}, TEXT),
        ({"type": "integer", "minimum": -(2**63)}, {"type": "integer", "minimum": 1024 - 2**63}),
        ({"type": ["integer", "null"], "maximum": 2**64 - 1}, {"type": ["integer", "null"], "maximum": 2**63 - 1}),
    ],
)
def test_what_asks_for_next_to_nothing_is_written_in_another_way(written: Schema, enforced: Schema) -> None:
    for schema, expected in ((written, enforced), ({"items": written}, {"items": enforced})):
        result = make_enforceable(schema, closes_objects=True)
        if "$schema" not in written or schema is written:
            assert (result.schema, result.left_out) == (expected, ())
            assert problem_of(result.schema) == ""


@pytest.mark.parametrize("limit", [3.4028234663852886e38, 1.7976931348623157e308, 10**30])
def test_bounds_of_numbers_that_cannot_be_written_are_left_out(limit: float) -> None:
    result = make_enforceable({"type": "number", "minimum": -limit, "maximum": limit}, closes_objects=True)
    assert (result.schema, result.left_out) == ({"type": "number"}, (BOUNDS,))


@pytest.mark.parametrize("schema", [{"type": "number", "minimum": 1e19}, {"type": "integer", "maximum": -(2**70)}])
def test_a_bound_that_excludes_much_and_cannot_be_written_is_refused(schema: Schema) -> None:
    with pytest.raises(InvalidGrammar, match="beyond 2\\^63; leave it out"):
        prepared(schema)


def tagged(kind: object, name: str = "kind", required: bool = True) -> Schema:
    """The schema of an object with a tag."""
    return {"type": "object", "properties": {name: {"const": kind}}, "required": [name] if required else []}


@pytest.mark.parametrize(
    ("schemas", "is_exact"),
    [
        ([TEXT, {"type": "integer"}], True),
        ([{"type": "number"}, {"type": "integer"}], False),
        ([{"const": 1}, {"enum": [2, 3]}], True),
        ([{"const": 1}, {"enum": [1.0]}], False),
        ([tagged("cat"), tagged("dog"), tagged("cow")], True),
        ([tagged("cat"), tagged("dog", required=False)], True),
        ([tagged("cat", required=False), tagged("dog", required=False)], False),
        ([tagged("cat"), tagged("cat")], False),
        ([tagged("cat"), tagged("dog", "name")], False),
        ([{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], True),
        ([TEXT, True], False),
        ([{"const": number} for number in range(100)], True),
        ([{"const": number} for number in range(200)], False),  # too many to be compared
    ],
)
def test_one_of_is_told_unless_no_value_can_fit_two(schemas: list[Any], is_exact: bool) -> None:
    schema = {"items": {"oneOf": schemas}, "$defs": {"cat": tagged("cat"), "dog": tagged("dog")}}
    assert left_out(schema) == (() if is_exact else (ONE_OF,))
    assert problem_of(prepared(schema)) == ""


A: Schema = {"type": "object", "properties": {"a": YES}}
CLOSED: Schema = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("written", "closed"),
    [
        (A, CLOSED),
        ({"items": A}, {"items": CLOSED}),
        ({"properties": {"b": A}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [A], "title": "x"}, {"allOf": [CLOSED], "title": "x"}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}}),
    ],
)
def test_objects_have_the_properties_that_are_named(written: Schema, closed: Schema) -> None:
    assert prepared(written) == closed
    assert prepared(written, closes_objects=False) == written
    assert prepared(closed) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "properties": {}},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {}},
        {**A, "required": ["b"]},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "minProperties": 1},
        {**A, "unevaluatedProperties": False},
        {**A, "dependentRequired": {"a": ["b"]}},
        {**A, "const": {"b": 1}},
        {"allOf": [A, {"properties": {"b": YES}}]},
        {**A, "anyOf": [{"required": ["b"]}, {}]},
        {"anyOf": [A, {}], "required": ["b"]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"required": ["b"]}], "$defs": {"A": A}},
        {"items": {"$ref": "#/$defs/A"}, "contains": {"allOf": [{"$ref": "#/$defs/A"}, {}]}, "$defs": {"A": A}},
    ],
)
def test_an_object_stays_open_where_others_may_need_more_keys(schema: Schema) -> None:
    assert prepared(schema) == schema


def objects(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    names = st.sampled_from("abc")
    some = {
        "required": st.lists(names, unique=True),
        "minProperties": st.integers(0, 1),
        "additionalProperties": st.one_of(st.booleans(), values),
    }
    return st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, values, max_size=2)}, optional=some
    )


def unions(values: st.SearchStrategy[Schema]) -> st.SearchStrategy[Schema]:
    several = st.lists(values, min_size=1, max_size=2)
    alone = st.tuples(st.sampled_from(["anyOf", "allOf"]), several).map(lambda pair: {pair[0]: pair[1]})
    return alone | st.tuples(objects(values), alone).map(lambda pair: {**pair[0], **pair[1]})


LEAVES = st.sampled_from([YES, {"enum": ["x", 7]}, {"type": "integer"}, {"$ref": "#/$defs/A"}, {"type": "object"}])
SCHEMAS = st.recursive(LEAVES, lambda values: objects(values) | unions(values), max_leaves=6)


@given(SCHEMAS, st.sampled_from([A, {**A, "required": ["b"]}]), st.booleans(), st.randoms(use_true_random=False))
def test_what_is_written_fits_the_schema(schema: Schema, shared: Schema, closes_objects: bool, random: Random) -> None:
    whole = {**schema, "$defs": {"A": shared}}
    assume(not problem_of(prepared(whole, closes_objects=False)))
    enforced = prepared(whole, closes_objects)
    assert problem_of(enforced) == ""
    text = generate(source_of(enforced), random, byte_tokenizer(), budget=200)
    assert jsonschema_rs.validator_for(whole).is_valid(json.loads(text)), text
