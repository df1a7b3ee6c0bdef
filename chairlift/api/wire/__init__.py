"""The shapes of requests and replies: OpenAI's and Anthropic's specifications plus vLLM's extensions.

This module has what all shapes share: strictness, and fields without full support.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictInt,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema, to_json

from chairlift.errors import InvalidRequest
from chairlift.params import RequestOutput

LeftOutIfNone = Field(exclude_if=lambda value: value is None)

Texts = list[str]
TokenIds = list[StrictInt]
Label = Annotated[str, Field(max_length=512)]  # stored or repeated, but not interpreted
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]

_STATELESS = "use previous_response_id, or send the whole conversation as input"
_TEXT_ONLY = "this server reads and writes text only"

_CALLS = "deprecated; use tools, tool_choice and tool_calls"
_MODERATION = "there is no moderation here"
_NAMESPACE = "functions have no namespaces here"
_ONE_MODEL = "there is one model here"

REFUSED = {
    "AssistantTurn": {"audio": _TEXT_ONLY, "function_call": _CALLS},
    "ChatCompletionRequest": {
        "audio": _TEXT_ONLY,
        "web_search_options": "there is no web search here",
        "moderation": _MODERATION,
    },
    "ChatMessage": {"tool_call_id": "it belongs to messages with role tool"},
    "CountTokensRequest": {
        "mcp_servers": "the client connects to such servers, and sends their tools",
        "compaction": "leave out of messages what the model may forget",
    },
    "FunctionTool": {"output_schema": "the model does not see it; describe it in description"},
    "InputCall": {"namespace": _NAMESPACE},
    "InputCallOutput": {"namespace": _NAMESPACE},
    "MessagesRequest": {
        "container": "there are no containers here",
        "fallbacks": _ONE_MODEL,
        "fallback_credit_token": _ONE_MODEL,
        "thread": "conversations are not stored; send all of their messages",
    },
    "PromptCacheOptions": {"comparison_response_id": _STATELESS},
    "ResponsesRequest": {
        "conversation": _STATELESS,
        "prompt": "no prompts are stored here; send its text",
        "moderation": _MODERATION,
        "access_programs": "there are no access programs here",
        "image": _TEXT_ONLY,
    },
}
"""By class: fields of the specifications that it refuses, and why."""

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


class Fate(StrEnum):
    """How a field is treated."""

    WORKS = "works"
    IGNORED = "accepted, changes nothing"
    IDLE = "accepted where it changes nothing"
    LEFT_OUT = "accepted, with a warning"
    REFUSED = "refused unless null"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that is accepted because it cannot change the answer."""

    why: str
    fate: ClassVar = Fate.IGNORED

    @property
    def told(self) -> str:
        """The reason as the reference gives it."""
        return self.why

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), "description": f"{self.fate}: {self.told}"}


@dataclass(frozen=True, slots=True)
class Idle(Ignored):
    """Marks a field that is accepted with these values, by which it asks for nothing, and refused with any other."""

    values: tuple[object, ...] = ()
    fate: ClassVar = Fate.IDLE

    @property
    def told(self) -> str:
        return f"only {' or '.join(to_json(value).decode() for value in self.values)} is supported: {self.why}"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None and value not in self.values:
            raise InvalidRequest(f"{info.field_name}: {self.told}", info.field_name)
        return value


@dataclass(frozen=True, slots=True)
class LeftOut(Ignored):
    """Marks a field that cannot be honoured but whose loss does no harm: the reply has a warning that names it."""

    but_for: tuple[object, ...] = ()  # values that ask for nothing
    fate: ClassVar = Fate.LEFT_OUT

    def warning(self, path: str, value: object) -> list[str]:
        """The sentence for a body that has this value there; empty if the value asks for nothing."""
        return [] if value is None or value in self.but_for else [f"{path} was left out: {self.why}"]


