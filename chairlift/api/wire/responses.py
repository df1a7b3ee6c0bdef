"""`/v1/responses`: the items of a conversation, the messages that they become, and the request."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, field_validator, model_validator

from chairlift.api.answers.structure import WantedStructure, the_only_one
from chairlift.api.wire.body import Body, Written
from chairlift.api.wire.checks import OneOf, by_type, only, only_types, type_of
from chairlift.api.wire.custom_tools import CalledCustomTool, TextTool
from chairlift.api.wire.generation import (
    FOR_CACHING,
    FOR_STATISTICS,
    STATELESS,
    OpenAIRequest,
    TextFormat,
)
from chairlift.api.wire.left_out import Attachment, attachments
from chairlift.api.wire.marks import Ignored, LeftOut, Refused
from chairlift.api.wire.messages import (
    ARGUMENTS,
    PARSE_SPECIAL_TOKENS,
    Effort,
    ParallelToolUse,
    ToolChoiceMode,
    is_of_assistant,
    template_call,
    template_message,
)
from chairlift.api.wire.tools import ChosenFunction, FunctionTool, LeftOutTool, known_or_left_out
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, SamplingParams

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_COMES_ALONG = Ignored("part of an item of a reply that is sent back")
_NAMESPACE = "functions have no namespaces here"
_Caller = Annotated[dict[str, Any] | None, only({"type": "direct"}, "only the model itself calls tools")]


class InputText(Body):
    """A piece of what the model reads."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, FOR_CACHING] = None


class WrittenText(Written):
    """A piece of what the model wrote."""

    type: Literal["output_text"]
    text: str


class Refusal(Body):
    """The words with which the model declined."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    InputText | WrittenText | Refusal, by_type("input", input_text=InputText, output_text=WrittenText, refusal=Refusal)
]
OutputPart = Annotated[
    InputText | Attachment,
    by_type("input", input_text=InputText, **attachments("input_image", "input_file")),
]


class InputMessage(Body):
    """What the user or the system said."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: str | list[Part]
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[ItemStatus | None, _COMES_ALONG] = None

    def as_template_input(self) -> Message:
        return template_message(self.role, _joined(self.content))


class WrittenMessage(Written):
    """What the model said."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: str | list[Part]

    def as_template_input(self) -> Message:
        return template_message("assistant", _joined(self.content))


class ReasoningText(Written):
    """A piece of what a model thought."""

    text: str | None = None


class Reasoning(Written):
    """What a model thought before what follows, for templates that show it."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None

    @property
    def text(self) -> str:
        return "".join(part.text or "" for part in self.content or [])


class InputCall(Written):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Any = Field(None, description=ARGUMENTS)
    caller: _Caller = None
    async_: Annotated[StrictBool | None, only(False, "every call waits for its output", "async")] = Field(
        None, alias="async"
    )
    namespace: Annotated[None, Refused(_NAMESPACE)] = None

    def as_template_input(self) -> Message:
        return template_message("assistant", "", tool_calls=[template_call(self.call_id, self.name, self.arguments)])


class InputCallOutput(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[OutputPart] = Field(description="text; the model reads a note in place of images and files")
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[ItemStatus | None, _COMES_ALONG] = None
    name: Annotated[str | None, Ignored("call_id says which call this answers")] = None
    caller: _Caller = None
    namespace: Annotated[None, Refused(_NAMESPACE)] = None

    def as_template_input(self) -> Message:
        return template_message("tool", _joined(self.output), tool_call_id=self.call_id)


class InputCustomCall(CalledCustomTool):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    call_id: str

    def as_template_input(self) -> Message:
        return template_message("assistant", "", tool_calls=[template_call(self.call_id, self.name, self.arguments)])


class InputCustomCallOutput(InputCallOutput):
    """What a call of a custom tool returned."""

    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]  # the two differ in nothing else


Item = InputMessage | WrittenMessage | Reasoning | InputCall | InputCallOutput | InputCustomCall | InputCustomCallOutput
_FORMS: dict[str, type[Body]] = {
    "reasoning": Reasoning,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "custom_tool_call": InputCustomCall,
    "custom_tool_call_output": InputCustomCallOutput,
}


def _form_of(item: Any) -> type[Body] | None:
    if not isinstance(item, dict):
        return None
    if type_of(item) == "message":
        return WrittenMessage if is_of_assistant(item) else InputMessage
    return _FORMS.get(type_of(item))


InputItem = Annotated[Item, OneOf(_form_of), only_types("input", "message", *_FORMS)]


