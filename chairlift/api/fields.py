"""What becomes of each field of a request: read off the models, for the documentation."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, get_args

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from chairlift.api.wire.base import Ignored, Refused
from chairlift.params import RequestOptions, SamplingParams


class Fate(StrEnum):
    """What becomes of a field."""

    WORKS = "works"
    IGNORED = "accepted, changes nothing"
    REFUSED = "refused unless null"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of a request's body."""

    name: str
    type: str
    fate: Fate
    is_required: bool
    description: str


def fields_of(body: type) -> list[FieldRow]:
    """Every field of a body or of a part of one: those that must be there first, then those that work."""
    properties = TypeAdapter(body).json_schema()["properties"]
    rows = [
        FieldRow(
            name=field.alias or name,
            type=_type_of(properties[field.alias or name]),
            fate=_fate(field),
            is_required=field.is_required(),
            description=_description(name, field),
        )
        for name, field in _declared(body).items()
    ]
    return sorted(rows, key=lambda row: (not row.is_required, list(Fate).index(row.fate)))


def parts_of(*bodies: type) -> list[type]:
    """The parts that bodies are made of, and theirs, each once."""
    parts: dict[type, None] = {}
    left = [field.annotation for body in bodies for field in _declared(body).values()]
    while left:
        annotation = left.pop(0)
        if isinstance(annotation, type) and _declared(annotation):
            if annotation not in parts:
                parts[annotation] = None
                left += [field.annotation for field in _declared(annotation).values()]
        else:
            left += [each for each in get_args(annotation) if isinstance(each, type) or get_args(each)]
    return list(parts)


def _declared(body: type) -> dict[str, FieldInfo]:
    """Of a pydantic model or dataclass; empty for other types."""
    fields: dict[str, FieldInfo] = getattr(body, "__pydantic_fields__", {})
    return fields


def _fate(field: FieldInfo) -> Fate:
    marks = field.metadata
    if any(isinstance(mark, Refused) for mark in marks):
        return Fate.REFUSED
    return Fate.IGNORED if any(isinstance(mark, Ignored) for mark in marks) else Fate.WORKS


def _description(name: str, field: FieldInfo) -> str:
    """The field's own; or its mark's reason; or what is said of its namesake in the parameters, which check it."""
    for mark in field.metadata:
        if isinstance(mark, (Ignored, Refused)):
            return mark.why
    if field.description is not None:
        return field.description
    namesake = {**_declared(RequestOptions), **_declared(SamplingParams)}.get(name)
    return "" if namesake is None or namesake.description is None else namesake.description


def _type_of(schema: dict[str, Any]) -> str:
    """A JSON Schema's type in a few words; that null is allowed goes without saying."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[-1]
    if "enum" in schema:
        return " | ".join(f'"{value}"' for value in schema["enum"])
    if "const" in schema:
        return f'"{schema["const"]}"'
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        return " | ".join(_type_of(each) for each in alternatives if each.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))
