"""Turns deltas into the choices of `/v1/completions` and `/v1/chat/completions`."""

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.answers import NewReader
from chairlift.api.answers.custom import CustomCallPiece
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece, ReasoningPiece
from chairlift.api.openai import chat, completions
from chairlift.api.openai.request import StreamOptions
from chairlift.api.openai.scores import four_lists, prompt_logprobs, scored_prompt
from chairlift.api.replies.answer import (
    Answer,
    ChoiceProgress,
    Part,
)
from chairlift.api.replies.reply import Reply
from chairlift.api.replies.scores import ScoredPosition
from chairlift.api.wire.errors import ErrorBody, ErrorDetail
from chairlift.api.wire.events import BLANK, DONE, TextEvent, event
from chairlift.api.wire.scores import TokenLogprob
from chairlift.api.wire.usage import Usage
from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.params import FinishReason, TokenLogprobs
from chairlift.prompt_work import scores_in


class _ChoicesReply(Reply):
    """Has what both share: identity, usage, and the end of streams. Keeps little of a body, which may be large."""

    _prefix: ClassVar[str]
    _chunk_type: ClassVar[type[completions.Completion | chat.ChatCompletionChunk]]

    def __init__(
        self, body: completions.CompletionRequest | chat.ChatCompletionRequest, model: str, fingerprint: str | None
    ) -> None:
        self.id = f"{self._prefix}-{uuid4().hex}"
        self._head: dict[str, Any] = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        options = body.stream_options or StreamOptions()
        self._has_usage_chunk = bool(options.include_usage)
        self._has_usage_so_far = bool(options.continuous_usage_stats)  # with every chunk
        self._tells_tokens = bool(body.return_token_ids)
        self._num_prompt_logprobs = body.prompt_logprobs
        is_scored = body.logprobs is not None and body.logprobs is not False  # 0: no alternatives to each token
        self._tells_text_only = not (is_scored or self._tells_tokens or self._has_usage_so_far)
        self._text_events: dict[tuple[int, type[Piece]], TextEvent] = {}  # by choice and kind of text
        self._latest: dict[int, RequestDelta] = {}  # by prompt

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:
        self._latest = {index: RequestDelta(self.id, None, prompt, []) for index, prompt in enumerate(prompts)}
        return []

    def news(self, index: int, delta: RequestDelta) -> list[str]:
        """Makes one chunk for each change."""
        self._latest[index] = delta
        return [each for choice in delta.choices for each in self._events_of(index, delta, choice)]

    def closing(self) -> list[str]:
        return [event(self._chunk([])), DONE] if self._has_usage_chunk else [DONE]

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:  # noqa: ARG002 - the body says enough
        return [event(ErrorBody(error=detail))]

    @abstractmethod
    def _events_of(self, index: int, delta: RequestDelta, choice: CompletionDelta) -> list[str]: ...

    @abstractmethod
    def _text_choice(self, index: int, kind: type[Piece], text: str) -> BaseModel:
        """A choice with this text and nothing else."""

    def _text_event(self, index: int, kind: type[Piece], text: str) -> str:
        if (index, kind) not in self._text_events:
            self._text_events[index, kind] = TextEvent(self._chunk([self._text_choice(index, kind, BLANK)]))
        return self._text_events[index, kind].of(text)

    def _chunk(self, choices: Sequence[BaseModel], **extra: Any) -> BaseModel:
        """A chunk; one without choices carries the usage."""
        usage = Usage.of(list(self._latest.values())) if not choices or self._has_usage_so_far else None
        return self._chunk_type(**self._head, choices=choices, usage=usage, **extra)


