"""The items that a conversation is made of in `/v1/responses`, and the messages that they become."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, Tag

from chairlift.api.wire.base import Body, Ignored, Refused
from chairlift.api.wire.caching import FOR_CACHING
from chairlift.api.wire.checks import only, only_types, type_of
from chairlift.api.wire.messages import CalledFunction, ChatMessage, ToolCall
from chairlift.engine.tokenizer import Message
from chairlift.errors import InvalidRequest

Status = Literal["in_progress", "completed", "incomplete"]

_COMES_ALONG = Ignored("comes along when an item of a reply is sent back")
_NO_PROGRAMS = "calls are made by the model itself"
_NO_NAMESPACES = "functions have no namespaces here"


class InputText(Body):
    """A piece of what the model reads."""

    type: Literal["input_text"]
    text: str
    prompt_cache_breakpoint: Annotated[dict[str, Any] | None, FOR_CACHING] = None


class WrittenText(Body):
    """A piece of what the model wrote."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any] | None, _COMES_ALONG] = None
    logprobs: Annotated[list[Any] | None, _COMES_ALONG] = None


class Refusal(Body):
    """What the model declined with."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    InputText | WrittenText | Refusal,
    Discriminator("type"),
    only_types("input", "input_text", "output_text", "refusal"),
]
OutputPart = Annotated[InputText, only_types("input", "input_text")]


class InputMessage(Body):
    """What somebody said."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(fail_fast=True)]
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[Status | None, _COMES_ALONG] = None
    phase: Annotated[Literal["commentary", "final_answer"] | None, _COMES_ALONG] = None

    def as_template_input(self) -> Message:
        return ChatMessage(role=self.role, content=_joined(self.content)).as_template_input()


class InputCall(Body):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="a JSON object as text")
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[Status | None, _COMES_ALONG] = None
    caller: Annotated[dict[str, Any] | None, only({"type": "direct"}, _NO_PROGRAMS)] = None
    namespace: Annotated[None, Refused(_NO_NAMESPACES)] = None
    async_: Annotated[StrictBool | None, only(False, "calls wait for their outputs", "async")] = Field(
        None, alias="async"
    )

    def as_template_input(self) -> dict[str, Any]:
        """See `ToolCall`."""
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return ToolCall(id=self.call_id, function=function).as_template_input()


class InputCallOutput(Body):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[OutputPart], Field(fail_fast=True)]
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[Status | None, _COMES_ALONG] = None
    name: Annotated[str | None, Ignored("call_id says which call this answers")] = None
    caller: Annotated[dict[str, Any] | None, only({"type": "direct"}, _NO_PROGRAMS)] = None
    namespace: Annotated[None, Refused(_NO_NAMESPACES)] = None

    def as_template_input(self) -> Message:
        return ChatMessage(role="tool", content=_joined(self.output), tool_call_id=self.call_id).as_template_input()


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")],
    Discriminator(type_of),
    only_types("input", "message", "function_call", "function_call_output"),
]


def _joined(content: str | Sequence[InputText | WrittenText | Refusal]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def template_messages(items: Sequence[InputMessage | InputCall | InputCallOutput]) -> list[Message]:
    """Items as the messages that chat templates know: an assistant's calls, in a row, belong to one message.

    InvalidRequest if an output answers no earlier call.
    """
    messages: list[Message] = []
    known_calls: set[str] = set()
    for item in items:
        if isinstance(item, InputCall):
            known_calls.add(item.call_id)
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(item.as_template_input())
            continue
        if isinstance(item, InputCallOutput) and item.call_id not in known_calls:
            raise InvalidRequest(f"input: no function_call with call_id {item.call_id!r} precedes its output", "input")
        messages.append(item.as_template_input())
    return messages
