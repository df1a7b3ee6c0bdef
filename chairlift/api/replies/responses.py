"""How `/v1/responses` dresses its outputs."""

import time
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel

from chairlift.api.replies.answer import Answer, ToolCalling
from chairlift.api.replies.output_items import OutputItems
from chairlift.api.replies.progress import ChoiceProgress, News, ScoredPosition
from chairlift.api.sse import event
from chairlift.api.tools import ContentPiece, Piece
from chairlift.api.wire.base import ErrorDetail
from chairlift.api.wire.chat import TokenLogprob
from chairlift.api.wire.response_object import (
    ErrorEvent,
    Event,
    IncompleteDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseUsage,
)
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.api.wire.usage import Usage
from chairlift.engine.vocabulary import Vocabulary
from chairlift.params import FinishReason, RequestOutput, SamplingParams


@dataclass(frozen=True, slots=True)
class _Segment:
    """New text that is read at once, and the tokens that begin with it."""

    text: str
    positions: list[ScoredPosition]


class ResponsesReply:
    """One reply to one conversation. A whole one is put together by the same code as a streamed one."""

    def __init__(
        self,
        body: ResponsesRequest,
        params: SamplingParams,
        model: str,
        vocabulary: Vocabulary,
        calling: ToolCalling | None,
    ) -> None:
        """`params`: what the body asks for over the model's defaults."""
        self.id = f"resp_{uuid4().hex}"
        self._has_logprobs = body.has_logprobs
        self._progress = ChoiceProgress(vocabulary, body.top_logprobs or 0)
        self._answer = Answer(calling)
        self._items = OutputItems()
        self._num_read = 0  # characters
        self._unplaced: list[ScoredPosition] = []  # of text that is held back until it is known what it belongs to
        self._latest: RequestOutput | None = None
        self._numbers = count()
        self._start = _response_at_its_start(self.id, body, params, model)

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        (output,) = outputs
        self._read(output)
        return self._final(output)

    def opening(self) -> list[str]:
        """See `Reply`."""
        return self._send(
            ResponseEvent(type="response.created", response=self._start),
            ResponseEvent(type="response.in_progress", response=self._start),
        )

    def news(self, index: int, output: RequestOutput) -> list[str]:  # noqa: ARG002 - a conversation is one prompt
        """See `Reply`."""
        return self._send(*self._read(output))

    def closing(self) -> list[str]:
        """See `Reply`."""
        assert self._latest is not None, "a generation has at least one output"
        final = self._final(self._latest)
        if final.status == "completed":
            return self._send(ResponseEvent(type="response.completed", response=final))
        return self._send(ResponseEvent(type="response.incomplete", response=final))

    def failure(self, detail: ErrorDetail) -> list[str]:
        """See `Reply`: the failed response as the specification has it, then an error that makes clients raise.

        The `openai` client passes `response.failed` on like any other event, and so it does with the specification's
        flat `error` event; what it raises as an exception is an event with an object in `error`.
        """
        lead: list[str] = []
        if self._latest is None:  # the opening was to go out with the first news
            self._numbers = count()
            lead = self.opening()
        failed = self._start.model_copy(
            update={"status": "failed", "error": ResponseError(message=detail.message), "output": self._items.so_far()}
        )
        error = ErrorEvent(message=detail.message, code=detail.code, param=detail.param, error=detail)
        return lead + self._send(ResponseEvent(type="response.failed", response=failed), error)

    def _read(self, output: RequestOutput) -> list[Event]:
        self._latest = output
        (choice,) = output.outputs
        news = self._progress.advance(choice)
        if news is None:
            return []
        events: list[Event] = []
        segments = self._segments(news)
        for number, segment in enumerate(segments, start=1):
            self._unplaced += segment.positions
            is_last = news.finish_reason is not None and number == len(segments)
            for piece in self._answer.read(segment.text, is_last):
                events += self._take(piece)
        if news.finish_reason is not None:
            events += self._items.finish("completed" if news.finish_reason is FinishReason.STOP else "incomplete")
        return events

    def _segments(self, news: News) -> list[_Segment]:
        """New text, cut where scored tokens begin: each must go where its text goes, and none into a call."""
        start, self._num_read = self._num_read, self._num_read + len(news.text)
        bounds = [each.offset - start for each in news.positions] + [len(news.text)]
        segments = [_Segment(news.text[: bounds[0]], [])]
        for position, begin, end in zip(news.positions, bounds, bounds[1:], strict=False):
            segments.append(_Segment(news.text[begin:end], [position]))
        return segments

    def _take(self, piece: Piece) -> list[Event]:
        positions, self._unplaced = self._unplaced, []
        if isinstance(piece, ContentPiece):
            return self._items.add_text(
                piece.text, [TokenLogprob(**each.as_fields()) for each in positions] if self._has_logprobs else []
            )
        events: list[Event] = []
        if piece.name is not None:
            events += self._items.begin_call(self._answer.calls[piece.index].id, piece.name)
        return events + self._items.add_arguments(piece.arguments)

    def _final(self, output: RequestOutput) -> ResponseObject:
        reason = output.outputs[0].finish_reason
        status: Literal["completed", "incomplete"] = "completed" if reason is FinishReason.STOP else "incomplete"
        details = IncompleteDetails(reason="max_output_tokens" if reason is FinishReason.LENGTH else None)
        return self._start.model_copy(
            update={
                "status": status,
                "completed_at": int(time.time()) if status == "completed" else None,
                "incomplete_details": details if status == "incomplete" else None,
                "output": self._items.so_far(),
                "usage": ResponseUsage.of(Usage.of([output])),
            }
        )

    def _send(self, *events: Event) -> list[str]:
        for each in events:
            each.sequence_number = next(self._numbers)
        return [event(each, each.type) for each in events]


def _response_at_its_start(
    response_id: str, body: ResponsesRequest, params: SamplingParams, model: str
) -> ResponseObject:
    """With what was asked for, and what was left open filled in."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=params.temperature,
        text=text,
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[tool.model_dump(by_alias=True, exclude_none=True) for tool in body.tools or []],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )
