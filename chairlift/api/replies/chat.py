"""How `/v1/chat/completions` dresses its outputs."""

import time
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.replies.answer import Answer, ToolCalling
from chairlift.api.replies.progress import ChoiceProgress, ScoredPosition
from chairlift.api.sse import DONE, event
from chairlift.api.tools import ContentPiece, Piece
from chairlift.api.wire.base import ErrorBody, ErrorDetail
from chairlift.api.wire.chat import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    Delta,
    FunctionCall,
    FunctionDelta,
    MessageToolCall,
    TokenLogprob,
    ToolCallDelta,
)
from chairlift.api.wire.usage import Usage
from chairlift.engine.vocabulary import Vocabulary
from chairlift.params import CompletionOutput, RequestOutput


class ChatReply:
    """One reply to one conversation."""

    def __init__(
        self, body: ChatCompletionRequest, model: str, vocabulary: Vocabulary, calling: ToolCalling | None
    ) -> None:
        self.id = f"chatcmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._body = body
        self._model = model
        self._latest: RequestOutput | None = None
        indices = range(body.n or 1)
        self._progress = [ChoiceProgress(vocabulary, body.top_logprobs or 0) for _ in indices]
        self._answers = [Answer(calling) for _ in indices]

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        (output,) = outputs
        return ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._whole_choice(choice) for choice in output.outputs],
            usage=Usage.of(outputs),
        )

    def opening(self) -> list[str]:
        """See `Reply`: who speaks, once per choice."""
        return [
            self._chunk(ChatChunkChoice(index=index, delta=Delta(role="assistant", content="")))
            for index in range(len(self._answers))
        ]

    def news(self, index: int, output: RequestOutput) -> list[str]:  # noqa: ARG002 - a conversation is one prompt
        """See `Reply`."""
        self._latest = output
        return [self._chunk(piece) for choice in output.outputs for piece in self._new_pieces(choice)]

    def closing(self) -> list[str]:
        """See `Reply`."""
        if not self._body.has_usage_chunk or self._latest is None:
            return [DONE]
        return [self._chunk(usage=Usage.of([self._latest])), DONE]

    def failure(self, detail: ErrorDetail) -> list[str]:
        """See `Reply`."""
        return [event(ErrorBody(error=detail))]

    def _whole_choice(self, choice: CompletionOutput) -> ChatChoice:
        news = self._progress[choice.index].advance(choice)
        answer = self._answers[choice.index]
        answer.read(choice.text, is_last=True)
        calls = [
            MessageToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.calls
        ]
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=answer.content or (None if calls else ""), tool_calls=calls or None),
            logprobs=self._logprobs(news.positions if news else []),
            finish_reason=answer.finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
        )

    def _new_pieces(self, choice: CompletionOutput) -> list[ChatChunkChoice]:
        """One chunk per piece; log-probabilities go with the first, the end with one of its own."""
        news = self._progress[choice.index].advance(choice)
        if news is None:
            return []
        answer = self._answers[choice.index]
        has_ended = news.finish_reason is not None
        deltas = [self._delta(piece, answer) for piece in answer.read(news.text, has_ended)]
        pieces = [ChatChunkChoice(index=choice.index, delta=delta) for delta in deltas]
        if has_ended:
            reason = answer.finish_reason(news.finish_reason)
            pieces.append(
                ChatChunkChoice(index=choice.index, delta=Delta(), finish_reason=reason, stop_reason=choice.stop_reason)
            )
        elif news.positions and not pieces:
            pieces.append(ChatChunkChoice(index=choice.index, delta=Delta(content="")))
        if news.positions:
            pieces[0].logprobs = self._logprobs(news.positions)
        return pieces

    def _delta(self, piece: Piece, answer: Answer) -> Delta:
        if isinstance(piece, ContentPiece):
            return Delta(content=piece.text)
        if piece.name is None:
            function = FunctionDelta(arguments=piece.arguments)
            return Delta(tool_calls=[ToolCallDelta(index=piece.index, function=function)])
        function = FunctionDelta(name=piece.name, arguments=piece.arguments)
        call_id = answer.calls[piece.index].id
        return Delta(tool_calls=[ToolCallDelta(index=piece.index, id=call_id, type="function", function=function)])

    def _logprobs(self, positions: list[ScoredPosition]) -> ChoiceLogprobs | None:
        if not self._body.logprobs:
            return None
        return ChoiceLogprobs(content=[TokenLogprob(**position.as_fields()) for position in positions])

    def _chunk(self, choice: ChatChunkChoice | None = None, usage: Usage | None = None) -> str:
        chunk = ChatCompletionChunk(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[] if choice is None else [choice],
            usage=usage,
        )
        return event(chunk)
