"""Turns deltas into the items of `/v1/responses`, which grow, and their events."""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, cast
from uuid import uuid4

from pydantic_core import to_json

from chairlift.api.answers import NewReader
from chairlift.api.answers.custom import CustomCallPiece
from chairlift.api.answers.text import CallPiece, ContentPiece, Piece, ReasoningPiece
from chairlift.api.replies.answer import ConversationReply, Part
from chairlift.api.replies.scores import ScoredPosition
from chairlift.api.responses import response_object as wire
from chairlift.api.responses.items import ItemStatus
from chairlift.api.responses.request import ResponsesRequest
from chairlift.api.responses.tools import FunctionTool, TextTool
from chairlift.api.wire.errors import ErrorDetail
from chairlift.api.wire.events import event
from chairlift.api.wire.scores import TokenLogprob
from chairlift.api.wire.tools import LeftOutTool
from chairlift.api.wire.usage import Usage
from chairlift.engine.text.deltas import RequestDelta
from chairlift.engine.text.vocabulary import Vocabulary
from chairlift.errors import InvalidRequest
from chairlift.params import FinishReason, SamplingParams

_PREFIXES: dict[type[Piece], str] = {  # of ids
    ContentPiece: "msg",
    ReasoningPiece: "rs",
    CallPiece: "fc",
    CustomCallPiece: "ctc",
}
_TEXTS: dict[type[Piece], str] = {  # names of the text in events
    ContentPiece: "output_text",
    ReasoningPiece: "reasoning_text",
    CallPiece: "function_call_arguments",
    CustomCallPiece: "custom_tool_call_input",
}
_SAMPLING = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
_REPEATED = {  # fields of the request, repeated unchanged
    *("instructions", "max_output_tokens", "previous_response_id", "user", "safety_identifier", "prompt_cache_key")
}
MAX_REPEATED_BYTES = 2**20
"""Limit on what a reply repeats of its request, without the instructions."""

_NUMBER = '"sequence_number":0'  # no text comes before it


