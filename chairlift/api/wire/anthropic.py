"""`/v1/messages` and `/v1/messages/count_tokens`, as Anthropic's Messages API specifies them.

Unsupported fields that would change the answer are refused by name; hints that clients send with every request are
accepted. The model's name, sampling parameters beyond the specification and scheduling options are those of the other
endpoints.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from chairlift.api.tools.grammars import FunctionSpec
from chairlift.api.wire import Body, Ignored, Label, OneOf, Written, by_type, only, only_types
from chairlift.api.wire.generation import (
    FOR_CACHING,
    SENDER,
    GenerationRequest,
    WantedStructure,
    make_structure,
    the_only_one,
)
from chairlift.api.wire.messages import (
    LeftOutTool,
    ToolChoiceMode,
    ToolUse,
    check_calls,
    effort_arguments,
    is_of_assistant,
    known_or_left_out,
    template_message,
)
from chairlift.engine.text.tokenizer import ChatOptions, Message
from chairlift.errors import InvalidRequest
from chairlift.params import SamplingParams, String

# --- turns

CacheControl = Annotated[dict[str, Any] | None, FOR_CACHING]


class TextBlock(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, Ignored("part of a reply that is sent back")] = None


class ToolResultBlock(Body):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock, only_types("messages", "text")]] | None = None
    is_error: StrictBool | None = Field(None, description="true: the model reads the content behind the word Error")
    cache_control: CacheControl = None

    def as_template_input(self) -> Message:
        content = joined(self.content or [])
        return template_message(
            "tool", f"Error: {content}" if self.is_error else content, tool_call_id=self.tool_use_id
        )


class ThinkingBlock(Written):
    """What the model thought before what follows, for templates that show it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Written):
    """Encrypted thoughts of another server's model; they are left out."""

    type: Literal["redacted_thinking"]


class WrittenTextBlock(Written):
    """A piece of what the model said."""

    type: Literal["text"]
    text: str


class ToolUseBlock(Written):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(description="the arguments")

    def as_template_input(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


UserBlock = Annotated[TextBlock | ToolResultBlock, by_type("messages", text=TextBlock, tool_result=ToolResultBlock)]
AssistantBlock = Annotated[
    WrittenTextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    by_type(
        "messages",
        text=WrittenTextBlock,
        thinking=ThinkingBlock,
        redacted_thinking=RedactedThinkingBlock,
        tool_use=ToolUseBlock,
    ),
]


class UserTurn(Body):
    """What the user said, and what calls returned; or what the system says in the middle of a conversation."""

    role: Literal["user", "system"]
    content: str | list[UserBlock]

    def as_template_input(self) -> list[Message]:
        """A message for each block, in order; see `merged`."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        return [
            block.as_template_input()
            if isinstance(block, ToolResultBlock)
            else {"role": self.role, "content": block.text}
            for block in self.content
        ]


class ModelTurn(Written):
    """What the model thought, said and called."""

    role: Literal["assistant"]
    content: str | list[AssistantBlock]

    def as_template_input(self) -> list[Message]:
        """One message."""
        blocks = [] if isinstance(self.content, str) else self.content
        texts = [block for block in blocks if isinstance(block, WrittenTextBlock)]
        thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        calls = [block.as_template_input() for block in blocks if isinstance(block, ToolUseBlock)]
        content = self.content if isinstance(self.content, str) else joined(texts)
        more = {"reasoning_content": thoughts or None, "tool_calls": calls or None}
        return [template_message("assistant", content, **more)]


Turn = Annotated[UserTurn | ModelTurn, OneOf(lambda turn: ModelTurn if is_of_assistant(turn) else UserTurn)]


def joined(content: str | Sequence[TextBlock | WrittenTextBlock]) -> str:
    """Joins blocks by line breaks: clients cut blocks where a new line would begin."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def merged(messages: Iterable[Message]) -> list[Message]:
    """Merges consecutive turns of one speaker, because many templates require alternating ones."""
    turns: list[Message] = []
    for role, run in groupby(messages, key=itemgetter("role")):
        turn = list(run)
        turns += turn if role == "tool" else [_as_one(role, turn)]
    return turns


def _as_one(role: str, turns: Sequence[Message]) -> Message:
    content = "\n".join(turn["content"] for turn in turns if turn["content"])
    thoughts = "\n".join(turn["reasoning_content"] for turn in turns if "reasoning_content" in turn)
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    return template_message(role, content, reasoning_content=thoughts or None, tool_calls=calls or None)


# --- tools


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of an object")
    strict: StrictBool | None = Field(None, description="true: calls are made to fit the schema, token by token")
    cache_control: CacheControl = None
    input_examples: Annotated[list[Any] | None, Ignored("put examples into the description")] = None
    eager_input_streaming: Annotated[StrictBool | None, Ignored("arguments are always streamed")] = None
    defer_loading: Annotated[StrictBool | None, Ignored("the model sees all tools from the beginning")] = None
    allowed_callers: Annotated[list[str] | None, only(["direct"], "only the model itself calls tools")] = None

    def spec(self) -> FunctionSpec:
        return FunctionSpec(self.name, self.input_schema, self.strict, self.description)


AnyTool = Annotated[CustomTool | LeftOutTool, known_or_left_out(CustomTool, None, "custom")]


_CALL_MODES: dict[str, ToolChoiceMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class ToolChoice(Body):
    """Whether to call a tool, or which; any and tool are enforced token by token."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, description="the tool's name; only with type tool")
    disable_parallel_tool_use: StrictBool | None = Field(None, description="true: at most one call")

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise InvalidRequest("tool_choice: name goes with type tool", "tool_choice")
        return self


# --- requests


class Thinking(Body):
    """Whether to think before the answer, as far as the chat template knows such a thing."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[StrictInt | None, Ignored("max_tokens bounds thoughts and answer together")] = None
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking blocks are sent without their text"
    )


class OutputFormat(Body):
    """What the answer must look like, enforced token by token."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="JSON Schema")


class OutputConfig(Body):
    """How to answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="how much to think, if the chat template supports it"
    )
    format: OutputFormat | None = None
    task_budget: Annotated[dict[str, Any] | None, Ignored("max_tokens bounds an answer")] = None


