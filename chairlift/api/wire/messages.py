"""The messages of a conversation, the tools that an assistant may call, and how both are rendered."""

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, model_validator

from chairlift.api.tools import FunctionSpec
from chairlift.api.wire.base import Body, Ignored, Refused
from chairlift.api.wire.checks import only_types
from chairlift.engine.tokenizer import ChatOptions, Message
from chairlift.errors import InvalidRequest

_MODEL_WROTE_IT = Ignored("comes along when a reply is sent back")
_FUNCTION_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class TextPart(Body):
    """A piece of a message. Only text is understood here."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if (self.text if self.type == "text" else self.refusal) is None:
            raise InvalidRequest(f"a part of type {self.type} needs the field {self.type}", "messages")
        return self


class CalledFunction(Body):
    """What an assistant called, and with which arguments."""

    name: str
    arguments: str = Field(description="a JSON object as text")
    parsed_arguments: Annotated[Any, _MODEL_WROTE_IT] = None


class ToolCall(Body):
    """One call that an assistant made."""

    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    index: Annotated[Any, _MODEL_WROTE_IT] = None

    def as_template_input(self) -> dict[str, Any]:
        """With the arguments as an object, which is what templates print. InvalidRequest if they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(
                f"messages: the arguments of tool call {self.id} are not a JSON object:"
                f" {self.function.arguments[:80]!r}",
                "messages",
            )
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Body):
    """One message. An assistant's may hold tool calls instead of content; a tool's says which call it answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[TextPart, only_types("messages", "text", "refusal")]] | None = None
    name: str | None = Field(None, description="who speaks, for templates that show it")
    tool_calls: list[ToolCall] | None = Field(None, description="of an assistant")
    tool_call_id: str | None = Field(None, description="of a tool: the call that this answers")
    refusal: Annotated[str | None, _MODEL_WROTE_IT] = None
    annotations: Annotated[list[Any] | None, _MODEL_WROTE_IT] = None
    parsed: Annotated[Any, _MODEL_WROTE_IT] = None
    audio: Annotated[None, Refused("only text is understood here")] = None
    function_call: Annotated[None, Refused("deprecated; use tool_calls")] = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise InvalidRequest(f"messages: a message with role {self.role} needs content", "messages")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequest("messages: only an assistant's message may have tool_calls", "messages")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise InvalidRequest("messages: tool_call_id belongs to messages with role tool", "messages")
        return self

    def as_template_input(self) -> Message:
        """What chat templates expect: the content as one text, and `system` for its newer name `developer`."""
        role = "system" if self.role == "developer" else self.role
        message: Message = {"role": role, "content": self._text()}
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=_FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; left out: any arguments")
    strict: StrictBool | None = Field(None, description="true: calls are made to fit the schema, token by token")

    def spec(self) -> FunctionSpec:
        """Without the frame."""
        return FunctionSpec(self.name, self.parameters or {}, bool(self.strict), self.description)


class Tool(Body):
    """A tool: here always a function."""

    type: Literal["function"]
    function: Function

    def as_template_input(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Rendering(Body):
    """How a conversation becomes a prompt."""

    messages: list[ChatMessage]
    tools: list[Tool] | None = Field(None, max_length=128, description="functions that the model may call")
    add_generation_prompt: StrictBool | None = Field(
        None, description="end the prompt with the beginning of an assistant's turn (the default)"
    )
    continue_final_message: StrictBool | None = Field(
        None, description="leave the last message open, for the model to go on with it; not with add_generation_prompt"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        return self

    def template_messages(self) -> list[Message]:
        return [message.as_template_input() for message in self.messages]

    def chat_options(self, shows_tools: bool = True) -> ChatOptions:
        """What the template is told beside the messages."""
        is_continued = bool(self.continue_final_message)
        tools = self.tools if shows_tools else None
        return ChatOptions(
            tools=[tool.as_template_input() for tool in tools or []],
            add_generation_prompt=not is_continued
            if self.add_generation_prompt is None
            else self.add_generation_prompt,
            continue_final_message=is_continued,
            template_arguments=self.chat_template_kwargs or {},
        )