class ResponsesReply(ConversationReply):
    """One response. A whole one is put together by the same code as a streamed one."""

    def __init__(
        self,
        body: ResponsesRequest,
        params: SamplingParams,
        model: str,
        vocabulary: Vocabulary,
        new_reader: NewReader,
        keep: Callable[[wire.ResponseObject], None] | None = None,
    ) -> None:
        """`params`: what the body asks for over the model's defaults; `keep` stores the whole reply at its end."""
        super().__init__(vocabulary, body.top_logprobs or 0, new_reader)
        self.id = f"resp_{uuid4().hex}"
        self._closed: list[wire.OutputItem] = []
        self._item_id = ""  # the open one's
        self._logprobs: list[TokenLogprob] = []
        self._num_read = 0  # characters
        self._unplaced: list[ScoredPosition] = []  # of text whose part is not known yet
        self._numbers = count()
        self._keep = keep
        self._start = _response_at_its_start(self.id, body, params, model)
        self.num_repeated = len(self._start.model_dump_json().encode())
        _check_repeated(self.num_repeated - len(to_json(self._start.instructions)))

    def whole(self, outputs: list[RequestDelta]) -> wire.ResponseObject:
        (output,) = outputs
        self._read(output)
        return self._final(output)

    def opening(self, prompts: Sequence[list[int]] = ()) -> list[str]:  # noqa: ARG002 - nothing is told of them yet
        return self._send(
            wire.Event(type="response.created", response=self._start),
            wire.Event(type="response.in_progress", response=self._start),
        )

    def news(self, index: int, delta: RequestDelta) -> list[str]:  # noqa: ARG002 - a conversation is one prompt
        return self._numbered(self._read(delta))

    def closing(self) -> list[str]:
        assert self._latest is not None, "a generation has at least one output"
        final = self._final(self._latest)
        is_complete = final.status == "completed"
        return self._send(
            wire.Event(type="response.completed" if is_complete else "response.incomplete", response=final)
        )

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:  # noqa: ARG002 - the body says enough
        """The failed response as the specification has it, then an error that makes clients raise.

        The `openai` client passes on `response.failed`, and the specification's flat `error` event, like any other
        event; it raises an exception only for an event with an object in `error`.
        """
        lead: list[str] = []
        if self._latest is None:  # the opening, which is sent with the first output, was not sent
            self._numbers = count()
            lead = self.opening()
        error = wire.ResponseError(message=detail.message)
        failed = self._start.model_copy(update={"status": "failed", "error": error, "output": self._items_so_far()})
        return lead + self._send(
            wire.Event(type="response.failed", response=failed),
            wire.ErrorEvent(message=detail.message, code=detail.code, param=detail.param, error=detail),
        )

    def _send(self, *events: wire.Event | wire.ErrorEvent) -> list[str]:
        return self._numbered(map(event, events))

    def _numbered(self, events: Iterable[str]) -> list[str]:
        return [
            each.replace(_NUMBER, f'"sequence_number":{number}', 1)
            for each, number in zip(events, self._numbers, strict=False)
        ]

    def _read(self, delta: RequestDelta) -> list[str]:
        """Events for new text, cut where scored tokens begin: each score goes with its text, and none into a call."""
        self._latest = delta
        (choice,) = delta.choices
        news = self._progress.advance(choice)
        if news is None:
            return []
        positions = self._progress.positions(news)
        bounds = [each.offset - self._num_read for each in positions] + [len(news.text)]
        self._num_read += len(news.text)
        events = self._push(news.text[: bounds[0]])
        for position, begin, end in zip(positions, bounds, bounds[1:], strict=False):
            self._unplaced.append(position)
            events += self._push(news.text[begin:end])
        return events + (self._end(news.finish_reason) if news.finish_reason is not None else [])

    def _end(self, reason: FinishReason) -> list[str]:
        events = self._push("", reason)
        if self._open is None:  # an empty answer becomes an empty message
            events += self._begin(self._answer.begin(ContentPiece))
        assert self._open is not None
        if self._open.kind is ContentPiece and self._unplaced:  # the end token, or what a stop string cut off
            events += self._grow(self._open, "")
        return events + self._close("completed" if reason is FinishReason.STOP else "incomplete")

    def _grow(self, part: Part, text: str) -> list[str]:
        positions, self._unplaced = self._unplaced, []
        if not positions or part.kind is not ContentPiece:
            return super()._grow(part, text)
        logprobs = [cast(TokenLogprob, each.as_fields()) for each in positions]
        self._logprobs += logprobs
        return [event(self._event(part, "output_text.delta", delta=text, logprobs=logprobs))]

    def _delta(self, part: Part, text: str) -> wire.Event:
        logprobs: list[TokenLogprob] | None = [] if part.kind is ContentPiece else None
        return self._event(part, f"{_TEXTS[part.kind]}.delta", delta=text, logprobs=logprobs)

    def _opening_of(self, part: Part) -> list[str]:
        self._item_id, self._logprobs = f"{_PREFIXES[part.kind]}_{uuid4().hex}", []
        item = self._item(part, "in_progress", is_begun=False)
        events = [wire.Event(type="response.output_item.added", output_index=part.index, item=item)]
        if not part.is_call:
            events.append(self._event(part, "content_part.added", part=self._content(part, "")))
        return [event(each) for each in events]

    def _close(self, status: ItemStatus = "completed") -> list[str]:
        part, self._open = self._open, None
        if part is None:
            return []
        item = self._item(part, status)
        self._closed.append(item)
        kind = f"{_TEXTS[part.kind]}.done"
        if part.kind is CustomCallPiece:
            events = [self._event(part, kind, input=part.text)]
        elif part.is_call:
            events = [self._event(part, kind, name=part.name, arguments=part.text)]
        else:
            logprobs = self._logprobs if part.kind is ContentPiece else None
            events = [
                self._event(part, kind, text=part.text, logprobs=logprobs),
                self._event(part, "content_part.done", part=self._content(part, part.text)),
            ]
        events.append(wire.Event(type="response.output_item.done", output_index=part.index, item=item))
        return [event(each) for each in events]

    def _event(self, part: Part, kind: str, /, **fields: Any) -> wire.Event:
        index = None if part.is_call else 0
        name = cast(wire.EventType, f"response.{kind}")
        return wire.Event(type=name, item_id=self._item_id, output_index=part.index, content_index=index, **fields)

    def _item(self, part: Part, status: ItemStatus, is_begun: bool = True) -> wire.OutputItem:
        if part.is_call:
            text = part.text if is_begun else ""
            call: dict[str, Any] = {"id": self._item_id, "status": status, "call_id": part.call_id, "name": part.name}
            is_custom = part.kind is CustomCallPiece
            return wire.OutputCustomCall(**call, input=text) if is_custom else wire.OutputCall(**call, arguments=text)
        shape = wire.OutputReasoning if part.kind is ReasoningPiece else wire.OutputMessage
        content: list[Any] = [self._content(part, part.text)] if is_begun else []
        return shape(id=self._item_id, status=status, content=content)

    def _content(self, part: Part, text: str) -> wire.OutputText | wire.ReasoningText:
        if part.kind is ReasoningPiece:
            return wire.ReasoningText(text=text)
        return wire.OutputText(text=text, logprobs=self._logprobs)

    def _items_so_far(self) -> list[wire.OutputItem]:
        """All items; one that is open counts as incomplete."""
        return self._closed + ([] if self._open is None else [self._item(self._open, "incomplete")])

    def _final(self, delta: RequestDelta) -> wire.ResponseObject:
        reason = delta.choices[0].finish_reason
        is_complete = reason is FinishReason.STOP
        details = wire.IncompleteDetails(reason="max_output_tokens" if reason is FinishReason.LENGTH else None)
        final = self._start.model_copy(
            update={
                "status": "completed" if is_complete else "incomplete",
                "completed_at": int(time.time()) if is_complete else None,
                "incomplete_details": None if is_complete else details,
                "output": self._items_so_far(),
                "usage": wire.ResponseUsage.of(Usage.of([delta])),
            }
        )
        if self._keep is not None:
            self._keep(final)
        return final


