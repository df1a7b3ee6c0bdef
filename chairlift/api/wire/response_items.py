"""The items that a conversation is made of in `/v1/responses`, and the messages that they become."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, Tag

from chairlift.api.wire.base import Body, Ignored, Written, by_type, only, only_types, type_of
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.messages import AssistantTurn, CalledFunction, ChatMessage, ToolCall
from chairlift.engine.text.tokenizer import Message
from chairlift.errors import InvalidRequest

ItemStatus = Literal["in_progress", "completed", "incomplete"]

_COMES_ALONG = Ignored("comes along when an item of a reply is sent back")
_Caller = Annotated[dict[str, Any] | None, only({"type": "direct"}, "calls are made by the model itself")]


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
    """What the model declined with."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Part = Annotated[
    Annotated[InputText, Tag("InputText")]
    | Annotated[WrittenText, Tag("WrittenText")]
    | Annotated[Refusal, Tag("Refusal")],
    by_type(input_text="InputText", output_text="WrittenText", refusal="Refusal"),
    only_types("input", "input_text", "output_text", "refusal"),
]
OutputPart = Annotated[InputText, only_types("input", "input_text")]


class InputMessage(Body):
    """What the user or the system said."""

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: str | list[Part]
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[ItemStatus | None, _COMES_ALONG] = None

    def as_template_input(self) -> Message:
        return ChatMessage(role=self.role, content=_joined(self.content)).as_template_input()


class WrittenMessage(Written):
    """What the model said."""

    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: str | list[Part]

    def as_template_input(self) -> Message:
        return AssistantTurn(role="assistant", content=_joined(self.content)).as_template_input()


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


class InputCall(Written, refuses=("namespace",)):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="a JSON object as text")
    caller: _Caller = None
    async_: Annotated[StrictBool | None, only(False, "calls wait for their outputs", "async")] = Field(
        None, alias="async"
    )

    def as_template_input(self) -> dict[str, Any]:
        """See `ToolCall`."""
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return ToolCall(id=self.call_id, function=function).as_template_input()


class InputCallOutput(Body, refuses=("namespace",)):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[OutputPart]
    id: Annotated[str | None, _COMES_ALONG] = None
    status: Annotated[ItemStatus | None, _COMES_ALONG] = None
    name: Annotated[str | None, Ignored("call_id says which call this answers")] = None
    caller: _Caller = None

    def as_template_input(self) -> Message:
        return ChatMessage(role="tool", content=_joined(self.output), tool_call_id=self.call_id).as_template_input()


def _form_of(item: Any) -> str | None:
    """The class of an item; see `by_type`."""
    if not isinstance(item, dict):
        return None
    match type_of(item):
        case "message":
            return "WrittenMessage" if item.get("role") == "assistant" else "InputMessage"
        case "reasoning":
            return "Reasoning"
        case "function_call":
            return "InputCall"
        case _:
            return "InputCallOutput"


InputItem = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[WrittenMessage, Tag("WrittenMessage")]
    | Annotated[Reasoning, Tag("Reasoning")]
    | Annotated[InputCall, Tag("InputCall")]
    | Annotated[InputCallOutput, Tag("InputCallOutput")],
    Discriminator(_form_of),
    only_types("input", "message", "reasoning", "function_call", "function_call_output"),
]
Item = InputMessage | WrittenMessage | Reasoning | InputCall | InputCallOutput


def _joined(content: str | Sequence[InputText | WrittenText | Refusal]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def template_messages(items: Sequence[Item], earlier: Sequence[Message] = ()) -> list[Message]:
    """Items as the messages that chat templates know: an assistant's calls, in a row, belong to one message.

    `earlier`: messages of the same conversation, which come first. InvalidRequest if an output answers no earlier call.
    """
    messages = list(earlier)
    known_calls = {call["id"] for message in earlier for call in message.get("tool_calls", ())}
    reasoning = ""
    for item in items:
        match item:
            case Reasoning():
                reasoning = item.text
                continue
            case InputCall():
                known_calls.add(item.call_id)
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                messages[-1].setdefault("tool_calls", []).append(item.as_template_input())
            case InputCallOutput() if item.call_id not in known_calls:
                raise InvalidRequest(
                    f"input: no function_call with call_id {item.call_id!r} precedes its output", "input"
                )
            case _:
                messages.append(item.as_template_input())
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = messages[-1].get("reasoning_content", "") + reasoning
        reasoning = ""
    return messages
