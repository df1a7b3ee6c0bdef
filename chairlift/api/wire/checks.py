"""Checks that fields share: what is known of a wide specification, and who is to blame."""

from typing import Any

from pydantic import AfterValidator, BeforeValidator, ValidationError, ValidationInfo
from pydantic_core import to_json

from chairlift.errors import InvalidRequest


def only(allowed: object, why: str, path: str | None = None) -> AfterValidator:
    """Refuses every value of a field but null and this one; `path`: of a field within a field."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and value != allowed:
            name = path or info.field_name
            raise InvalidRequest(f"{name}: only {to_json(allowed).decode()} is supported: {why}", name)
        return value

    return AfterValidator(check)


def only_types(field: str, *known: str) -> BeforeValidator:
    """Refuses an object of another type by that type's name, rather than by the first of its fields."""

    def check(value: object) -> object:
        if isinstance(value, dict) and type_of(value) not in known:
            raise InvalidRequest(
                f"{field}: type {repr(type_of(value))[:80]} is not supported; known here: {', '.join(known)}", field
            )
        return value

    return BeforeValidator(check)


def type_of(value: Any) -> str | None:
    """An item's type; one without is a message if it has a role."""
    if not isinstance(value, dict):
        return getattr(value, "type", None) or "message"
    return "message" if value.get("type") is None and "role" in value else value.get("type")


def deepest_complaint(field: str, error: ValidationError) -> InvalidRequest:
    """Of the complaints about a field of several forms the one about the form that was meant: it got furthest."""
    first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return cause
    path = [field]
    for previous, part in zip((None, *first["loc"]), first["loc"], strict=False):
        # What follows an index is the name of a form, and so is what no field can be called.
        if isinstance(part, int) or not (isinstance(previous, int) or part == "str" or "[" in part):
            path.append(str(part))
    return InvalidRequest(f"{'.'.join(path)}: {first['msg']}", field)
