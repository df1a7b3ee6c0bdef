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
_MAX_COMPARED = 64  # schemas of a oneOf

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
        """Whether it is certain that no value fits two of these schemas."""
        resolved = [self._resolved(each) for each in _members(alternatives)]
        if not isinstance(alternatives, list) or not len(alternatives) == len(resolved) <= _MAX_COMPARED:
            return False
        return all(_are_disjoint(one, other) for one, other in combinations(resolved, 2))

    def _resolved(self, schema: Schema) -> Schema:
        target = self._target(schema)
        return schema if target is None else target


def _may_be_closed(schema: Schema) -> bool:
    """Whether a schema names the properties of an object, and no other keyword needs further ones."""
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties or _NEEDS_OTHER_KEYS & schema.keys():
        return False
    required = schema.get("required", [])
    return not _SAME_VALUE & schema.keys() and isinstance(required, list) and {*map(str, required)} <= properties.keys()


def _only_refers(schema: Schema) -> bool:
    """Whether all that a schema says of a value's keys is in one reference, one union or a list of one schema."""
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


def _are_disjoint(one: Schema, other: Schema) -> bool:
    """Whether it is certain that no value fits both: by type, by listed values, or by a property that tells them."""
    types, other_types = _types(one), _types(other)
    if types and other_types and not types & other_types:
        return True
    values, other_values = _listed(one), _listed(other)
    if values is not None and other_values is not None:
        return not values & other_values
    if types == other_types == {"object"}:
        shared = _dict(one.get("properties")).keys() & _dict(other.get("properties")).keys()
        return any(_tells_apart(name, one, other) for name in shared)
    return False


def _tells_apart(name: str, one: Schema, other: Schema) -> bool:
    """Whether a property that one of them requires has different values in both."""
    if name not in [*_list(one.get("required")), *_list(other.get("required"))]:
        return False
    values, other_values = (_listed(_dict(each["properties"][name])) for each in (one, other))
    return values is not None and other_values is not None and not values & other_values


def _types(schema: Schema) -> set[str]:
    """The types that a schema allows; empty if it does not say. Integers are numbers."""
    named = schema.get("type")
    names = named if isinstance(named, list) else [named] if named else []
    return {"number" if each == "integer" else str(each) for each in names}


def _listed(schema: Schema) -> set[str] | None:
    """The values that a schema lists, as JSON; None if it lists none."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
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
