"""`/v1/responses`, without anything that would need a memory: a reply is not stored, and nothing refers to one."""

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from chairlift.api.tools import FunctionSpec
from chairlift.api.wire.base import Ignored, Refused
from chairlift.api.wire.caching import STATELESS
from chairlift.api.wire.checks import deepest_complaint, only, only_types
from chairlift.api.wire.request import GenerationRequest
from chairlift.api.wire.response_items import InputItem, template_messages
from chairlift.api.wire.response_options import (
    ChosenFunction,
    FunctionTool,
    ResponseStreamOptions,
    TextOptions,
)
from chairlift.api.wire.sampling import sampling_params
from chairlift.api.wire.structure import WantedStructure
from chairlift.engine.tokenizer import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, SamplingParams

LOGPROBS = "message.output_text.logprobs"
_FOR_STATISTICS = Ignored("labels a request for its sender's own statistics; the reply repeats it")


class ResponsesRequest(GenerationRequest):
    """Answer a conversation."""

    input: str | Annotated[list[InputItem], Field(fail_fast=True)] = Field(
        description="what the user says, or items: message, function_call, function_call_output"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    stream_options: ResponseStreamOptions | None = Field(None, description="only with stream")
    max_output_tokens: StrictInt | None = Field(
        None, ge=1, description="most new tokens; the room in the slot also bounds it"
    )
    temperature: StrictFloat | None = None
    top_p: StrictFloat | None = None
    include: list[str] | None = Field(None, description=f'["{LOGPROBS}"]: report the log-probability of each token')
    top_logprobs: StrictInt | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="and of this many likeliest ones; only with include"
    )
    text: TextOptions | None = Field(None, description="what the answer must look like")
    tools: list[Annotated[FunctionTool, only_types("tools", "function")]] | None = Field(
        None, max_length=128, description="functions that the model may call"
    )
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenFunction | None, only_types("tool_choice", "function")
    ] = Field(None, description="whether to call a tool, or which; required and named calls are enforced")
    parallel_tool_calls: StrictBool | None = Field(None, description="false: at most one call")
    truncation: Annotated[
        Literal["auto", "disabled"] | None, only("disabled", "leave out of input what may be forgotten")
    ] = Field(None, description='only "disabled": a conversation that is too long is an error')
    background: Annotated[StrictBool | None, only(False, "there is no way to come back for a reply")] = Field(
        None, description="only false"
    )

    metadata: Annotated[dict[str, str] | None, _FOR_STATISTICS] = None
    safety_identifier: Annotated[str | None, _FOR_STATISTICS] = None
    store: Annotated[StrictBool | None, Ignored("nothing is stored here, and the reply says so")] = None

    previous_response_id: Annotated[None, Refused(STATELESS)] = None
    conversation: Annotated[None, Refused(STATELESS)] = None
    prompt: Annotated[None, Refused("no prompts are stored here; send its text")] = None
    reasoning: Annotated[None, Refused("the model does not think apart from its answer")] = None
    max_tool_calls: Annotated[None, Refused("there are no built-in tools here")] = None
    moderation: Annotated[None, Refused("there is no moderation here")] = None
    context_management: Annotated[None, Refused("leave out of input what may be forgotten")] = None
    access_programs: Annotated[None, Refused("there are no access programs here")] = None
    image: Annotated[None, Refused("only text is understood here")] = None

    @field_validator("input", mode="wrap")
    @classmethod
    def _name_the_item(cls, value: object, handler: ValidatorFunctionWrapHandler) -> object:
        """One complaint about the item that is wrong, where pydantic would first say that a list is no string."""
        try:
            return handler(value)
        except ValidationError as error:
            if not isinstance(value, list):
                raise InvalidRequest("input must be a string or a list of items", "input") from error
            raise deepest_complaint("input", error) from error

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        for wanted in include or []:
            if wanted != LOGPROBS:
                raise InvalidRequest(f"include: {wanted!r} is not supported; known here: {LOGPROBS}", "include")
        return include

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidRequest(f'top_logprobs is only allowed with include: ["{LOGPROBS}"]', "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice is only allowed with tools", "tool_choice")
        if isinstance(self.tool_choice, ChosenFunction) and not self._functions_named(self.tool_choice.name):
            raise InvalidRequest(f"tool_choice: there is no tool {self.tool_choice.name!r}", "tool_choice")
        return self

    @property
    def field_names(self) -> dict[str, str]:
        """See `Conversation`."""
        return {"messages": "input", "max_tokens": "max_output_tokens"}

    @property
    def has_logprobs(self) -> bool:
        return bool(self.include)

    @property
    def is_call_forced(self) -> bool:
        """See `Conversation`, as for all that follows."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenFunction)

    def functions_to_call(self) -> list[FunctionSpec]:
        if isinstance(self.tool_choice, ChosenFunction):
            return self._functions_named(self.tool_choice.name)
        return [] if self.tool_choice == "none" else [tool.spec() for tool in self.tools or []]

    def wanted_structure(self) -> WantedStructure | None:
        structure = None if self.text is None or self.text.format is None else self.text.format.structure()
        return None if structure is None else WantedStructure("text", structure)

    def template_messages(self) -> list[Message]:
        lead: list[Message] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        if isinstance(self.input, str):
            return [*lead, {"role": "user", "content": self.input}]
        return lead + template_messages(self.input)

    def chat_options(self, shows_tools: bool = True) -> ChatOptions:
        tools = (self.tools or []) if shows_tools else []
        return ChatOptions(tools=[tool.as_tool().as_template_input() for tool in tools])

    def params(self, defaults: SamplingParams) -> SamplingParams:
        given = self.model_dump(include={"temperature", "top_p"}, exclude_none=True)
        if self.max_output_tokens is not None:
            given["max_tokens"] = self.max_output_tokens
        if self.has_logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return sampling_params(defaults, given)

    def _functions_named(self, name: str) -> list[FunctionSpec]:
        return [tool.spec() for tool in self.tools or [] if tool.name == name]
