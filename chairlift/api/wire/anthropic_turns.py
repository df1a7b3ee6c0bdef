"""The turns that a conversation is made of in `/v1/messages`, and the messages that they become."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StrictBool, Tag

from chairlift.api.wire.base import Body, Ignored, Written, by_type, only_types
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.messages import is_of_assistant
from chairlift.engine.text.tokenizer import Message
from chairlift.errors import InvalidRequest

CacheControl = Annotated[dict[str, Any] | None, FOR_CACHING]


class TextBlock(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, Ignored("comes along when a reply is sent back")] = None


class ToolResultBlock(Body):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock, only_types("messages", "text")]] | None = None
    is_error: StrictBool | None = Field(None, description="true: the model reads the content behind the word Error")
    cache_control: CacheControl = None

    def as_template_input(self) -> Message:
        content = joined(self.content or [])
        return {
            "role": "tool",
            "tool_call_id": self.tool_use_id,
            "content": f"Error: {content}" if self.is_error else content,
        }


class ThinkingBlock(Written):
    """What the model thought before what follows, for templates that show it."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Written):
    """What another server's model thought, which nobody else can read; it is left out."""

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


UserBlock = Annotated[
    Annotated[TextBlock, Tag("TextBlock")] | Annotated[ToolResultBlock, Tag("ToolResultBlock")],
    by_type(text="TextBlock", tool_result="ToolResultBlock"),
    only_types("messages", "text", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[WrittenTextBlock, Tag("WrittenTextBlock")]
    | Annotated[ThinkingBlock, Tag("ThinkingBlock")]
    | Annotated[RedactedThinkingBlock, Tag("RedactedThinkingBlock")]
    | Annotated[ToolUseBlock, Tag("ToolUseBlock")],
    by_type(
        text="WrittenTextBlock",
        thinking="ThinkingBlock",
        redacted_thinking="RedactedThinkingBlock",
        tool_use="ToolUseBlock",
    ),
    only_types("messages", "text", "thinking", "redacted_thinking", "tool_use"),
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
        message: Message = {"role": "assistant", "content": content}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return [message]


def _kind_of(message: Any) -> str:
    return (ModelTurn if is_of_assistant(message) else UserTurn).__name__


Turn = Annotated[
    Annotated[UserTurn, Tag(UserTurn.__name__)] | Annotated[ModelTurn, Tag(ModelTurn.__name__)],
    Discriminator(_kind_of),
]


def joined(content: str | Sequence[TextBlock | WrittenTextBlock]) -> str:
    """Clients cut between blocks where people would begin a new line."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def merged(messages: Iterable[Message]) -> list[Message]:
    """Turns of the same speaker that follow each other are one, since many templates know no others."""
    turns: list[Message] = []
    for role, run in groupby(messages, key=itemgetter("role")):
        turn = list(run)
        turns += turn if role == "tool" else [_as_one(role, turn)]
    return turns


def _as_one(role: str, turns: Sequence[Message]) -> Message:
    message: Message = {"role": role, "content": "\n".join(turn["content"] for turn in turns if turn["content"])}
    thoughts = [turn["reasoning_content"] for turn in turns if "reasoning_content" in turn]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    if calls:
        message["tool_calls"] = calls
    return message


def check_calls(messages: Sequence[Message]) -> None:
    """InvalidRequest if a result answers no earlier call."""
    known: set[str] = set()
    for message in messages:
        known.update(call["id"] for call in message.get("tool_calls", ()))
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            raise InvalidRequest(
                f"messages: no tool_use with id {message['tool_call_id']!r} precedes its tool_result", "messages"
            )