def _check_repeated(num_bytes: int) -> None:
    """Refuses what would cost memory while a client does not read. Instructions are limited as a part of the prompt."""
    if num_bytes > MAX_REPEATED_BYTES:
        raise InvalidRequest(
            f"tools: what the reply repeats of the request, the tools above all, has {num_bytes} bytes as JSON; at most"
            f" {MAX_REPEATED_BYTES} are possible, also with tool_choice none",
            "tools",
        )


def _response_at_its_start(
    response_id: str, body: ResponsesRequest, params: SamplingParams, model: str
) -> wire.ResponseObject:
    """The response with the request's fields, and defaults for those left out."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    tools = [_used(each) for each in body.tools or [] if not isinstance(each, LeftOutTool)]
    choice = body.tool_choice or "auto"
    return wire.ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        metadata=body.metadata or {},
        parallel_tool_calls=body.is_parallel,
        text=text,
        store=bool(body.store),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=tools,
        top_logprobs=body.top_logprobs or 0,
        reasoning=wire.ReasoningUsed(effort=body.effort),
        truncation=body.truncation or "disabled",
        **params.model_dump(include=_SAMPLING),
        **body.model_dump(include=_REPEATED),
    )


def _used(tool: FunctionTool | TextTool) -> wire.UsedTool | wire.UsedCustomTool:
    if isinstance(tool, TextTool):
        form = {"type": "text"} if tool.format is None else tool.format.model_dump(exclude_none=True)
        return wire.UsedCustomTool(name=tool.name, description=tool.description, format=form)
    return wire.UsedTool(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict)
    )
