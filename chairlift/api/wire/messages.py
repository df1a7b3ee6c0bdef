"""Conversations: messages, tools that an assistant may call, and how both are rendered; for every endpoint."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StrictBool, model_validator

from chairlift.api.answers.functions import FunctionSpec
from chairlift.api.answers.mending import arguments_of
from chairlift.api.wire.body import Body, Written
from chairlift.api.wire.checks import only, only_types
from chairlift.api.wire.custom_tools import CalledCustomTool, check_definitions
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.left_out import Attachment, attachments_warning, tools_warning
from chairlift.api.wire.marks import Refused
from chairlift.api.wire.tools import LeftOutTool
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.errors import InvalidRequest

# --- messages

ARGUMENTS = (
    "an object, or its JSON, which is mended if it was cut or is not quite valid; other values are shown as they are"
)


class TextPart(Body):
    """A piece of a message. Only text is understood here."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    cache_control: Annotated[dict[str, Any] | None, FOR_CACHING] = None
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, FOR_CACHING] = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise InvalidRequest(f"a part of type {self.type} needs the field {self.type}", "messages")
        return self


class WrittenPart(TextPart, Written):
    """A piece of what an assistant said."""


class CalledFunction(Written):
    """What an assistant called, and with which arguments."""

    name: str
    arguments: Any = Field(None, description=ARGUMENTS)


class ToolCall(Written):
    """One call that an assistant made."""

    id: str | None = Field(None, description="left out: results answer calls in their order")
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CalledCustomTool | None = None

    @model_validator(mode="after")
    def _check_called(self) -> Self:
        if (self.function is None) == (self.custom is None):
            raise InvalidRequest("a tool call has a function or, with type custom, a custom tool", "messages")
        return self

    def as_template_input(self) -> dict[str, Any]:
        called = self.custom or self.function
        assert called is not None, "one of them is checked to be there"
        return template_call(self.id or "", called.name, called.arguments)


class ChatMessage(Body):
    """What the system or the user says."""

    role: Literal["system", "developer", "user"]
    content: str | list[Annotated[TextPart, only_types("messages", "text", "refusal")]]
    name: str | None = Field(None, description="the speaker's name, for templates that show it")
    cache_control: Annotated[dict[str, Any] | None, FOR_CACHING] = None
    tool_call_id: Annotated[None, Refused("it belongs to messages with role tool")] = None

    def as_template_input(self) -> Message:
        return template_message(self.role, text_of(self.content), name=self.name)


class AssistantTurn(Written):
    """What the assistant said or called, as any server may have written it."""

    role: Literal["assistant"]
    content: str | list[Annotated[WrittenPart, only_types("messages", "text", "refusal")]] | None = None
    name: str | None = Field(None, description="the speaker's name, for templates that show it")
    reasoning_content: str | None = Field(None, description="for templates that show it")
    reasoning: str | None = Field(None, description="other name of reasoning_content")
    tool_calls: list[ToolCall] | None = None
    images: Annotated[list[Any] | None, only([], "this server takes text only")] = None
    audio: Annotated[None, Refused("this server reads and writes text only")] = None
    function_call: Annotated[None, Refused("deprecated; use tools, tool_choice and tool_calls")] = None

    def as_template_input(self) -> Message:
        calls = [each.as_template_input() for each in self.tool_calls or []]
        more = {
            "reasoning_content": self.reasoning_content or self.reasoning or None,
            "name": self.name,
            "tool_calls": calls or None,
        }
        return template_message("assistant", text_of(self.content), **more)


def text_of(content: str | Sequence[TextPart | Attachment] | None) -> str:
    """All parts as one text."""
    if isinstance(content, str):
        return content
    return "".join(
        part.text if isinstance(part, Attachment) else part.text or part.refusal or "" for part in content or []
    )


def template_message(role: str, content: str, **more: Any) -> Message:
    """What chat templates expect: `system` for its newer name `developer`, and nothing that is None."""
    given = {name: value for name, value in more.items() if value is not None}
    return {"role": "system" if role == "developer" else role, "content": content, **given}


def template_call(call_id: str, name: str, written: object) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates print."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments_of(written)}}


