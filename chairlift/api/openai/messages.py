"""The messages of a conversation, as chat completions have them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from chairlift.api.wire.body import Body, Written
from chairlift.api.wire.checks import only, only_types
from chairlift.api.wire.conversation import ARGUMENTS, template_call, template_message
from chairlift.api.wire.custom_tools import CalledCustomTool
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.left_out import Attachment
from chairlift.api.wire.marks import Refused
from chairlift.engine.text.chat_template import Message
from chairlift.errors import InvalidRequest


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
    """Says what an assistant called, and with which arguments."""

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
    """Holds what the system or the user says."""

    role: Literal["system", "developer", "user"]
    content: str | list[Annotated[TextPart, only_types("messages", "text", "refusal")]]
    name: str | None = Field(None, description="the speaker's name, for templates that show it")
    cache_control: Annotated[dict[str, Any] | None, FOR_CACHING] = None
    tool_call_id: Annotated[None, Refused("it belongs to messages with role tool")] = None

    def as_template_input(self) -> Message:
        return template_message(self.role, text_of(self.content), name=self.name)


class AssistantTurn(Written):
    """Repeats what the assistant said or called, as any server may have written it."""

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