def _joined(content: str | Sequence[InputText | WrittenText | Refusal | Attachment]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def template_messages(items: Sequence[Item], earlier: Sequence[Message] = ()) -> list[Message]:
    """Items as the messages that chat templates know: consecutive calls of the assistant belong to one message.

    `earlier`: messages of the same conversation, which come first.
    """
    messages = list(earlier)
    reasoning = ""
    for item in items:
        if isinstance(item, Reasoning):
            reasoning = item.text
            continue
        message = item.as_template_input()
        if isinstance(item, InputCall | InputCustomCall) and messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            messages.append(message)
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + reasoning
        reasoning = ""
    return messages


# --- the request

LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"
_INCLUDABLE = {
    *(LOGPROBS, _REASONING),
    # What belongs to built-in tools and images, of which a reply has none.
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
}

InputItems = list[InputItem]
AnyTool = Annotated[FunctionTool | TextTool | LeftOutTool, known_or_left_out(FunctionTool, "function", custom=TextTool)]


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = Field(None, description="json_object and json_schema are enforced token by token")
    verbosity: Annotated[Literal["low", "medium", "high"] | None, LeftOut("ask for it in a message", ("medium",))] = (
        None
    )


class ReasoningOptions(Body):
    """How to think before the answer."""

    effort: Effort | None = Field(
        None, description="how much to think, if the chat template supports it; none: not at all"
    )
    summary: Annotated[str | None, Ignored("reasoning is returned in full")] = None
    generate_summary: Annotated[str | None, Ignored("reasoning is returned in full")] = None
    context: Annotated[str | None, Ignored("there is no earlier reasoning to keep")] = None
    mode: Annotated[str | None, LeftOut("there is one mode", ("standard",))] = None


class ResponsesRequest(ParallelToolUse, OpenAIRequest):
    """Answer a conversation."""

    input: str | InputItems = Field(
        description="what the user says, or items: message, function_call, function_call_output, custom_tool_call,"
        " custom_tool_call_output"
    )
    instructions: str | None = Field(None, description="a system message before all others")
    max_output_tokens: StrictInt | None = Field(
        None, ge=1, description="most new tokens, which the context length limits as well"
    )
    include: list[str] | None = Field(
        None,
        description=f'"{LOGPROBS}": report the log-probability of each token; "{_REASONING}": reasoning comes in full;'
        " those of built-in tools and images change nothing",
    )
    top_logprobs: StrictInt | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="also this many of the likeliest tokens; only with include"
    )
    text: TextOptions | None = Field(None, description="what the answer must look like")
    tools: list[AnyTool] | None = Field(
        None,
        max_length=128,
        description="functions and custom tools that the model may call; other types are left out, with a warning",
    )
    tool_choice: Annotated[ToolChoiceMode | ChosenFunction | None, only_types("tool_choice", "function", "custom")] = (
        Field(
            None, description="whether to call a tool, or which; required and named calls are enforced token by token"
        )
    )
    reasoning: ReasoningOptions | None = Field(None, description="for models that think before they answer")
    parse_special_tokens: StrictBool | None = PARSE_SPECIAL_TOKENS
    truncation: Literal["auto", "disabled"] | None = Field(
        None,
        description="auto: the first messages of a conversation that is too long are left out, with a warning;"
        " disabled, the default: it is an error",
    )
    store: StrictBool | None = Field(
        None, description="true: keep the reply in memory for a while, for GET and previous_response_id"
    )
    previous_response_id: str | None = Field(
        None, description="a stored response whose conversation this one goes on with; instructions are not kept"
    )
    max_tool_calls: Annotated[StrictInt | None, Ignored("it counts calls of built-in tools, and there are none")] = None
    context_management: Annotated[
        list[Any] | None, LeftOut("nothing is compacted; leave out of input what the model may forget", ([],))
    ] = None
    client_metadata: Annotated[dict[str, Any] | None, FOR_STATISTICS] = None
    background: Annotated[StrictBool | None, only(False, "a reply cannot be fetched later")] = Field(
        None, description="only false"
    )
    conversation: Annotated[None, Refused(STATELESS)] = None
    prompt: Annotated[None, Refused("no prompts are stored here; send its text")] = None
    moderation: Annotated[None, Refused("there is no moderation here")] = None
    access_programs: Annotated[None, Refused("there are no access programs here")] = None
    image: Annotated[None, Refused("this server reads and writes text only")] = None

    @field_validator("include")
    @classmethod
    def _check_include(cls, include: list[str] | None) -> list[str] | None:
        for wanted in include or []:
            if wanted not in _INCLUDABLE:
                raise InvalidRequest(
                    f"include: {wanted!r} is not supported; known here: {LOGPROBS}, {_REASONING}", "include"
                )
        return include

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> Self:
        if self.top_logprobs and not self.has_logprobs:
            raise InvalidRequest(f'top_logprobs is only allowed with include: ["{LOGPROBS}"]', "top_logprobs")
        return self

    effort_field = "reasoning.effort"
    _earlier: list[Message] = PrivateAttr(default_factory=list)

    def going_on_with(self, earlier: list[Message]) -> Self:
        """The same request with the messages before `input` that `previous_response_id` stands for."""
        body = self.model_copy()
        body._earlier = earlier
        return body

    @property
    def field_names(self) -> dict[str, str]:
        return {"messages": "input", "max_tokens": "max_output_tokens"}

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])

    def wanted_structure(self) -> WantedStructure | None:
        wanted = None if self.text is None or self.text.format is None else self.text.format.structure()
        return the_only_one(text=wanted, structured_outputs=self.structured_outputs)

    @property
    def returned_parts(self) -> Iterable[object]:
        items = () if isinstance(self.input, str) else self.input
        outputs = [item.output for item in items if isinstance(item, InputCallOutput)]
        return (part for output in outputs if not isinstance(output, str) for part in output)

    def template_messages(self) -> list[Message]:
        lead: list[Message] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        return lead + self.spoken_messages()

    def spoken_messages(self) -> list[Message]:
        """What was said, without the instructions, which hold for one response."""
        if isinstance(self.input, str):
            return [*self._earlier, {"role": "user", "content": self.input}]
        return template_messages(self.input, self._earlier)

    def chat_options(self) -> ChatOptions:
        return replace(super().chat_options(), parse_special_tokens=bool(self.parse_special_tokens))

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return self.sampling_params(
            defaults,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if self.has_logprobs else None,
        )
