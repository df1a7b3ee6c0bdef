"""`/v1/responses`. A reply that is stored at the client's wish can be continued and read again."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, Tag, field_validator, model_validator

from chairlift.api.wire.anthropic import MessagesRequest
from chairlift.api.wire.base import Body, Ignored, only, only_types
from chairlift.api.wire.chat import ChatCompletionRequest
from chairlift.api.wire.generation import (
    FOR_STATISTICS,
    OpenAIRequest,
    ResponseStreamOptions,
    TextFormat,
    WantedStructure,
    the_only_one,
)
from chairlift.api.wire.messages import (
    PARSE_SPECIAL_TOKENS,
    ChosenFunction,
    Effort,
    FunctionTool,
    LeftOutTool,
    ParallelToolUse,
    ToolChoiceMode,
    effort_arguments,
    known_or_left_out,
)
from chairlift.api.wire.response_items import InputItem, template_messages
from chairlift.engine.text.tokenizer import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, SamplingParams

LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"


InputItems = list[InputItem]
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[LeftOutTool, Tag("LeftOutTool")],
    known_or_left_out("FunctionTool", "function"),
]


class TextOptions(Body):
    """What is asked of the answer's text."""

    format: TextFormat | None = Field(None, description="json_object and json_schema are enforced token by token")
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, only("medium", "ask for it in a message", "text.verbosity")
    ] = None


class ReasoningOptions(Body):
    """How to think before the answer."""

    effort: Effort | None = Field(
        None, description="how much to think, as far as the chat template knows such a thing; none: not at all"
    )
    summary: Annotated[str | None, Ignored("reasoning is told as it is")] = None
    generate_summary: Annotated[str | None, Ignored("reasoning is told as it is")] = None
    context: Annotated[str | None, Ignored("there is no earlier reasoning to keep")] = None
    mode: Annotated[Literal["standard"] | None, only("standard", "there is one mode", "reasoning.mode")] = None


class ResponsesRequest(
    ParallelToolUse,
    OpenAIRequest,
    refuses=(
        "conversation",
        "prompt",
        "max_tool_calls",
        "moderation",
        "context_management",
        "access_programs",
        "image",
    ),
):
    """Answer a conversation."""

    input: str | InputItems = Field(
        description="what the user says, or items: message, function_call, function_call_output"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    stream_options: ResponseStreamOptions | None = Field(None, description="only with stream")
    max_output_tokens: StrictInt | None = Field(
        None, ge=1, description="most new tokens; the room in the slot also bounds it"
    )
    include: list[str] | None = Field(
        None, description=f'"{LOGPROBS}": report the log-probability of each token; "{_REASONING}": it is told as it is'
    )
    top_logprobs: StrictInt | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="and of this many likeliest ones; only with include"
    )
    text: TextOptions | None = Field(None, description="what the answer must look like")
    tools: list[AnyTool] | None = Field(
        None,
        max_length=128,
        description="functions that the model may call; tools of other types are left out, with a warning",
    )
    tool_choice: Annotated[ToolChoiceMode | ChosenFunction | None, only_types("tool_choice", "function")] = Field(
        None, description="whether to call a tool, or which; required and named calls are enforced token by token"
    )
    reasoning: ReasoningOptions | None = Field(None, description="for models that think before they answer")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")
    parse_special_tokens: StrictBool | None = PARSE_SPECIAL_TOKENS
    truncation: Annotated[
        Literal["auto", "disabled"] | None, only("disabled", "leave out of input what may be forgotten")
    ] = Field(None, description='only "disabled": a conversation that is too long is an error')
    store: StrictBool | None = Field(
        None, description="true: keep the reply in memory for a while, for GET and previous_response_id"
    )
    previous_response_id: str | None = Field(
        None, description="a stored response whose conversation this one goes on with; instructions are not kept"
    )
    client_metadata: Annotated[dict[str, Any] | None, FOR_STATISTICS] = None
    background: Annotated[StrictBool | None, only(False, "there is no way to come back for a reply")] = Field(
        None, description="only false"
    )

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        for wanted in include or []:
            if wanted not in (LOGPROBS, _REASONING):
                raise InvalidRequest(
                    f"include: {wanted!r} is not supported; known here: {LOGPROBS}, {_REASONING}", "include"
                )
        return include

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidRequest(f'top_logprobs is only allowed with include: ["{LOGPROBS}"]', "top_logprobs")
        return self

    _earlier: list[Message] = PrivateAttr(default_factory=list)

    def going_on_with(self, earlier: list[Message]) -> Self:
        """The same request with the messages before `input` that `previous_response_id` stands for."""
        body = self.model_copy()
        body._earlier = earlier
        return body

    @property
    def field_names(self) -> dict[str, str]:
        """See `ChatCompletionRequest`, as for all that follows."""
        return {"messages": "input", "max_tokens": "max_output_tokens"}

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])

    def wanted_structure(self) -> WantedStructure | None:
        wanted = None if self.text is None or self.text.format is None else self.text.format.structure()
        return the_only_one(text=wanted, structured_outputs=self.structured_outputs)

    def template_messages(self) -> list[Message]:
        lead: list[Message] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return lead + self.spoken_messages()

    def spoken_messages(self) -> list[Message]:
        """What was said, without the instructions, which hold for one response."""
        if isinstance(self.input, str):
            return [*self._earlier, {"role": "user", "content": self.input}]
        return template_messages(self.input, self._earlier)

    def chat_options(self, shows_tools: bool = True) -> ChatOptions:
        return ChatOptions(
            tools=[tool.as_template_input() for tool in self.callable_tools] if shows_tools else [],
            template_arguments=effort_arguments(self.effort) | (self.chat_template_kwargs or {}),
            parse_special_tokens=bool(self.parse_special_tokens),
        )

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def effort_field(self) -> str:
        return "reasoning.effort"

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return self.sampling_params(
            defaults,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
        )


Conversation = ChatCompletionRequest | ResponsesRequest | MessagesRequest
"""The bodies that ask for the answer to a conversation."""
