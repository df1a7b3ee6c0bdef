"""How `/v1/completions` and `/v1/chat/completions` dress their outputs: in choices."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.replies import BLANK, DONE, KEEP_ALIVE, TextEvent, event
from chairlift.api.replies.answer import (
    Answer,
    ChoiceProgress,
    NewReader,
    News,
    ScoredPosition,
    prompt_logprobs,
    scored_prompt,
)
from chairlift.api.tools.text import CallPiece, ContentPiece, Piece, ReasoningPiece
from chairlift.api.wire import ErrorBody, ErrorDetail, Usage
from chairlift.api.wire.completions import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChoiceLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    FunctionCall,
    MessageToolCall,
    TokenLogprob,
)
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.text.tokenizer import Vocabulary
from chairlift.params import CompletionOutput, RequestOutput


class _ChoicesReply:
    """What both share: identity, usage, and how streams end. Only what is needed of a body is kept: it may be large."""

    keep_alive = KEEP_ALIVE
    _prefix: ClassVar[str]
    _chunk_type: ClassVar[type[Completion | ChatCompletionChunk]]

    def __init__(self, body: CompletionRequest | ChatCompletionRequest, model: str, fingerprint: str | None) -> None:
        self.id = f"{self._prefix}-{uuid4().hex}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._has_usage_chunk = body.has_usage_chunk
        self._has_usage_so_far = body.has_usage_so_far
        self._tells_tokens = bool(body.return_token_ids)
        self._num_prompt_logprobs = body.prompt_logprobs
        is_scored = body.logprobs is not None and body.logprobs is not False  # 0 asks for no others beside each token
        self._tells_text_only = not (is_scored or self._tells_tokens or body.has_usage_so_far)
        self._text_events: dict[tuple[int, type[Piece]], TextEvent] = {}  # by choice and kind of text
        self._latest: dict[int, RequestOutput] = {}  # by prompt

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:
        """See `Reply`."""
        self._latest = {index: RequestOutput(self.id, None, prompt, []) for index, prompt in enumerate(prompts)}
        return []

    def news(self, index: int, output: RequestOutput) -> list[str]:
        """See `Reply`: one chunk for each piece of news."""
        self._latest[index] = output
        return self._new_events(index, output)

    def closing(self) -> list[str]:
        """See `Reply`."""
        return [event(self._chunk([])), DONE] if self._has_usage_chunk else [DONE]

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:  # noqa: ARG002 - the body says enough
        """See `Reply`."""
        return [event(ErrorBody(error=detail))]

    def _new_events(self, index: int, output: RequestOutput) -> list[str]:
        raise NotImplementedError

    def _choice_of(self, index: int, piece: Piece) -> BaseModel:
        raise NotImplementedError

    def _text_event(self, index: int, piece: ContentPiece | ReasoningPiece) -> str:
        """A chunk that tells nothing but this text of choice `index`."""
        key = index, type(piece)
        if key not in self._text_events:
            self._text_events[key] = TextEvent(self._chunk([self._choice_of(index, type(piece)(BLANK))]))
        return self._text_events[key].of(piece.text)

    def _chunk(self, choices: Sequence[BaseModel], **extra: Any) -> BaseModel:
        """One without choices is there to tell the usage."""
        usage = Usage.of(list(self._latest.values())) if not choices or self._has_usage_so_far else None
        return self._chunk_type(**self._head, choices=choices, usage=usage, **extra)


class ChatReply(_ChoicesReply):
    """One reply to one conversation."""

    _prefix = "chatcmpl"
    _chunk_type = ChatCompletionChunk

    def __init__(
        self,
        body: ChatCompletionRequest,
        model: str,
        vocabulary: Vocabulary,
        new_reader: NewReader,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(body, model, fingerprint)
        self._has_logprobs = bool(body.logprobs)
        indices = range(body.n or 1)
        self._progress = [ChoiceProgress(vocabulary, body.top_logprobs or 0) for _ in indices]
        self._answers = [Answer(new_reader()) for _ in indices]

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        (output,) = outputs
        return ChatCompletion(
            **self._head,
            choices=[self._whole_choice(choice) for choice in output.outputs],
            usage=Usage.of(outputs),
            prompt_token_ids=output.prompt_token_ids if self._tells_tokens else None,
            prompt_logprobs=prompt_logprobs(output, self._num_prompt_logprobs),
        )

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:
        """See `Reply`: who speaks, once per choice; the prompt's tokens come with the first."""
        super().opening(prompts)
        events: list[str] = []
        for index in range(len(self._answers)):
            choice = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            tokens = prompts[0] if self._tells_tokens and index == 0 else None
            events.append(event(self._chunk([choice], prompt_token_ids=tokens)))
        return events

    def _whole_choice(self, choice: CompletionOutput) -> ChatChoice:
        news = self._progress[choice.index].advance(choice)
        answer = self._answers[choice.index]
        answer.read(choice.text, is_last=True)
        calls = [
            MessageToolCall(
                id=call.id, type="function", function=FunctionCall(name=call.name, arguments=call.arguments)
            )
            for call in answer.calls
        ]
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(
                content=answer.content or (None if calls else ""),
                reasoning=answer.reasoning or None,
                reasoning_content=answer.reasoning or None,
                tool_calls=calls or None,
            ),
            logprobs=self._logprobs(news.positions if news else []),
            finish_reason=answer.finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._tells_tokens else None,
        )

    def _new_events(self, index: int, output: RequestOutput) -> list[str]:  # noqa: ARG002 - one prompt
        return [each for choice in output.outputs for each in self._events_of(choice)]

    def _events_of(self, choice: CompletionOutput) -> list[str]:
        """One per piece; what is told of tokens goes with the first, the end with one of its own."""
        news = self._progress[choice.index].advance(choice)
        if news is None:
            return []
        answer = self._answers[choice.index]
        pieces = answer.read(news.text, news.finish_reason is not None)
        texts = [piece for piece in pieces if not isinstance(piece, CallPiece)]
        if self._tells_text_only and news.finish_reason is None and len(texts) == len(pieces):
            return [self._text_event(choice.index, piece) for piece in texts]
        chunks = [self._choice_of(choice.index, piece) for piece in pieces]
        return [event(self._chunk([each])) for each in self._with_tokens_and_end(chunks, choice, news, answer)]

    def _choice_of(self, index: int, piece: Piece) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=self._delta(piece, self._answers[index]))

    def _with_tokens_and_end(
        self, pieces: list[ChatChunkChoice], choice: CompletionOutput, news: News, answer: Answer
    ) -> list[ChatChunkChoice]:
        if news.finish_reason is not None:
            reason = answer.finish_reason(news.finish_reason)
            pieces.append(
                ChatChunkChoice(index=choice.index, delta=Delta(), finish_reason=reason, stop_reason=choice.stop_reason)
            )
        token_ids = news.token_ids if self._tells_tokens else None
        if (news.positions or token_ids) and not pieces:
            pieces.append(ChatChunkChoice(index=choice.index, delta=Delta(content="")))
        if news.positions:
            pieces[0].logprobs = self._logprobs(news.positions)
        if token_ids:
            pieces[0].token_ids = token_ids
        return pieces

    def _delta(self, piece: Piece, answer: Answer) -> Delta:
        if isinstance(piece, ContentPiece):
            return Delta(content=piece.text)
        if not isinstance(piece, CallPiece):
            return Delta(reasoning=piece.text, reasoning_content=piece.text)
        call = MessageToolCall(index=piece.index, function=FunctionCall(name=piece.name, arguments=piece.arguments))
        if piece.name is not None:
            call.id, call.type = answer.calls[piece.index].id, "function"
        return Delta(tool_calls=[call])

    def _logprobs(self, positions: list[ScoredPosition]) -> ChoiceLogprobs | None:
        if not self._has_logprobs:
            return None
        return ChoiceLogprobs(content=[cast(TokenLogprob, position.as_fields()) for position in positions])