@dataclass(frozen=True, slots=True)
class Refused(Ignored):
    """Marks a field of a specification that is not supported: anything but null is an error that names it."""

    fate: ClassVar = Fate.REFUSED

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(self._check, handler(source))

    def _check(self, value: object, info: ValidationInfo) -> object:
        if value is not None:
            raise InvalidRequest(f"{info.field_name} is not supported: {self.why}", info.field_name)
        return value


class Body(BaseModel):
    """A request's body, or a part of one. A field that is null counts as left out, also one that is not known here.

    It has the fields that `REFUSED` lists under its class, too.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        marks = {name: Annotated[None, Refused(why)] for name, why in REFUSED.get(cls.__name__, {}).items()}
        cls.__annotations__ = {**inspect.get_annotations(cls), **marks}
        for name in marks:
            setattr(cls, name, None)

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


class Written(Body):
    """What a model wrote. Fields that servers and clients have added to it are dropped."""

    model_config = ConfigDict(extra="ignore")


def only(allowed: object, why: str, path: str | None = None) -> BeforeValidator:
    """Refuses every value of a field except null and this one; `path`: of a field within a field."""

    def check(value: object, info: ValidationInfo) -> object:
        if value is not None and value != allowed:
            name = path or info.field_name
            raise InvalidRequest(f"{name}: only {to_json(allowed).decode()} is supported: {why}", name)
        return value

    return BeforeValidator(check)


def only_types(field: str, *known: str) -> BeforeValidator:
    """Refuses an object of another type by that type's name, rather than by the first of its fields."""
    return BeforeValidator(_known_type(field, *known))


def _known_type(field: str, *known: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if isinstance(value, dict) and type_of(value) not in known:
            raise InvalidRequest(
                f"{field}: type {repr(type_of(value))[:80]} is not supported; known here: {', '.join(known)}", field
            )
        return value

    return check


def type_of(value: dict[str, Any]) -> Any:
    """An item's type; an item without one is a message if it has a role."""
    return "message" if value.get("type") is None and "role" in value else value.get("type")


@dataclass(frozen=True, slots=True)
class OneOf:
    """Marks a union of classes. `pick` says which of them an object becomes; None: it is not an object."""

    pick: Callable[[Any], type[BaseModel] | None]
    check: Callable[[object], object] = let_others_run  # applied to the input before one is picked

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Class names occur in the paths of errors: see `complaints`."""
        forms = {form.__name__: handler.generate_schema(form) for form in get_args(union)}
        picked = core_schema.tagged_union_schema(forms, lambda value: getattr(self.pick(value), "__name__", None))
        return core_schema.no_info_before_validator_function(self.check, picked)


def by_type(field: str, **forms: type[BaseModel]) -> OneOf:
    """Picks a class by an object's type, and refuses an object of another type as `only_types` does."""
    pick = lambda value: forms.get(str(type_of(value))) if isinstance(value, dict) else None  # noqa: E731
    return OneOf(pick, _known_type(field, *forms))


class ErrorDetail(BaseModel):
    """What went wrong, and which field is to blame."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Every error's body."""

    error: ErrorDetail


class NamedEvent(BaseModel):
    """An event of a stream, named by its type."""

    type: str


class PromptTokensDetails(BaseModel):
    """How many tokens of the prompts had been computed for other requests."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """How many of the generated tokens are thoughts, and how many speculated tokens were accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(BaseModel):
    """Summed over prompts; a prompt counts once, however many choices continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, outputs: Sequence[RequestOutput]) -> Self:
        num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
        choices = [choice for output in outputs for choice in output.outputs]
        num_generated = sum(len(choice.token_ids) for choice in choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in choices)
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.num_cached_tokens for each in outputs)),
            completion_tokens_details=CompletionTokensDetails(
                reasoning_tokens=num_reasoning,
                accepted_prediction_tokens=sum(choice.num_accepted_tokens for choice in choices),
                rejected_prediction_tokens=sum(choice.num_rejected_tokens for choice in choices),
            ),
        )


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
