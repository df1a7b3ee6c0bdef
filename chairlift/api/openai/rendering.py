"""Conversations in the shape of chat completions, and how they become a prompt."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StrictBool, model_validator

from chairlift.api.openai.messages import AssistantTurn, ChatMessage, TextPart, text_of, with_call_ids
from chairlift.api.openai.tools import ChatCustomTool, Tool
from chairlift.api.wire.body import Body
from chairlift.api.wire.checks import OneOf, by_type
from chairlift.api.wire.conversation import (
    PARSE_SPECIAL_TOKENS,
    TemplateInput,
    is_of_assistant,
    role_of,
    template_message,
)
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.left_out import Attachment, attachments
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.errors import InvalidRequest

ToolPart = Annotated[
    TextPart | Attachment,
    by_type(
        "messages",
        text=TextPart,
        refusal=TextPart,
        **attachments("image_url", "file", "input_file", "input_audio"),
    ),
]


class ToolMessage(Body):
    """Brings what a tool returned, and says which call that answers."""

    role: Literal["tool"]
    content: str | list[ToolPart] = Field(
        description="text; the model reads a note in place of images, files and audio"
    )
    tool_call_id: str | None = Field(
        None, description="the call that this answers; left out: the first that was not answered"
    )
    name: str | None = Field(None, description="the tool's name, for templates that show it")
    cache_control: Annotated[dict[str, Any] | None, FOR_CACHING] = None

    def as_template_input(self) -> Message:
        return template_message("tool", text_of(self.content), name=self.name, tool_call_id=self.tool_call_id)


def _form_of_message(message: Any) -> type[Body]:
    if is_of_assistant(message):
        return AssistantTurn
    return ToolMessage if role_of(message) == "tool" else ChatMessage


AnyMessage = Annotated[ChatMessage | ToolMessage | AssistantTurn, OneOf(_form_of_message)]
AnyChatTool = Annotated[Tool | ChatCustomTool, by_type("tools", function=Tool, custom=ChatCustomTool)]
Tools = Annotated[
    list[AnyChatTool] | None, Field(max_length=128, description="functions and custom tools that the model may call")
]


class Rendering(TemplateInput):
    """Says how a conversation becomes a prompt."""

    messages: list[AnyMessage]
    tools: Tools = None
    add_generation_prompt: StrictBool | None = Field(
        None, description="end the prompt with the beginning of an assistant's turn (the default)"
    )
    continue_final_message: StrictBool | None = Field(
        None, description="leave the last message open, for the model to go on with it; not with add_generation_prompt"
    )
    parse_special_tokens: StrictBool | None = PARSE_SPECIAL_TOKENS

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
            )
        return self

    @property
    def returned_parts(self) -> Iterable[object]:
        for message in self.messages:
            if isinstance(message, ToolMessage) and not isinstance(message.content, str):
                yield from message.content

    def template_messages(self) -> list[Message]:
        return with_call_ids([message.as_template_input() for message in self.messages])

    def chat_options(self) -> ChatOptions:
        is_continued = bool(self.continue_final_message)
        begins_answer = not is_continued if self.add_generation_prompt is None else self.add_generation_prompt
        return replace(
            super().chat_options(),
            add_generation_prompt=begins_answer,
            continue_final_message=is_continued,
            parse_special_tokens=bool(self.parse_special_tokens),
        )