class RequestMetadata(Body):
    """What is known of the request's sender."""

    user_id: Label | None = Field(None, description=SENDER)


class CountTokensRequest(ToolUse):
    """A conversation whose tokens are to be counted."""

    model: str | None = Field(None, description="the served model's name; left out: the one there is")
    messages: list[Turn] = Field(
        description="turns of the user and the assistant; an assistant's turn at the end is continued"
    )
    system: str | list[Annotated[TextBlock, only_types("system", "text")]] | None = Field(
        None, description="the system message"
    )
    tools: list[AnyTool] | None = Field(
        None, max_length=512, description="tools that the model may call; other types are left out, with a warning"
    )
    tool_choice: ToolChoice | None = Field(None, description="whether to call a tool, or which")
    thinking: Thinking | None = Field(None, description="for models that think before they answer")
    output_config: OutputConfig | None = Field(
        None, description="what the answer must look like, and how much to think"
    )
    cache_control: CacheControl = None
    context_management: Annotated[
        dict[str, Any] | None, Ignored("nothing is cleared; a conversation that is too long is an error")
    ] = None
    speed: Annotated[Literal["standard", "fast"] | None, Ignored("there is one speed")] = None
    user_profile_id: Annotated[Label | None, Ignored("metadata.user_id says who sent the request")] = None
    workspace_id: Annotated[Label | None, Ignored("there are no workspaces")] = None
    billing_policy: Annotated[dict[str, Any] | None, Ignored("nothing is billed")] = None

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.is_continued and "tool_calls" in self.messages[-1].as_template_input()[-1]:
            raise InvalidRequest("messages: the last turn calls tools, and their results are missing", "messages")
        return self

    @property
    def call_mode(self) -> ToolChoiceMode:
        return "auto" if self.tool_choice is None else _CALL_MODES[self.tool_choice.type]

    @property
    def is_parallel(self) -> bool:
        return self.tool_choice is None or not self.tool_choice.disable_parallel_tool_use

    @property
    def is_continued(self) -> bool:
        """Whether the answer continues the assistant's last turn."""
        return bool(self.messages) and isinstance(self.messages[-1], ModelTurn)

    def template_messages(self) -> list[Message]:
        lead: list[Message] = [] if not self.system else [{"role": "system", "content": joined(self.system)}]
        messages = merged([*lead, *(message for turn in self.messages for message in turn.as_template_input())])
        check_calls(messages, "messages: no tool_use with id {!r} precedes its tool_result")
        return messages

    def chat_options(self) -> ChatOptions:
        is_continued = self.is_continued
        return replace(
            super().chat_options(), add_generation_prompt=not is_continued, continue_final_message=is_continued
        )

    def thinking_arguments(self) -> dict[str, Any]:
        """Refuses nothing: clients say how much to think with every request, whatever the model."""
        if self.thinking is not None and self.thinking.type == "disabled":
            return effort_arguments("none")
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None:
            return effort_arguments("xhigh" if effort == "max" else effort)
        return {} if self.thinking is None else {"enable_thinking": True}


class MessagesRequest(CountTokensRequest, GenerationRequest):
    """Answer a conversation."""

    max_tokens: StrictInt = Field(
        ge=0,
        description="most new tokens, which the context length limits as well; 0: only compute the prompt",
    )
    stop_sequences: list[String] | None = Field(None, description="strings that end the text and are not part of it")
    metadata: RequestMetadata | None = Field(None, description="who sent the request")
    service_tier: Annotated[Label | None, Ignored("there is one tier")] = None
    inference_geo: Annotated[Label | None, Ignored("there is one place")] = None
    diagnostics: Annotated[dict[str, Any] | None, Ignored("usage reports what was reused")] = None

    @property
    def sender(self) -> str:
        return (self.metadata.user_id if self.metadata is not None else None) or ""

    def wanted_structure(self) -> WantedStructure | None:
        form = None if self.output_config is None else self.output_config.format
        wanted = None if form is None else make_structure("output_config", json=form.schema_)
        return the_only_one(output_config=wanted, structured_outputs=self.structured_outputs)

    def params(self, defaults: SamplingParams) -> SamplingParams:
        return self.sampling_params(defaults, stop=self.stop_sequences)
