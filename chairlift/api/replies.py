"""How completions and chat completions dress the same outputs: whole replies and streamed chunks."""

import time
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.wire import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChoice,
    Delta,
    Usage,
)
from chairlift.params import CompletionOutput, RequestOutput


def _now() -> int:
    return int(time.time())


class Reply(Protocol):
    """One reply's identity and its dress. Choice `index` counts over all prompts of the request."""

    @property
    def id(self) -> str:
        """What the client knows this reply by."""
        ...

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """The reply to a request that does not stream."""
        ...

    def opening(self, num_choices: int) -> list[BaseModel]:
        """Chunks that come before any text."""
        ...

    def chunk(self, index: int, text: str, choice: CompletionOutput) -> BaseModel:
        """New text of a choice, and its end if it ended."""
        ...

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """The last chunk, without choices."""
        ...


def _numbered(outputs: list[RequestOutput]) -> list[CompletionOutput]:
    return [choice for output in outputs for choice in output.outputs]


@dataclass(frozen=True)
class CompletionReply:
    """`/v1/completions`."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    created: int = field(default_factory=_now)

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        choices = [self._choice(index, choice.text, choice) for index, choice in enumerate(_numbered(outputs))]
        return self._completion(choices, Usage.of(outputs))

    def opening(self, num_choices: int) -> list[BaseModel]:  # noqa: ARG002 - completions begin with text
        """See `Reply`."""
        return []

    def chunk(self, index: int, text: str, choice: CompletionOutput) -> BaseModel:
        """See `Reply`."""
        return self._completion([self._choice(index, text, choice)], None)

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """See `Reply`."""
        return self._completion([], usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _choice(self, index: int, text: str, choice: CompletionOutput) -> CompletionChoice:
        return CompletionChoice(
            index=index, text=text, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )


@dataclass(frozen=True)
class ChatReply:
    """`/v1/chat/completions`."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=_now)

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=choice.text),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for index, choice in enumerate(_numbered(outputs))
        ]
        return ChatCompletion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=Usage.of(outputs)
        )

    def opening(self, num_choices: int) -> list[BaseModel]:
        """See `Reply`: who speaks, once per choice."""
        delta = Delta(role="assistant", content="")
        return [self._chunk([ChatChunkChoice(index=index, delta=delta)], None) for index in range(num_choices)]

    def chunk(self, index: int, text: str, choice: CompletionOutput) -> BaseModel:
        """See `Reply`."""
        delta = Delta(content=text) if text else Delta()
        piece = ChatChunkChoice(
            index=index, delta=delta, finish_reason=choice.finish_reason, stop_reason=choice.stop_reason
        )
        return self._chunk([piece], None)

    def usage_chunk(self, usage: Usage) -> BaseModel:
        """See `Reply`."""
        return self._chunk([], usage)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatCompletionChunk:
        return ChatCompletionChunk(id=self.id, created=self.created, model=self.model, choices=choices, usage=usage)
