"""Prepares JSON Schemas for the grammar engine: writes what it cannot read in another way, and says what is left out.

- `format` is an annotation: one that the grammar engine does not know is dropped.
- `uniqueItems: false` asks for nothing and is dropped; so are lengths that no text can have.
- Bounds from 2^63 on cannot be written. An integer's lowest is moved by 1,024; others that exclude next to nothing (a
  float32's limits) are left out, and the rest is refused.
- `oneOf` is enforced as `anyOf`, which is the same where no value can fit two of its schemas.
- An object whose schema names its properties and does not mention `additionalProperties` gets no others if the caller
  wants that. What fits the closed schema also fits the open one, so a schema is only left open where closing it could
  leave nothing that fits: where other keys are required, or other schemas speak of the same object.

Schemas that nothing refers to are left as they are. The keywords: https://json-schema.org/draft/2020-12.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from chairlift.errors import InvalidGrammar

Schema = dict[str, Any]

KNOWN_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
"""The formats that are enforced."""

_LIMIT = 2**63
_LOWEST = -(2**63) + 1024  # the next number that a float64 can be
_MAX_LENGTH = 2**31
_MAX_COMPARISONS = 10_000  # of two schemas of a oneOf, in a whole schema; of one with more, it is not certain
_MAX_LISTED = 256  # values of an enum that are compared

_ONE = ("additionalProperties", "items", "additionalItems", "contains", "propertyNames", "unevaluatedItems")
_MANY = ("properties", "patternProperties")
_ROWS = ("prefixItems", "items")
_UNIONS = ("anyOf", "oneOf")
_SAME_VALUE = {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
_ABOUT_KEYS = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "required"}
_ABOUT_KEYS |= {"minProperties", "maxProperties", "propertyNames", "dependentRequired", "dependencies"}
_NEEDS_OTHER_KEYS = _ABOUT_KEYS - {"properties", "required", "maxProperties"} | {"enum", "const"}

ONE_OF = "oneOf is enforced as anyOf, so a value may fit several of its schemas"
BOUNDS = "bounds beyond 2^63 are not enforced"


@dataclass(frozen=True, slots=True)
class EnforceableSchema:
    """A schema that the grammar engine can read, and what of the original it does not enforce, a clause each."""

    schema: Schema
    left_out: tuple[str, ...]


def make_enforceable(schema: Schema, closes_objects: bool) -> EnforceableSchema:
    """Prepares a copy of a schema. `closes_objects`: see the module.

    `InvalidGrammar` for a bound that cannot be enforced and excludes much. Linear in the schema, whose references are
    followed once.
    """
    return _Preparation(json.loads(json.dumps(schema)), closes_objects).result()


@dataclass(slots=True)
class _Visit:
    """A schema that was reached, and whether nothing else speaks of the same value on any way to it."""

    schema: Schema
    is_alone: bool


class _Preparation:
    def __init__(self, root: Schema, closes_objects: bool) -> None:
        self._root = root
        self._closes_objects = closes_objects
        self._visits: dict[int, _Visit] = {}  # by identity of the schema
        self._left_out: dict[str, None] = {}
        self._shapes: dict[int, _Shape] = {}  # by identity of the schema
        self._num_comparisons = 0

    def result(self) -> EnforceableSchema:
        self._reach_all()
        for visit in self._visits.values():
            if visit.is_alone and self._closes_objects and _may_be_closed(visit.schema):
                visit.schema["additionalProperties"] = False
            if "oneOf" in visit.schema and not self._is_exclusive(visit.schema["oneOf"]):
                self._left_out[ONE_OF] = None
            self._rewrite(visit.schema)
        if not str(self._root.get("$schema", "http://json-schema.org/draft")).partition("//")[2].startswith("json-sc"):
            del self._root["$schema"]  # of a dialect that the grammar engine does not know
        return EnforceableSchema(self._root, tuple(self._left_out))

    def _reach_all(self) -> None:
        waiting = [_Visit(self._root, is_alone=True)]
        while waiting:
            visit = waiting.pop()
            known = self._visits.get(id(visit.schema))
            if known is None or (known.is_alone and not visit.is_alone):
                self._visits[id(visit.schema)] = visit
                waiting += self._parts(visit)

    def _parts(self, visit: _Visit) -> Iterator[_Visit]:
        """The schemas within a schema, and those that it refers to."""
        schema = visit.schema
        for same in self._of_same_value(schema):
            yield _Visit(same, visit.is_alone and _only_refers(schema))
        is_shared = "patternProperties" in schema or "contains" in schema
        for name in _MANY:
            for each in _values(schema.get(name)):
                yield _Visit(each, visit.is_alone and not is_shared)
        for name in _ROWS:
            for each in _members(schema.get(name)):
                yield _Visit(each, visit.is_alone and not is_shared)
        for name in _ONE:
            if isinstance(schema.get(name), dict):
                yield _Visit(schema[name], visit.is_alone and not is_shared)

    def _of_same_value(self, schema: Schema) -> Iterator[Schema]:
        for name in ("allOf", *_UNIONS):
            yield from _members(schema.get(name))
        target = self._target(schema)
        if target is not None:
            yield target

    def _target(self, schema: Schema) -> Schema | None:
        """The schema that a `$ref` within the document points to."""
        pointer = schema.get("$ref")
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            return None
        found: Any = self._root
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None

    def _rewrite(self, schema: Schema) -> None:
        """Replaces keywords of this schema, and not of those within it."""
        if "format" in schema and schema["format"] not in KNOWN_FORMATS:
            del schema["format"]
        if schema.get("uniqueItems") is False or (
            schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1)
        ):
            del schema["uniqueItems"]
        if _is_number(schema.get("maxLength")) and schema["maxLength"] >= _MAX_LENGTH:
            del schema["maxLength"]
        _read_flags_of_bounds(schema)
        for name in ("minimum", "exclusiveMinimum"):
            self._check_bound(schema, name, sign=-1)
        for name in ("maximum", "exclusiveMaximum"):
            self._check_bound(schema, name, sign=1)

    def _check_bound(self, schema: Schema, name: str, sign: int) -> None:
        """Replaces or drops a bound that cannot be written; `sign`: of the direction in which it is open."""
        bound: Any = schema.get(name)
        if not _is_number(bound) or abs(bound) < _LIMIT:
            return
        if bound * sign < 0:
            raise InvalidGrammar(f"{name} {bound} cannot be enforced, because it is beyond 2^63; leave it out")
        types = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
        if "integer" in types and "number" not in types:
            schema[name] = _LOWEST if sign < 0 else _LIMIT - 1
        else:
            del schema[name]
            self._left_out[BOUNDS] = None

    def _is_exclusive(self, alternatives: object) -> bool:
        """True if it is certain that no value fits two of these schemas."""
        if not isinstance(alternatives, list) or not all(isinstance(each, dict) for each in alternatives):
            return False
        self._num_comparisons += len(alternatives) * (len(alternatives) - 1) // 2
        if self._num_comparisons > _MAX_COMPARISONS:
            return False
        shapes = [self._shape_of(each) for each in alternatives]
        return all(one.excludes(other) for one, other in combinations(shapes, 2))

    def _shape_of(self, schema: Schema) -> "_Shape":
        target = self._target(schema)
        resolved = schema if target is None else target
        if id(resolved) not in self._shapes:
            self._shapes[id(resolved)] = _Shape.of(resolved)
        return self._shapes[id(resolved)]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Finds what tells the values that fit one schema from those that fit another."""

    types: set[str]  # empty: any
    values: set[str] | None  # all of them, as JSON; None: they are not listed
    tags: dict[str, set[str]]  # the listed values of an object's properties
    required: set[str]

    @classmethod
    def of(cls, schema: Schema) -> "_Shape":
        types, tags = _types(schema), {}
        if types == {"object"}:
            listed = {name: _listed(_dict(each)) for name, each in _dict(schema.get("properties")).items()}
            tags = {name: values for name, values in listed.items() if values is not None}
        return cls(types, _listed(schema), tags, {str(each) for each in _list(schema.get("required"))})

    def excludes(self, other: "_Shape") -> bool:
        """True if it is certain that no value fits both: by type, by listed values, or by a property that tells them,
        because one of them requires it and its values differ.
        """
        if self.types and other.types and self.types.isdisjoint(other.types):
            return True
        if self.values is not None and other.values is not None:
            return self.values.isdisjoint(other.values)
        shared = self.tags.keys() & other.tags.keys() & (self.required | other.required)
        return any(self.tags[name].isdisjoint(other.tags[name]) for name in shared)


