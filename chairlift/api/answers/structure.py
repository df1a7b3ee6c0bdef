"""The structure that a client asks for in an answer, as it is enforced."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self

from pydantic import ValidationError

from chairlift.errors import InvalidGrammar, InvalidRequest
from chairlift.params import StructuredOutputs
from chairlift.schemas import make_enforceable


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The source of a line of a grammar: a schema in one of the client's fields."""

    field: str
    name: str


@dataclass(frozen=True, slots=True)
class WantedStructure:
    """The structure that an answer must have, and the field that says so."""

    field: str
    outputs: StructuredOutputs
    sources: Mapping[int, GrammarSource] = dataclasses.field(default_factory=dict)  # by line, of a grammar made here
    schema: dict[str, Any] | None = None  # the structure as JSON Schema, as it is enforced; None: it is something else
    left_out: tuple[str, ...] = ()  # sentences about what of it is not enforced

    def enforceable(self, allows_more: bool) -> Self:
        """The same with its schema. `allows_more`: objects may have keys that it does not name, unless it says so.

        InvalidRequest if the schema cannot be enforced.
        """
        if self.outputs.json_object:
            return dataclasses.replace(self, schema={"type": "object"})
        if self.outputs.json is None:
            return self
        is_closed = self.outputs.disable_additional_properties
        is_closed = not allows_more if is_closed is None else is_closed
        try:
            prepared = make_enforceable(self._given_schema(), is_closed)
        except InvalidGrammar as error:
            raise self.refusal(error) from error
        except RecursionError as error:
            raise InvalidRequest(f"{self.field}: too deeply nested or too large; simplify it", self.field) from error
        return dataclasses.replace(
            self,
            outputs=dataclasses.replace(self.outputs, disable_additional_properties=is_closed),
            schema=prepared.schema,
            left_out=tuple(f"{self.field}: {each}" for each in prepared.left_out),
        )

    def _given_schema(self) -> dict[str, Any]:
        try:
            schema = json.loads(self.outputs.json) if isinstance(self.outputs.json, str) else self.outputs.json
        except ValueError as error:
            raise InvalidRequest(f"{self.field}: not valid JSON: {error}", self.field) from error
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{self.field}: the schema is not an object", self.field)
        return schema

    def refusal(self, error: InvalidGrammar) -> InvalidRequest:
        """The error in terms of what the client wrote."""
        if not self.sources:
            return InvalidRequest(f"{self.field}: {error}", self.field)
        whole = (
            GrammarSource(self.field, "the schemas together")
            if len(self.sources) > 1
            else next(iter(self.sources.values()))
        )
        source = self.sources.get(error.line or 0, whole)
        return InvalidRequest(f"{source.field}: {source.name} cannot be compiled: {error.reason}", source.field)


def make_structure(field: str, **given: Any) -> StructuredOutputs | None:
    """The structure in the field of that name; None if it has none. InvalidRequest about that field."""
    if all(value is None for value in given.values()):
        return None
    try:
        return StructuredOutputs(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")
        reason = str(cause).removeprefix("structured_outputs: ") if isinstance(cause, InvalidRequest) else first["msg"]
        raise InvalidRequest(f"{field}: {reason}", field) from error


def the_only_one(**structures: StructuredOutputs | None) -> WantedStructure | None:
    """Returns what one of these fields asks for; None if none does. InvalidRequest if several do."""
    wanted = [WantedStructure(field, outputs) for field, outputs in structures.items() if outputs is not None]
    if len(wanted) > 1:
        raise InvalidRequest(f"give only one of {' and '.join(each.field for each in wanted)}", wanted[1].field)
    return wanted[0] if wanted else None


class AnswerOptions(Protocol):
    """Says which calls and thoughts a request wants in its answer."""

    effort_field: ClassVar[str]  # the field that holds `effort`

    @property
    def effort(self) -> str | None:
        """The amount of thinking; None: nothing is said about it."""
        ...

    @property
    def call_mode(self) -> Literal["none", "auto", "required"]:
        """Says if the answer may, must or must not call."""
        ...

    @property
    def is_parallel(self) -> bool:
        """True if an answer may hold several calls."""
        ...
