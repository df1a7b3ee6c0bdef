"""The classes of requests' bodies, which are strict and quick to refuse, and types of their fields."""

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, StrictInt, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from chairlift.api.wire.marks import LeftOut

LeftOutIfNone = Field(exclude_if=lambda value: value is None)

Texts = list[str]
TokenIds = list[StrictInt]
Label = Annotated[str, Field(max_length=512)]  # stored or repeated, but not interpreted
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]

_MAX_FIELDS = 256  # of one object whose fields have names
_COLLECTIONS = ("list", "set", "frozenset", "tuple", "dict")
_Value = TypeVar("_Value")


def let_others_run(value: _Value) -> _Value:
    """Changes nothing. pydantic releases the interpreter's lock only to call Python functions, so large validations and
    dumps call this one now and then.
    """
    return value


def _fail_fast(schema: Any, handler: GetCoreSchemaHandler) -> None:
    """Makes every collection in a core schema stop at its first error: a list of a million wrong elements must not
    cause a million errors.
    """
    if isinstance(schema, dict):
        if schema.get("type") in _COLLECTIONS:
            schema["fail_fast"] = True
        if schema.get("type") == "definition-ref":
            schema = handler.resolve_ref_schema(cast(CoreSchema, schema))
        for part in schema.values():
            _fail_fast(part, handler)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part, handler)


def without_nulls(given: object) -> object:
    """An object without its fields that are null; anything else as it is.

    Thousands of unknown fields would each be an error of its own, and collecting them would delay all other requests.
    """
    if not isinstance(given, dict):
        return given
    if len(given) > _MAX_FIELDS:
        raise PydanticCustomError("too_many_fields", "{count} fields, most of them unknown", {"count": len(given)})
    return {name: value for name, value in given.items() if value is not None}


class Body(BaseModel):
    """A request's body, or a part of one. A field that is null counts as left out, also one that is not known here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_nulls(cls, given: object) -> object:
        return without_nulls(given)

    @property
    def warnings(self) -> list[str]:
        """Sentences about what was accepted and left out, for the reply's `Warning` header."""
        return list(self._fields_left_out(""))

    def _fields_left_out(self, lead: str) -> Iterator[str]:
        """A sentence for each field with a `LeftOut` mark, here and in fields that are objects; not in lists."""
        for name, field in type(self).model_fields.items():
            value, path = getattr(self, name), lead + (field.alias or name)
            if isinstance(value, Body):
                yield from value._fields_left_out(f"{path}.")
            for mark in field.metadata:
                if isinstance(mark, LeftOut):
                    yield from mark.warning(path, value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Makes collections fail fast, and lets other threads run between two objects."""
        schema = handler(source)
        _fail_fast(schema, handler)
        model: Any = schema
        while model["type"] != "model":  # a validator of the whole, or a reference
            model = handler.resolve_ref_schema(model) if model["type"] == "definition-ref" else model["schema"]
        model["schema"] = core_schema.no_info_after_validator_function(let_others_run, model["schema"])
        return schema


class ModelBody(Body):
    """A request's whole body, which may name the model that it is for."""

    model: str | None = Field(None, description="the served model's name; left out: the one there is")


class Written(Body):
    """Accepts what a model wrote. Drops fields that servers and clients have added to it."""

    model_config = ConfigDict(extra="ignore")


class WholeReply(BaseModel):
    """The body of a reply that is sent whole."""

    @property
    def parts(self) -> list[Any]:
        """Its largest list, from which it is freed part by part once it is written; empty: it is never large."""
        return []
