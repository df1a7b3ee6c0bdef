"""Errors in the client's terms: one of all that pydantic says about a wrong body, with the names of its fields."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from chairlift.errors import InvalidRequest

# In the path of an error pydantic also names the form of a field that it tried: a class, or a type of Python's.
_FORM = re.compile(r"[A-Z].*|.*[\[(].*|constrained-.*|str|int|float|bool|none")
_SHOULD_BE = "Input should be "
_MESSAGES = {
    "model_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "dataclass_type": "Input should be an object",
    "union_tag_not_found": "Input should be an object",
    "list_type": "Input should be a list",
}


def complaint_of(error: ValidationError) -> InvalidRequest:
    """Picks one of all errors: our own if there is one, else that of the first wrong field.

    If a field may have several forms, the error deepest in the body is about the form that was meant.
    """
    complaints = error.errors(include_url=False, include_input=False)
    for each in complaints:
        cause = each.get("ctx", {}).get("error")
        if isinstance(cause, InvalidRequest):
            return _placed(cause, _path(each))
    field = complaints[0]["loc"][:1]
    depth = max(len(each["loc"]) for each in complaints if each["loc"][:1] == field)
    meant = [each for each in complaints if each["loc"][:1] == field and len(each["loc"]) == depth]
    path = ".".join(_path(meant[0]))
    match meant[0]["type"]:
        case "extra_forbidden":
            return InvalidRequest(f"unknown or unsupported field: {path}", path)
        case "json_invalid":
            return InvalidRequest(f"the body is not JSON: {meant[0]['msg']}")
    message = _joined([each for each in meant if _path(each) == _path(meant[0])])
    return InvalidRequest(f"{path}: {message}" if path else message, str(field[0]) if field else None)


def _path(complaint: ErrorDetails) -> list[str]:
    """The fields and indices that lead to the wrong value."""
    *lead, last = complaint["loc"] or ("",)
    is_named = complaint["type"] == "extra_forbidden"  # the client chose its name
    names = [str(part) for part in lead if isinstance(part, int) or not _FORM.fullmatch(part)]
    return names + ([str(last)] if is_named or isinstance(last, int) or not _FORM.fullmatch(last) else [])


def _joined(complaints: list[ErrorDetails]) -> str:
    """All forms that a field may have, in one sentence."""
    messages = list(dict.fromkeys(_MESSAGES.get(each["type"], each["msg"]) for each in complaints))
    if not all(message.startswith(_SHOULD_BE) for message in messages):
        return messages[0]
    return _SHOULD_BE + " or ".join(message.removeprefix(_SHOULD_BE) for message in messages)


def _placed(complaint: InvalidRequest, path: list[str]) -> InvalidRequest:
    """Adds the whole path to an error that a part of the body raised without knowing its own place."""
    name = complaint.param
    if len(path) < 2 or name not in (path[0], path[-1]):
        return complaint
    whole, message = ".".join(path), str(complaint)
    message = whole + message.removeprefix(name) if message.startswith(name) else f"{whole}: {message}"
    return InvalidRequest(message, name if name == path[0] else whole)


@contextmanager
def own_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name the fields that the client wrote; `names`: a request's `field_names`."""
    try:
        yield
    except InvalidRequest as error:
        name = names.get(error.param or "")
        if name is None:
            raise
        error.args = (f"{name}: {error}",)
        error.param = name
        raise