@dataclass(frozen=True, slots=True)
class _Echo:
    """What comes before a choice's own text: the prompt if it is wanted."""

    text: str
    positions: list[ScoredPosition]


class CompletionReply(_ChoicesReply):
    """One reply. Choices are numbered over all prompts of the request."""

    _prefix = "cmpl"
    _chunk_type = Completion

    def __init__(
        self, body: CompletionRequest, model: str, inputs: InputProcessor, fingerprint: str | None = None
    ) -> None:
        super().__init__(body, model, fingerprint)
        self._has_echo = bool(body.echo)
        self._is_truncated = body.truncate_prompt_tokens is not None
        self._num_logprobs = body.logprobs
        self._inputs = inputs
        self._num_choices = body.n or 1
        self._echoes: dict[int, _Echo] = {}
        self._progress: dict[int, ChoiceProgress] = {}

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        choices = [choice for index, output in enumerate(outputs) for choice in self._pieces(index, output)]
        for choice in choices:
            output = outputs[choice.index // self._num_choices]
            choice.prompt_logprobs = prompt_logprobs(output, self._num_prompt_logprobs)
        return Completion(**self._head, choices=choices, usage=Usage.of(outputs))

    def _new_events(self, index: int, output: RequestOutput) -> list[str]:
        if self._tells_text_only and index in self._echoes:
            return [each for choice in output.outputs for each in self._later_events(index, choice)]
        pieces = self._pieces(index, output)
        for piece in pieces:
            if piece.logprobs is not None and not piece.logprobs.tokens:
                piece.logprobs = None  # clients take the last of a chunk's list
        return [event(self._chunk([piece])) for piece in pieces]

    def _later_events(self, index: int, choice: CompletionOutput) -> list[str]:
        """Of a choice that has had its first chunk, and of which only the text is told."""
        number = index * self._num_choices + choice.index
        news = self._progress[number].advance(choice)
        if news is None:
            return []
        piece = ContentPiece(news.text)
        if news.finish_reason is None:
            return [self._text_event(number, piece)]
        end = self._choice_of(number, piece)
        end.finish_reason, end.stop_reason = news.finish_reason, choice.stop_reason
        return [event(self._chunk([end]))]

    def _choice_of(self, index: int, piece: Piece) -> CompletionChoice:
        assert isinstance(piece, ContentPiece), "nothing else is read out of a completion"
        return CompletionChoice(index=index, text=piece.text, finish_reason=None)

    def _pieces(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """What is new of each choice of one prompt."""
        scores = output.prompt_logprobs
        if scores is not None and len(scores) < len(output.prompt_token_ids) and not output.finished:
            return []  # another choice may be faster than the one that scores the prompt for all
        if index not in self._echoes:
            self._echoes[index] = self._echo(output)
        pieces = (self._piece(index, choice, self._echoes[index], output) for choice in output.outputs)
        return [piece for piece in pieces if piece is not None]

    def _piece(
        self, index: int, choice: CompletionOutput, echo: _Echo, output: RequestOutput
    ) -> CompletionChoice | None:
        number = index * self._num_choices + choice.index
        is_first = number not in self._progress
        if is_first:
            self._progress[number] = ChoiceProgress(self._inputs.vocabulary, self._num_logprobs or 0)
        news = self._progress[number].advance(choice)
        text = (echo.text if is_first else "") + (news.text if news else "")
        positions = [replace(each, offset=each.offset + len(echo.text)) for each in news.positions] if news else []
        if is_first:
            positions = echo.positions + positions
        tells_prompt = is_first and self._tells_tokens
        if not text and not positions and news is None and not tells_prompt:
            return None
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=_four_lists(positions) if self._num_logprobs is not None else None,
            finish_reason=news.finish_reason if news else None,
            stop_reason=choice.stop_reason if news and news.finish_reason else None,
            token_ids=(news.token_ids if news else []) if self._tells_tokens else None,
            prompt_token_ids=output.prompt_token_ids if tells_prompt else None,
        )

    def _echo(self, output: RequestOutput) -> _Echo:
        if not self._has_echo:
            return _Echo("", [])
        text = output.prompt
        if text is None or self._is_truncated:
            text = self._inputs.tokenizer.decode(output.prompt_token_ids)
        return _Echo(text, scored_prompt(output, text, self._num_logprobs or 0, self._inputs.vocabulary))


def _four_lists(positions: list[ScoredPosition]) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=[each.offset for each in positions],
        token_logprobs=[each.token.logprob for each in positions],
        tokens=[each.token.text for each in positions],
        top_logprobs=[_likeliest(each) for each in positions],
    )


def _likeliest(position: ScoredPosition) -> dict[str, float] | None:
    """The likeliest tokens, and the sampled one if it is not among them."""
    if position.token.logprob is None:
        return None
    tokens = position.top if position.token in position.top else [*position.top, position.token]
    return {token.text: token.logprob for token in tokens if token.logprob is not None}
