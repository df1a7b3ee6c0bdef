"""How `/v1/completions` dresses its outputs."""

import time
from dataclasses import dataclass, replace
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.replies.progress import ChoiceProgress, ScoredPosition, scored_prompt
from chairlift.api.sse import DONE, event
from chairlift.api.wire.base import ErrorBody, ErrorDetail
from chairlift.api.wire.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from chairlift.api.wire.usage import Usage
from chairlift.engine.inputs import InputProcessor
from chairlift.params import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class _Echo:
    """What comes before a choice's own text: the prompt if it is wanted."""

    text: str
    positions: list[ScoredPosition]


class CompletionReply:
    """One reply. Choices are numbered over all prompts of the request."""

    def __init__(self, body: CompletionRequest, model: str, inputs: InputProcessor) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self._created = int(time.time())
        self._body = body
        self._model = model
        self._inputs = inputs
        self._num_choices = body.n or 1
        self._latest: dict[int, RequestOutput] = {}
        self._echoes: dict[int, _Echo] = {}
        self._progress: dict[int, ChoiceProgress] = {}

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        choices = [piece for index, output in enumerate(outputs) for piece in self._pieces(index, output)]
        return self._completion(choices, Usage.of(outputs))

    def opening(self) -> list[str]:
        """See `Reply`: completions begin with text."""
        return []

    def news(self, index: int, output: RequestOutput) -> list[str]:
        """See `Reply`."""
        self._latest[index] = output
        return [event(self._completion([piece], None)) for piece in self._pieces(index, output)]

    def closing(self) -> list[str]:
        """See `Reply`."""
        if not self._body.has_usage_chunk:
            return [DONE]
        return [event(self._completion([], Usage.of(list(self._latest.values())))), DONE]

    def failure(self, detail: ErrorDetail) -> list[str]:
        """See `Reply`."""
        return [event(ErrorBody(error=detail))]

    def _pieces(self, index: int, output: RequestOutput) -> list[CompletionChoice]:
        """What is new of each choice of one prompt."""
        scores = output.prompt_logprobs
        if scores is not None and len(scores) < len(output.prompt_token_ids) and not output.finished:
            return []  # another choice may be faster than the one that scores the prompt for all
        if index not in self._echoes:
            self._echoes[index] = self._echo(output)
        pieces = (self._piece(index, choice, self._echoes[index]) for choice in output.outputs)
        return [piece for piece in pieces if piece is not None]

    def _piece(self, index: int, choice: CompletionOutput, echo: _Echo) -> CompletionChoice | None:
        number = index * self._num_choices + choice.index
        is_first = number not in self._progress
        if is_first:
            self._progress[number] = ChoiceProgress(self._inputs.vocabulary, self._body.logprobs or 0)
        news = self._progress[number].advance(choice)
        text = (echo.text if is_first else "") + (news.text if news else "")
        positions = [replace(each, offset=each.offset + len(echo.text)) for each in news.positions] if news else []
        if is_first:
            positions = echo.positions + positions
        if not text and not positions and news is None:
            return None
        return CompletionChoice(
            index=number,
            text=text,
            logprobs=_dress(positions) if self._body.logprobs is not None else None,
            finish_reason=news.finish_reason if news else None,
            stop_reason=choice.stop_reason,
        )

    def _echo(self, output: RequestOutput) -> _Echo:
        if not self._body.echo:
            return _Echo("", [])
        text = output.prompt
        if text is None:
            text = self._inputs.tokenizer.decode(output.prompt_token_ids)
        return _Echo(text, scored_prompt(output, text, self._body.logprobs or 0, self._inputs.vocabulary))

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        return Completion(id=self.id, created=self._created, model=self._model, choices=choices, usage=usage)


def _dress(positions: list[ScoredPosition]) -> CompletionLogprobs:
    return CompletionLogprobs(
        text_offset=[each.offset for each in positions],
        token_logprobs=[each.token.logprob for each in positions],
        tokens=[each.token.text for each in positions],
        top_logprobs=[_likeliest(each) for each in positions],
    )


def _likeliest(position: ScoredPosition) -> dict[str, float] | None:
    """The likeliest tokens, and the one that stands there if it is none of them."""
    if position.token.logprob is None:
        return None
    tokens = position.top if position.token in position.top else [*position.top, position.token]
    return {token.text: token.logprob for token in tokens if token.logprob is not None}
