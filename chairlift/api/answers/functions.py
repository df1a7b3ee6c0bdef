"""The functions that a model may call, and the arguments that grammars of calls let it write."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from chairlift.errors import InvalidGrammar, InvalidRequest
from chairlift.params import find_excess
from chairlift.schemas import make_enforceable

_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class FunctionSpec:
    """A function that the model may call. `parameters` is a JSON schema of an object; None lets any object pass."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool | None
    description: str | None
    is_custom: bool = False  # called with a text, its one parameter: see `custom`
    input_pattern: str | None = None  # the regular expression, in Rust's dialect, that the whole text matches
    left_out: tuple[str, ...] = ()  # sentences about what of it is not enforced

    @property
    def is_enforced(self) -> bool:
        """True if every call is made to fit, also where no call is forced."""
        return bool(self.strict) or self.input_pattern is not None

    @property
    def schema(self) -> dict[str, Any]:
        return self.parameters or {}

    def as_template_input(self) -> dict[str, Any]:
        """The function as chat templates expect it, in the shape of chat completions."""
        fields = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": "function", "function": {"name": self.name, **given}}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function."""

    name: str
    schema: dict[str, Any]
    is_required: bool


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments with which a function may be called: objects of a schema."""

    name: str  # of the function
    schema: dict[str, Any]
    is_lenient: bool = False  # keywords that llguidance does not know are ignored
    left_out: tuple[str, ...] = ()  # sentences about what of the function's schema is not enforced
    input_pattern: str | None = None  # see `FunctionSpec`

    def parameters(self) -> list[Parameter] | None:
        """The parameters one by one; None if any are allowed."""
        properties = self.schema.get("properties")
        if not isinstance(properties, dict):
            return [] if self.schema.get("additionalProperties") is False else None
        shared = {key: self.schema[key] for key in _DEFINITIONS if key in self.schema}
        required = self.schema.get("required")
        return [
            Parameter(
                name,
                {**shared, **schema} if isinstance(schema, dict) else {},
                isinstance(required, list) and name in required,
            )
            for name, schema in properties.items()
        ]


def enforced_arguments(
    functions: Sequence[FunctionSpec], is_forced: bool = True, closes_objects: bool = True
) -> list[Arguments]:
    """The arguments of each function, as they are to be enforced.

    Those of a function that is not strict are any JSON object, unless calls are forced: then keywords that llguidance
    does not know are ignored. `closes_objects`: see `schemas`. InvalidRequest for a schema that is too large, cannot be
    enforced or is not of an object.
    """
    _check_size([function for function in functions if is_forced or function.is_enforced])
    return [
        _arguments_of(function, closes_objects)
        if is_forced or function.is_enforced or function.is_custom
        else Arguments(function.name, {"type": "object"})
        for function in functions
    ]


def _arguments_of(function: FunctionSpec, closes_objects: bool) -> Arguments:
    if function.is_custom:
        return _input_of(function)
    whose = f"the parameters of function {function.name!r}"
    kind = function.schema.get("type", "object")
    if kind != "object":
        raise InvalidRequest(f"{whose} must be a JSON schema of type object, not {kind!r}", "tools")
    try:
        prepared = make_enforceable({**function.schema, "type": "object"}, closes_objects)
    except InvalidGrammar as error:
        raise InvalidRequest(f"tools: {whose} cannot be compiled: {error.reason}", "tools") from error
    schema = prepared.schema
    if closes_objects and schema.get("properties") == {}:  # of a function without parameters
        schema = {"additionalProperties": False, **schema}
    left_out = tuple(f"tools: {whose}: {each}" for each in prepared.left_out) if function.strict else ()
    return Arguments(function.name, schema, is_lenient=not function.strict, left_out=left_out)


def _input_of(function: FunctionSpec) -> Arguments:
    """The arguments of a custom tool."""
    pattern = function.input_pattern
    ((name, _),) = function.schema["properties"].items()
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return Arguments(function.name, {**function.schema, "properties": {name: text}}, input_pattern=pattern)


def _check_size(functions: Sequence[FunctionSpec]) -> None:
    """Refuses schemas that are too large to be enforced, before any work on them."""
    for function in functions:
        excess = find_excess(function.schema)
        if excess is not None:
            message = f"tools: the schema of the parameters of function {function.name!r} {excess}; simplify it"
            raise InvalidRequest(message, "tools")
    if find_excess([function.schema for function in functions]) is not None:
        raise InvalidRequest("tools: the schemas are too large together; leave out some tools", "tools")