class ChatReply(_ChoicesReply):
    """One reply to one conversation."""

    _prefix = "chatcmpl"
    _chunk_type = chat.ChatCompletionChunk

    def __init__(
        self,
        body: chat.ChatCompletionRequest,
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

    def whole(self, outputs: list[RequestDelta]) -> chat.ChatCompletion:
        (output,) = outputs
        return chat.ChatCompletion(
            **self._head,
            choices=[self._whole_choice(choice) for choice in output.choices],
            usage=Usage.of(outputs),
            prompt_token_ids=output.prompt_token_ids if self._tells_tokens else None,
            prompt_logprobs=prompt_logprobs(scores_in(output.prompt_result), self._num_prompt_logprobs),
        )

    def opening(self, prompts: Sequence[list[int]]) -> list[str]:
        """The role, once per choice; the first also carries the prompt's tokens."""
        super().opening(prompts)
        events: list[str] = []
        for index in range(len(self._answers)):
            choice = chat.ChatChunkChoice(index=index, delta=chat.Delta(role="assistant", content=""))
            tokens = prompts[0] if self._tells_tokens and index == 0 else None
            events.append(event(self._chunk([choice], prompt_token_ids=tokens)))
        return events

    def _whole_choice(self, choice: CompletionDelta) -> chat.ChatChoice:
        progress = self._progress[choice.index]
        news = progress.advance(choice)
        answer = self._answers[choice.index]
        answer.keep(choice.text, choice.finish_reason)
        content, thoughts = answer.text_of(ContentPiece), answer.text_of(ReasoningPiece) or None
        calls = [_call(call, call, call.text) for call in answer.calls]
        return chat.ChatChoice(
            index=choice.index,
            message=chat.AssistantMessage(
                content=content or (None if calls else ""),
                reasoning=thoughts,
                reasoning_content=thoughts,
                tool_calls=calls or None,
            ),
            logprobs=self._logprobs(progress.positions(news) if news else []),
            finish_reason=_finish_reason(answer, choice.finish_reason),
            stop_reason=choice.stop_reason,
            token_ids=list(choice.token_ids) if self._tells_tokens else None,
        )

    def _events_of(self, index: int, delta: RequestDelta, choice: CompletionDelta) -> list[str]:  # noqa: ARG002
        """One event per piece: the first carries the tokens' data, and the end has an event of its own."""
        news = self._progress[choice.index].advance(choice)
        if news is None:
            return []
        pieces = self._answers[choice.index].read(news.text, news.finish_reason)
        is_text = self._tells_text_only and news.finish_reason is None
        if is_text and not any(isinstance(piece, CallPiece) for _, piece in pieces):
            return [self._text_event(choice.index, part.kind, piece.text) for part, piece in pieces]
        return [event(self._chunk([each])) for each in self._chunk_choices(pieces, news)]

    def _chunk_choices(self, pieces: list[tuple[Part, Piece]], news: CompletionDelta) -> list[chat.ChatChunkChoice]:
        index = news.index
        choices = [self._piece_choice(index, part, piece) for part, piece in pieces]
        if news.finish_reason is not None:
            reason = _finish_reason(self._answers[index], news.finish_reason)
            end = chat.ChatChunkChoice(
                index=index, delta=chat.Delta(), finish_reason=reason, stop_reason=news.stop_reason
            )
            choices.append(end)
        token_ids = news.token_ids if self._tells_tokens else None
        positions = self._progress[index].positions(news)
        if (positions or token_ids) and not choices:
            choices.append(self._text_choice(index, ContentPiece, ""))
        if positions:
            choices[0].logprobs = self._logprobs(positions)
        if token_ids:
            choices[0].token_ids = list(token_ids)
        return choices

    def _piece_choice(self, index: int, part: Part, piece: Piece) -> chat.ChatChunkChoice:
        if not isinstance(piece, CallPiece):
            return self._text_choice(index, part.kind, piece.text)
        call = _call(part, part if piece.name is not None else None, piece.text, piece.index)
        return chat.ChatChunkChoice(index=index, delta=chat.Delta(tool_calls=[call]))

    def _text_choice(self, index: int, kind: type[Piece], text: str) -> chat.ChatChunkChoice:
        is_content = kind is ContentPiece
        delta = chat.Delta(content=text) if is_content else chat.Delta(reasoning=text, reasoning_content=text)
        return chat.ChatChunkChoice(index=index, delta=delta)

    def _logprobs(self, positions: list[ScoredPosition]) -> chat.ChoiceLogprobs | None:
        if not self._has_logprobs:
            return None
        return chat.ChoiceLogprobs(content=[cast(TokenLogprob, position.as_fields()) for position in positions])


def _finish_reason(answer: Answer, reason: FinishReason | None) -> chat.WireFinishReason | None:
    """The reason, or "tool_calls" for an answer that made calls and ended normally."""
    return "tool_calls" if reason is FinishReason.STOP and answer.calls else reason


def _call(part: Part, named: Part | None, text: str, index: int | None = None) -> chat.MessageToolCall:
    """`named`: the call, in the piece that introduces it."""
    name = None if named is None else named.name
    call = chat.MessageToolCall(index=index)
    if part.kind is CustomCallPiece:
        call.custom = chat.CustomCall(name=name, input=text)
    else:
        call.function = chat.FunctionCall(name=name, arguments=text)
    if named is not None:
        call.id, call.type = named.call_id, "function" if call.custom is None else "custom"
    return call


@dataclass(frozen=True, slots=True)
class _Echo:
    """The text before a choice's own: the prompt, if it is requested."""

    text: str
    positions: list[ScoredPosition]


class CompletionReply(_ChoicesReply):
    """One reply. Choices are numbered over all prompts of the request."""

    _prefix = "cmpl"
    _chunk_type = completions.Completion

    def __init__(
        self, body: completions.CompletionRequest, model: str, inputs: InputProcessor, fingerprint: str | None = None
    ) -> None:
        super().__init__(body, model, fingerprint)
        self._has_echo = bool(body.echo)
        self._is_truncated = body.truncate_prompt_tokens is not None
        self._num_logprobs = body.logprobs
        self._inputs = inputs
        self._num_choices = body.n or 1
        self._echoes: dict[int, _Echo] = {}  # by prompt
        self._prompt_scores = defaultdict[int, list[TokenLogprobs | None]](list)  # by prompt
        self._progress: dict[int, ChoiceProgress] = {}  # by number of the choice
        self._begun: set[int] = set()  # numbers of choices of which something was sent

    def whole(self, outputs: list[RequestDelta]) -> completions.Completion:
        choices = []
        for index, output in enumerate(outputs):
            self._prompt_scores[index] += scores_in(output.prompt_result)
            scores = prompt_logprobs(scores_in(output.prompt_result), self._num_prompt_logprobs)
            for choice in output.choices:
                whole = self._choice(index, output, choice, self._advance(index, choice), is_first=True)
                whole.prompt_logprobs = scores
                choices.append(whole)
        return completions.Completion(**self._head, choices=choices, usage=Usage.of(outputs))

    def news(self, index: int, delta: RequestDelta) -> list[str]:
        self._prompt_scores[index] += scores_in(delta.prompt_result)
        return super().news(index, delta)

    def _events_of(self, index: int, delta: RequestDelta, choice: CompletionDelta) -> list[str]:
        num_scored = len(self._prompt_scores[index])
        # Another choice may be faster than the one that scores the prompt for all.
        waits = 0 < num_scored < len(delta.prompt_token_ids) and not delta.finished
        news = self._advance(index, choice, waits=waits)
        if waits:
            return []
        is_first = self._number(index, choice) not in self._begun
        self._begun.add(self._number(index, choice))
        if self._tells_text_only and not is_first and news is not None and news.finish_reason is None:
            return [self._text_event(self._number(index, choice), ContentPiece, news.text)]
        if news is None and not (is_first and (self._has_echo or self._tells_tokens)):
            return []
        new = self._choice(index, delta, choice, news, is_first)
        if new.logprobs is not None and not new.logprobs.tokens:
            new.logprobs = None  # clients read the last entry of a chunk's list
        return [event(self._chunk([new]))]

    def _number(self, index: int, choice: CompletionDelta) -> int:
        return index * self._num_choices + choice.index

    def _advance(self, index: int, choice: CompletionDelta, *, waits: bool = False) -> CompletionDelta | None:
        number = self._number(index, choice)
        if number not in self._progress:
            self._progress[number] = ChoiceProgress(self._inputs.vocabulary, self._num_logprobs or 0)
        return self._progress[number].advance(choice, waits=waits)

    def _text_choice(self, index: int, kind: type[Piece], text: str) -> completions.CompletionChoice:  # noqa: ARG002
        return completions.CompletionChoice(index=index, text=text, finish_reason=None)

    def _choice(
        self, index: int, delta: RequestDelta, choice: CompletionDelta, news: CompletionDelta | None, is_first: bool
    ) -> completions.CompletionChoice:
        """The new part of a choice; `is_first`: with the prompt, if that is part of the reply."""
        if index not in self._echoes:
            self._echoes[index] = self._echo(index, delta)
        echo, number = self._echoes[index], self._number(index, choice)
        text, positions = "", list[ScoredPosition]()
        if news is not None:
            text = news.text
            positions = [
                replace(each, offset=each.offset + len(echo.text)) for each in self._progress[number].positions(news)
            ]
        return completions.CompletionChoice(
            index=number,
            text=echo.text + text if is_first else text,
            logprobs=four_lists(echo.positions + positions if is_first else positions)
            if self._num_logprobs is not None
            else None,
            finish_reason=news.finish_reason if news else None,
            stop_reason=news.stop_reason if news else None,
            token_ids=list(news.token_ids if news else ()) if self._tells_tokens else None,
            prompt_token_ids=delta.prompt_token_ids if is_first and self._tells_tokens else None,
        )

    def _echo(self, index: int, delta: RequestDelta) -> _Echo:
        if not self._has_echo:
            return _Echo("", [])
        text = delta.prompt
        if text is None or self._is_truncated:
            text = self._inputs.tokenizer.decode(delta.prompt_token_ids)
        shown = (text, self._num_logprobs or 0, self._inputs.vocabulary)
        return _Echo(text, scored_prompt(delta.prompt_token_ids, self._prompt_scores[index], *shown))
