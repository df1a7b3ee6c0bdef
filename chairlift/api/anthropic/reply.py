"""Turns deltas into the blocks of `/v1/messages`, which grow, and their events."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any
from uuid import uuid4

from chairlift.api.answers import NewReader
from chairlift.api.answers.mending import arguments_of
from chairlift.api.answers.text import CallPiece, ReasoningPiece
from chairlift.api.anthropic import events, message
from chairlift.api.anthropic.errors import AnthropicErrorBody
from chairlift.api.anthropic.request import MessagesRequest
from chairlift.api.replies.answer import ConversationReply, Part
from chairlift.api.wire.errors import ErrorDetail
from chairlift.api.wire.events import event
from chairlift.api.wire.usage import Usage
from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import FinishReason


class MessagesReply(ConversationReply):
    """One message."""

    keep_alive = event(events.Ping())

    def __init__(self, body: MessagesRequest, model: str, vocabulary: Vocabulary, new_reader: NewReader) -> None:
        super().__init__(vocabulary, 0, new_reader)
        self.id = f"msg_{uuid4().hex}"
        self._model = model
        self._max_tokens = body.max_tokens
        self._stop_sequences = frozenset(body.stop_sequences or ())
        self._shows_thoughts = body.thinking is None or body.thinking.display != "omitted"

    def whole(self, outputs: list[RequestDelta]) -> message.AnthropicMessage:
        (output,) = outputs
        (choice,) = output.choices
        self._answer.keep(choice.text, choice.finish_reason)
        blocks = [self._block(part, self._told(part)) for part in self._answer.parts]
        return self._message(output, content=blocks, **self._end(choice).model_dump())

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:  # noqa: ARG002 - what is reused is not known yet
        return []  # the first event holds the usage, so it is sent with the first output

    def news(self, index: int, delta: RequestDelta) -> list[str]:  # noqa: ARG002 - a conversation is one prompt
        is_first, self._latest = self._latest is None, delta
        told = [event(events.MessageStart(message=self._message(delta)))] if is_first else []
        (choice,) = delta.choices
        news = self._progress.advance(choice)
        if news is None:
            return told
        told += self._push(news.text, news.finish_reason)
        return told + ([] if news.finish_reason is None else self._close())

    def closing(self) -> list[str]:
        assert self._latest is not None, "a generation has at least one output"
        end, usage = self._end(self._latest.choices[0]), message.MessageUsage.of(Usage.of([self._latest]))
        return [event(events.MessageDelta(delta=end, usage=usage)), event(events.MessageStop())]

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:
        return [event(AnthropicErrorBody.of(status, detail))]

    def _message(self, delta: RequestDelta, **more: Any) -> message.AnthropicMessage:
        return message.AnthropicMessage(
            id=self.id, model=self._model, usage=message.MessageUsage.of(Usage.of([delta])), **more
        )

    def _told(self, part: Part) -> str:
        """The part's text, as far as the client gets it."""
        return part.text if self._shows_thoughts or part.kind is not ReasoningPiece else ""

    def _block(self, part: Part, text: str, is_whole: bool = True) -> message.Block:
        if part.kind is CallPiece:
            call_id = f"toolu_{part.call_id.removeprefix('call_')}"
            return message.MadeCall(id=call_id, name=part.name, input=arguments_of(text))
        if part.kind is ReasoningPiece:
            return message.Thoughts(thinking=text, signature=_signature(text) if is_whole else "")
        return message.SaidText(text=text)

    def _opening_of(self, part: Part) -> list[str]:
        return [event(events.ContentBlockStart(index=part.index, content_block=self._block(part, "", False)))]

    def _grow(self, part: Part, text: str) -> list[str]:
        return super()._grow(part, text) if self._shows_thoughts or part.kind is not ReasoningPiece else []

    def _delta(self, part: Part, text: str) -> events.ContentBlockDelta:
        delta: events.TextDelta | events.ThinkingDelta | events.InputJsonDelta = events.TextDelta(text=text)
        if part.kind is ReasoningPiece:
            delta = events.ThinkingDelta(thinking=text)
        elif part.kind is CallPiece:
            delta = events.InputJsonDelta(partial_json=text)
        return events.ContentBlockDelta(index=part.index, delta=delta)

    def _close(self) -> list[str]:
        part, self._open = self._open, None
        if part is None:
            return []
        stop = event(events.ContentBlockStop(index=part.index))
        if part.kind is not ReasoningPiece:
            return [stop]
        signature = events.SignatureDelta(signature=_signature(self._told(part)))
        return [event(events.ContentBlockDelta(index=part.index, delta=signature)), stop]

    def _end(self, choice: CompletionDelta) -> events.MessageEnd:
        if choice.finish_reason is FinishReason.STOP and choice.stop_reason in self._stop_sequences:
            return events.MessageEnd(stop_reason="stop_sequence", stop_sequence=str(choice.stop_reason))
        return events.MessageEnd(stop_reason=self._stop_reason(choice))

    def _stop_reason(self, choice: CompletionDelta) -> message.StopReason:
        match choice.finish_reason:
            case FinishReason.STOP:
                return "tool_use" if self._answer.calls else "end_turn"
            case FinishReason.LENGTH:
                is_as_asked = choice.num_tokens >= self._max_tokens
                return "max_tokens" if is_as_asked else "model_context_window_exceeded"
            case _:
                return "pause_turn"


def _signature(thoughts: str) -> str:
    """Clients require a signature and send it back; equal thoughts have equal ones."""
    return sha256(thoughts.encode()).hexdigest()