def _may_be_closed(schema: Schema) -> bool:
    """True if a schema names the properties of an object, and no other keyword needs further ones."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or _NEEDS_OTHER_KEYS & schema.keys():
        return False
    required = schema.get("required", [])
    return not _SAME_VALUE & schema.keys() and isinstance(required, list) and {*map(str, required)} <= properties.keys()


def _only_refers(schema: Schema) -> bool:
    """True if all that a schema says of a value's keys is in one reference, one union or a list of one schema."""
    references = _SAME_VALUE & schema.keys()
    if len(references) != 1 or (_ABOUT_KEYS | {"enum", "const"}) & schema.keys():
        return False
    (name,) = references
    return name in ("$ref", *_UNIONS) or (name == "allOf" and len(_list(schema[name])) == 1)


def _read_flags_of_bounds(schema: Schema) -> None:
    """Writes the exclusive bounds of draft 4, which are flags beside `minimum` and `maximum`, as later drafts do."""
    for flag, name in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(schema.get(flag), bool):
            is_exclusive = schema.pop(flag)
            if is_exclusive and name in schema:
                schema[flag] = schema.pop(name)


def _types(schema: Schema) -> set[str]:
    """The types that a schema allows; empty if it does not say. Integers are numbers."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named] if named else []
    return {"number" if each == "integer" else str(each) for each in names}


def _listed(schema: Schema) -> set[str] | None:
    """The values that a schema lists, as JSON; None if it lists none, or too many to compare."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > _MAX_LISTED:
        return None
    plain = (int(each) if isinstance(each, float) and each.is_integer() else each for each in values)
    return {json.dumps(each, sort_keys=True) for each in plain}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _dict(value: object) -> Schema:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _values(value: object) -> list[Schema]:
    return [each for each in _dict(value).values() if isinstance(each, dict)]


def _members(value: object) -> list[Schema]:
    return [each for each in _list(value) if isinstance(each, dict)]
