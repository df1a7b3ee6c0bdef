"""The items of a conversation in `/v1/responses`, and the messages that they become."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, TypeAdapter

from chairlift.api.store import StoredReply
from chairlift.api.wire.body import Body, Written
from chairlift.api.wire.checks import OneOf, by_type, only, only_types, type_of
from chairlift.api.wire.conversation import (
    ARGUMENTS,
    is_of_assistant,
    template_call,
    template_message,
)
from chairlift.api.wire.custom_tools import CalledCustomTool
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.left_out import Attachment, attachments
from chairlift.api.wire.marks import Ignored, Refused
from chairlift.engine.text.chat_template import Message

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
    """Holds what the user or the system said."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: str | list[Part]
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[ItemStatus | None, _COMES_ALONG] = None

    def as_template_input(self) -> Message:
        return template_message(self.role, _joined(self.content))


class WrittenMessage(Written):
    """Repeats what the model said."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: str | list[Part]

    def as_template_input(self) -> Message:
        return template_message("assistant", _joined(self.content))


class ReasoningText(Written):
    """A piece of what a model thought."""

    text: str | None = None


class Reasoning(Written):
    """Repeats what a model thought before what follows, for templates that show it."""

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
    """Brings what a call returned."""

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
    """Brings what a call of a custom tool returned."""

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


InputItems = list[InputItem]
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(InputItems)


def messages_of(stored: StoredReply) -> list[Message]:
    """The conversation up to and including the stored response."""
    output = _ITEMS.validate_python(json.loads(stored.reply)["output"])
    return template_messages(output, json.loads(stored.conversation))