def with_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Gives ids to calls without one, and to results without one those of the calls that they answer, in order: some
    templates need them.
    """
    unanswered: list[str] = []
    known: list[Message] = []
    for index, message in enumerate(messages):
        calls = [
            call if call["id"] else {**call, "id": f"call_{index}_{number}"}
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        unanswered = [call["id"] for call in calls] or unanswered
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        if message["role"] == "tool":
            answered = message.get("tool_call_id") or next(iter(unanswered), f"call_{index}")
            unanswered = [each for each in unanswered if each != answered]
            more["tool_call_id"] = answered
        known.append({**message, **more})
    return known


def role_of(message: Any) -> Any:
    """Who said it; `message`: as it was parsed from JSON, or a model."""
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


def is_of_assistant(message: Any) -> bool:
    """True if the assistant said it; `message`: see `role_of`."""
    return bool(role_of(message) == "assistant")


# --- which tools are called, and how much to think

ToolChoiceMode = Literal["none", "auto", "required"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


# --- how both become a prompt


def effort_arguments(effort: Effort | None) -> dict[str, Any]:
    """The variables of chat templates that say how much to think."""
    if effort is None:
        return {}
    if effort == "none":
        return {"enable_thinking": False}
    return {"enable_thinking": True, "reasoning_effort": "xhigh" if effort == "max" else effort}


class TemplateInput(Body):
    """What chat templates get of a body. Endpoints have shapes of their own for it."""

    tools: Sequence[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")

    effort_field: ClassVar[str] = ""  # the field that holds `effort`

    @property
    def effort(self) -> Effort | None:
        """How much to think, for endpoints that refuse what the model cannot do."""
        return None

    @property
    def field_names(self) -> dict[str, str]:
        """Names of fields in shared checks -> the client's names, where they differ."""
        return {}

    @property
    def callable_functions(self) -> list[FunctionSpec]:
        """The supported tools."""
        return [tool.spec() for tool in self.tools or [] if not isinstance(tool, LeftOutTool)]

    @property
    def left_out(self) -> list[str]:
        """The types of the unsupported tools."""
        return [tool.type for tool in self.tools or [] if isinstance(tool, LeftOutTool)]

    @property
    def shown_functions(self) -> list[FunctionSpec]:
        """The tools that the template shows, which is before the conversation."""
        return [] if self.call_mode == "none" else self.callable_functions

    @property
    def returned_parts(self) -> Iterable[object]:
        """The parts of what tools returned, and others that come with them."""
        return ()

    @property
    def warnings(self) -> list[str]:
        left_out = tools_warning(self.left_out, not self.callable_functions)
        unenforced = [each for function in self.callable_functions for each in function.left_out]
        return [*super().warnings, *left_out, *unenforced, *attachments_warning(self.returned_parts)]

    @property
    def call_mode(self) -> ToolChoiceMode:
        """Whether the answer may, must or must not call."""
        return "auto"

    def thinking_arguments(self) -> dict[str, Any]:
        """The template's variables that say how much to think."""
        return effort_arguments(self.effort)

    def template_messages(self) -> list[Message]:
        """The conversation. InvalidRequest if it is not a valid one."""
        raise NotImplementedError

    def chat_options(self) -> ChatOptions:
        """The template's variables beside the messages, without tools that must not be called."""
        return ChatOptions(
            tools=[function.as_template_input() for function in self.shown_functions],
            template_arguments=self.thinking_arguments() | (self.chat_template_kwargs or {}),
        )


class ToolUse(TemplateInput):
    """Which tools must be called."""

    tool_choice: Any = None

    @model_validator(mode="after")
    def _check_tool_choice(self) -> Self:
        check_definitions(self.tools or ())
        if self.call_mode == "required" and not self.callable_functions:
            why = "".join(f": {each}" for each in tools_warning(self.left_out, were_all=True))
            raise InvalidRequest(f"tool_choice is only allowed with tools{why}", "tool_choice")
        if self.chosen_function is not None and not self.functions_to_call():
            raise InvalidRequest(f"tool_choice: there is no tool {self.chosen_function!r}", "tool_choice")
        return self

    @property
    def call_mode(self) -> ToolChoiceMode:
        return "required" if self.chosen_function is not None else self.tool_choice or "auto"

    @property
    def chosen_function(self) -> str | None:
        """The name of the one function that must be called, if there is one."""
        name: str | None = getattr(self.tool_choice, "name", None)
        return name

    @property
    def is_parallel(self) -> bool:
        """Whether an answer may hold several calls."""
        raise NotImplementedError

    def functions_to_call(self) -> list[FunctionSpec]:
        """The functions that the model may call, according to `tool_choice`; empty if it must not call any."""
        if self.call_mode == "none":
            return []
        chosen = self.chosen_function
        return [spec for spec in self.callable_functions if chosen in (None, spec.name)]


class ParallelToolUse(ToolUse):
    """The same as OpenAI's endpoints say it."""

    parallel_tool_calls: StrictBool | None = Field(None, description="false: at most one call")

    @property
    def is_parallel(self) -> bool:
        return self.parallel_tool_calls is not False


PARSE_SPECIAL_TOKENS = Field(None, description="special tokens that messages contain are special tokens, not text")
