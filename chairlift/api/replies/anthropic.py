"""How `/v1/messages` dresses its outputs: blocks that grow, and the events that tell of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal
from uuid import uuid4

from pydantic import BaseModel
from pydantic_core import from_json

from chairlift.api.replies import BLANK, TextEvent, event
from chairlift.api.replies.answer import Answer, Call, ChoiceProgress, NewReader
from chairlift.api.tools.text import CallPiece, ContentPiece, Piece
from chairlift.api.wire import ErrorDetail, Usage
from chairlift.api.wire.anthropic import MessagesRequest
from chairlift.api.wire.anthropic_message import (
    AnthropicErrorBody,
    AnthropicMessage,
    Block,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MadeCall,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SaidText,
    SignatureDelta,
    StopReason,
    StreamEvent,
    TextDelta,
    ThinkingDelta,
    Thoughts,
)
from chairlift.engine.text.tokenizer import Vocabulary
from chairlift.params import CompletionOutput, FinishReason, RequestOutput

_Kind = Literal["text", "thinking", "tool_use"]
_Events = list[StreamEvent | str]
"""Some as they go over the wire: those that tell text."""


@dataclass(slots=True)
class _OpenBlock:
    """A block that is being written; `text` is what was told of it, or of a call's arguments."""

    index: int
    kind: _Kind
    call: Call | None = None
    text: str = ""
    _more: TextEvent | None = None

    def opening(self) -> ContentBlockStart:
        return ContentBlockStart(index=self.index, content_block=self._block("", ""))

    def add(self, text: str) -> str:
        self.text += text
        if self._more is None:
            self._more = TextEvent(delta := self._delta(self._told(BLANK)), delta.type)
        return self._more.of(text)

    def closing(self) -> _Events:
        stop = ContentBlockStop(index=self.index)
        return [self._delta(SignatureDelta(signature=self._signature)), stop] if self.kind == "thinking" else [stop]

    def whole(self) -> Block:
        return self._block(self.text, self._signature)

    @property
    def _signature(self) -> str:
        """Clients want one and send it back; the same thoughts have the same."""
        return sha256(self.text.encode()).hexdigest()

    def _block(self, text: str, signature: str) -> Block:
        if self.call is not None:
            call_id = f"toolu_{self.call.id.removeprefix('call_')}"
            return MadeCall(id=call_id, name=self.call.name, input=_arguments_in(text))
        return Thoughts(thinking=text, signature=signature) if self.kind == "thinking" else SaidText(text=text)

    def _told(self, text: str) -> TextDelta | InputJsonDelta | ThinkingDelta:
        if self.kind == "tool_use":
            return InputJsonDelta(partial_json=text)
        return ThinkingDelta(thinking=text) if self.kind == "thinking" else TextDelta(text=text)

    def _delta(self, delta: TextDelta | InputJsonDelta | ThinkingDelta | SignatureDelta) -> ContentBlockDelta:
        return ContentBlockDelta(index=self.index, delta=delta)


@dataclass(slots=True)
class _Blocks:
    """All blocks of one message. Only the last may be open."""

    shows_thoughts: bool
    closed: list[Block] = field(default_factory=list)
    _open: _OpenBlock | None = None

    def add(self, piece: Piece, answer: Answer) -> _Events:
        """A new block, or what the open one has more."""
        if isinstance(piece, CallPiece):
            call = answer.calls[piece.index]
            return self._add("tool_use", piece.arguments, call, is_new=piece.name is not None)
        if isinstance(piece, ContentPiece):
            return self._add("text", piece.text)
        return self._add("thinking", piece.text if self.shows_thoughts else "")

    def close(self) -> _Events:
        """The end of the open block, if there is one."""
        if self._open is None:
            return []
        events = self._open.closing()
        self.closed.append(self._open.whole())
        self._open = None
        return events

    def _add(self, kind: _Kind, text: str, call: Call | None = None, is_new: bool = False) -> _Events:
        events: _Events = []
        if is_new or self._open is None or self._open.kind != kind:
            events = self.close()
            self._open = _OpenBlock(len(self.closed), kind, call)
            events.append(self._open.opening())
        return [*events, self._open.add(text)] if text else events


class MessagesReply:
    """One message. A whole one is put together by the same code as a streamed one."""

    keep_alive = event(Ping(), "ping")

    def __init__(self, body: MessagesRequest, model: str, vocabulary: Vocabulary, new_reader: NewReader) -> None:
        self.id = f"msg_{uuid4().hex}"
        self._model = model
        self._max_tokens = body.max_tokens
        self._stop_sequences = frozenset(body.stop_sequences or ())
        self._progress = ChoiceProgress(vocabulary, 0)
        self._answer = Answer(new_reader())
        self._blocks = _Blocks(body.shows_thoughts)
        self._latest: RequestOutput | None = None

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        (output,) = outputs
        self._read(output)
        end = self._end(output.outputs[0])
        return AnthropicMessage(
            id=self.id,
            model=self._model,
            content=self._blocks.closed,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=MessageUsage.of(Usage.of(outputs)),
        )

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:  # noqa: ARG002 - what is reused is not known yet
        """See `Reply`: the first event tells the usage, so it goes out with the first news."""
        return []

    def news(self, index: int, output: RequestOutput) -> list[str]:  # noqa: ARG002 - a conversation is one prompt
        """See `Reply`."""
        start: _Events = []
        if self._latest is None:
            usage = MessageUsage.of(Usage.of([output]))
            start = [MessageStart(message=AnthropicMessage(id=self.id, model=self._model, usage=usage))]
        return _send(*start, *self._read(output))

    def closing(self) -> list[str]:
        """See `Reply`."""
        assert self._latest is not None, "a generation has at least one output"
        end, usage = self._end(self._latest.outputs[0]), MessageUsage.of(Usage.of([self._latest]))
        return _send(MessageDelta(delta=end, usage=usage), MessageStop())

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:
        """See `Reply`."""
        return _send(AnthropicErrorBody.of(status, detail))

    def _read(self, output: RequestOutput) -> _Events:
        self._latest = output
        (choice,) = output.outputs
        news = self._progress.advance(choice)
        if news is None:
            return []
        has_ended = news.finish_reason is not None
        pieces = self._answer.read(news.text, has_ended)
        events = [each for piece in pieces for each in self._blocks.add(piece, self._answer)]
        return events + (self._blocks.close() if has_ended else [])

    def _end(self, choice: CompletionOutput) -> MessageEnd:
        if choice.finish_reason is FinishReason.STOP and choice.stop_reason in self._stop_sequences:
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=str(choice.stop_reason))
        return MessageEnd(stop_reason=self._stop_reason(choice))

    def _stop_reason(self, choice: CompletionOutput) -> StopReason:
        match choice.finish_reason:
            case FinishReason.STOP:
                return "tool_use" if self._answer.calls else "end_turn"
            case FinishReason.LENGTH:
                is_as_asked = len(choice.token_ids) >= self._max_tokens
                return "max_tokens" if is_as_asked else "model_context_window_exceeded"
            case _:
                return "pause_turn"


def _arguments_in(text: str) -> dict[str, object]:
    """The arguments of a call as an object, as far as they go: max_tokens may have cut them short. What is no JSON
    object is told as text, for the tool to complain of.
    """
    try:
        arguments = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _send(*events: StreamEvent | str) -> list[str]:
    return [each if isinstance(each, str) else event(each, each.type) for each in events]
