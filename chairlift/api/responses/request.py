"""The body of `/v1/responses`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, field_validator, model_validator

from chairlift.api.answers.structure import WantedStructure, the_only_one
from chairlift.api.responses.formats import TextFormat
from chairlift.api.responses.items import InputCallOutput, InputItems, template_messages
from chairlift.api.responses.tools import ChosenFunction, FunctionTool, TextTool
from chairlift.api.wire.body import Body
from chairlift.api.wire.checks import only, only_types
from chairlift.api.wire.conversation import PARSE_SPECIAL_TOKENS, Effort, ParallelToolUse, ToolChoiceMode
from chairlift.api.wire.generation import FOR_STATISTICS, STATELESS, OpenAIRequest
from chairlift.api.wire.marks import Ignored, LeftOut, Refused
from chairlift.api.wire.tools import LeftOutTool, known_or_left_out
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import MAX_LOGPROBS, SamplingParams

LOGPROBS = "message.output_text.logprobs"
_REASONING = "reasoning.encrypted_content"
_INCLUDABLE = {
    *(LOGPROBS, _REASONING),
    # What belongs to built-in tools and images, of which a reply has none.
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
}

AnyTool = Annotated[FunctionTool | TextTool | LeftOutTool, known_or_left_out(FunctionTool, "function", custom=TextTool)]


class TextOptions(Body):
    """Options of the answer's text."""

    format: TextFormat | None = Field(None, description="json_object and json_schema are enforced token by token")
    verbosity: Annotated[Literal["low", "medium", "high"] | None, LeftOut("ask for it in a message", ("medium",))] = (
        None
    )


class ReasoningOptions(Body):
    """Says how to think before the answer."""

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
        """Returns what was said, without the instructions, which hold for one response."""
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
