"""The turns of a conversation in `/v1/messages`, their blocks, and the messages that they become."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool

from chairlift.api.wire.body import Body, Written
from chairlift.api.wire.checks import OneOf, by_type, only_types
from chairlift.api.wire.conversation import ARGUMENTS, is_of_assistant, template_call, template_message
from chairlift.api.wire.generation import FOR_CACHING
from chairlift.api.wire.left_out import Attachment, attachments
from chairlift.api.wire.marks import Ignored
from chairlift.engine.text.chat_template import Message

CacheControl = Annotated[dict[str, Any] | None, FOR_CACHING]


class TextBlock(Body):
    """A piece of text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None
    citations: Annotated[list[Any] | None, Ignored("part of a reply that is sent back")] = None


class SearchResultBlock(Body):
    """A piece of a page or a file that a tool has found."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]
    citations: Annotated[dict[str, Any] | None, Ignored("answers cite nothing")] = None
    cache_control: CacheControl = None

    @property
    def text(self) -> str:
        return f"{self.title} ({self.source})\n{joined(self.content)}"


class ToolReference(Body):
    """A tool that a search for tools has found; the model reads its name, or all of a tool with `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl = None


ResultPart = Annotated[
    TextBlock | SearchResultBlock | ToolReference | Attachment,
    by_type(
        "messages",
        text=TextBlock,
        search_result=SearchResultBlock,
        tool_reference=ToolReference,
        **attachments("image", "document"),
    ),
]


class ToolResultBlock(Body):
    """Brings what a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = Field(
        None, description="text, found tools; the model reads a note in place of images and documents"
    )
    is_error: StrictBool | None = Field(None, description="true: the model reads the content behind the word Error")
    cache_control: CacheControl = None

    @property
    def parts(self) -> Sequence[ResultPart]:
        return () if isinstance(self.content, str) else self.content or ()

    def as_template_input(self, tool_text: Callable[[str], str] = str) -> Message:
        """`tool_text`: the text for a tool's name that is referred to."""
        content = (
            self.content
            if isinstance(self.content, str)
            else "\n".join(
                tool_text(part.tool_name) if isinstance(part, ToolReference) else part.text for part in self.parts
            )
        )
        return template_message(
            "tool", f"Error: {content}" if self.is_error else content, tool_call_id=self.tool_use_id
        )


class ThinkingBlock(Written):
    """Repeats what the model thought before what follows, for templates that show it."""

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
    input: Any = Field(None, description=ARGUMENTS)

    def as_template_input(self) -> dict[str, Any]:
        return template_call(self.id, self.name, self.input)


ResultBlock = Annotated[
    TextBlock | ToolResultBlock | Attachment,
    by_type("messages", text=TextBlock, tool_result=ToolResultBlock, **attachments("image", "document")),
]
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
    """Holds what the user said; or what the system says in the middle of a conversation."""

    role: Literal["user", "system"]
    content: str | list[Annotated[TextBlock, only_types("messages", "text", "tool_result")]]

    def as_template_input(self) -> list[Message]:
        """A message for each block, in order; see `merged`."""
        texts = [self.content] if isinstance(self.content, str) else [block.text for block in self.content]
        return [{"role": self.role, "content": text} for text in texts]


class ResultTurn(Body):
    """Brings what calls returned, and what the user or the client adds to it."""

    role: Literal["user"]
    content: list[ResultBlock] = Field(
        description="results and texts; the model reads a note in place of images and documents"
    )

    @property
    def parts(self) -> Iterator[object]:
        """The blocks beside the results and the parts of the results."""
        for block in self.content:
            yield from block.parts if isinstance(block, ToolResultBlock) else (block,)

    def as_template_input(self, tool_text: Callable[[str], str] = str) -> list[Message]:
        """A message for each block, in order; `tool_text`: the text for a tool's name that is referred to."""
        return [
            block.as_template_input(tool_text)
            if isinstance(block, ToolResultBlock)
            else {"role": self.role, "content": block.text}
            for block in self.content
        ]


class ModelTurn(Written):
    """Repeats what the model thought, said and called."""

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


def _form_of_turn(turn: Any) -> type[Body]:
    if is_of_assistant(turn):
        return ModelTurn
    content = turn.get("content") if isinstance(turn, dict) else getattr(turn, "content", None)
    blocks = content if isinstance(content, list) else []
    has_results = any(isinstance(block, dict) and block.get("type") == "tool_result" for block in blocks)
    return ResultTurn if has_results or isinstance(turn, ResultTurn) else UserTurn


Turn = Annotated[UserTurn | ResultTurn | ModelTurn, OneOf(_form_of_turn)]


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
