"""How `/v1/responses` dresses its outputs: items that grow, and the events that tell of them. Responses that clients
ask to keep (`store: true`) stay in memory, for GET, DELETE and `previous_response_id`.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, cast
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter

from chairlift.api.replies import BLANK, KEEP_ALIVE, TextEvent, event
from chairlift.api.replies.answer import Answer, Call, ChoiceProgress, NewReader, ScoredPosition
from chairlift.api.tools.text import CallPiece, ReasoningPiece
from chairlift.api.wire import ErrorDetail, Usage
from chairlift.api.wire.completions import TokenLogprob
from chairlift.api.wire.messages import FunctionTool
from chairlift.api.wire.response_object import (
    ErrorEvent,
    Event,
    EventType,
    IncompleteDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ReasoningUsed,
    ResponseError,
    ResponseObject,
    ResponseUsage,
    UsedTool,
)
from chairlift.api.wire.responses import InputItems, Item, ItemStatus, ResponsesRequest, template_messages
from chairlift.engine.text.tokenizer import Message, Vocabulary
from chairlift.params import FinishReason, RequestOutput, SamplingParams

_Kind = Literal["message", "reasoning", "function_call"]
_PREFIXES: dict[_Kind, str] = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS: dict[_Kind, EventType] = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
_NUMBER = '"sequence_number":0'  # no text stands before it
_Events = list[Event | str]  # some as they go over the wire, but for their number: those that tell nothing but text


@dataclass(slots=True)
class _OpenItem:
    """An item that is being written; `text` is what was told of its content, or of a call's arguments."""

    index: int
    kind: _Kind
    call: Call | None
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    id: str = ""
    _more: TextEvent | None = None

    def __post_init__(self) -> None:
        self.id = f"{_PREFIXES[self.kind]}_{uuid4().hex}"

    def item(self, status: ItemStatus) -> OutputItem:
        return self._item(status, [self._part()])

    def opening(self) -> _Events:
        added = self._item_event("response.output_item.added", self._item("in_progress", []))
        return [added] if self.call is not None else [added, self._event("response.content_part.added", self._part())]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Event | str:
        self.text += text
        self.logprobs += logprobs
        if logprobs:
            return self._delta(text, logprobs)
        if self._more is None:
            self._more = TextEvent(delta := self._delta(BLANK, logprobs), delta.type)
        return self._more.of(text)

    def closing(self, item: OutputItem) -> _Events:
        done = self._item_event("response.output_item.done", item)
        if self.call is not None:
            kind: EventType = "response.function_call_arguments.done"
            return [self._event(kind, name=self.call.name, arguments=self.text), done]
        if self.kind == "reasoning":
            text_done = self._event("response.reasoning_text.done", text=self.text)
        else:
            text_done = self._event("response.output_text.done", text=self.text, logprobs=self.logprobs)
        return [text_done, self._event("response.content_part.done", self._part()), done]

    def _item(self, status: ItemStatus, content: list[Any]) -> OutputItem:
        if self.call is not None:
            call = self.call
            return OutputCall(id=self.id, status=status, call_id=call.id, name=call.name, arguments=self.text)
        shape = OutputReasoning if self.kind == "reasoning" else OutputMessage
        return shape(id=self.id, status=status, content=content)

    def _part(self) -> OutputText | ReasoningText:
        if self.kind == "reasoning":
            return ReasoningText(text=self.text)
        return OutputText(text=self.text, logprobs=self.logprobs)

    def _delta(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        return self._event(_DELTAS[self.kind], delta=text, logprobs=logprobs if self.kind == "message" else None)

    def _event(self, kind: EventType, part: OutputText | ReasoningText | None = None, **fields: Any) -> Event:
        index = 0 if self.call is None else None
        return Event(type=kind, item_id=self.id, output_index=self.index, content_index=index, part=part, **fields)

    def _item_event(self, kind: EventType, item: OutputItem) -> Event:
        return Event(type=kind, output_index=self.index, item=item)


class _OutputItems:
    """All items of one reply. At most one is open, the last; text after a call begins a new message."""

    def __init__(self) -> None:
        self._closed: list[OutputItem] = []
        self._open: _OpenItem | None = None

    @property
    def ends_with_message(self) -> bool:
        """Whether the open item is a message, or none is open and nothing was said."""
        return not self._closed if self._open is None else self._open.kind == "message"

    def so_far(self) -> list[OutputItem]:
        """All items; one that is open counts as incomplete."""
        return self._closed + ([] if self._open is None else [self._open.item("incomplete")])

    def add_text(self, kind: Literal["message", "reasoning"], text: str, logprobs: list[TokenLogprob]) -> _Events:
        """What a message, or reasoning, has more."""
        events = self._begin(kind) if self._open is None or self._open.kind != kind else []
        assert self._open is not None
        return [*events, self._open.add(text, logprobs)]

    def add_call(self, call: Call, is_new: bool, arguments: str) -> _Events:
        """A new call, or what the open one has more."""
        events = self._begin("function_call", call) if is_new else []
        assert self._open is not None, "a call's pieces come in a row"
        return [*events, self._open.add(arguments, [])] if arguments else events

    def finish(self, status: ItemStatus) -> _Events:
        """The end of the answer, `status` for its last item. An answer of nothing is an empty message."""
        events = self._begin("message") if self._open is None and not self._closed else []
        return events + self._close(status)

    def _begin(self, kind: _Kind, call: Call | None = None) -> _Events:
        events = self._close("completed")
        self._open = _OpenItem(len(self._closed), kind, call)
        return events + self._open.opening()

    def _close(self, status: ItemStatus) -> _Events:
        if self._open is None:
            return []
        item = self._open.item(status)
        events = self._open.closing(item)
        self._closed.append(item)
        self._open = None
        return events


class ResponsesReply:
    """One reply to one conversation. A whole one is put together by the same code as a streamed one."""

    keep_alive = KEEP_ALIVE

    def __init__(
        self,
        body: ResponsesRequest,
        params: SamplingParams,
        model: str,
        vocabulary: Vocabulary,
        new_reader: NewReader,
        keep: Callable[[ResponseObject], None] | None = None,
    ) -> None:
        """`params`: what the body asks for over the model's defaults; `keep` stores the whole reply at its end."""
        self.id = f"resp_{uuid4().hex}"
        self._progress = ChoiceProgress(vocabulary, body.top_logprobs or 0)
        self._answer = Answer(new_reader())
        self._items = _OutputItems()
        self._num_read = 0  # characters
        self._unplaced: list[ScoredPosition] = []  # of text that is held back until it is known what it belongs to
        self._latest: RequestOutput | None = None
        self._numbers = count()
        self._keep = keep
        self._start = _response_at_its_start(self.id, body, params, model)

    def whole(self, outputs: list[RequestOutput]) -> BaseModel:
        """See `Reply`."""
        (output,) = outputs
        self._read(output)
        return self._final(output)

    def opening(self, prompts: Sequence[list[int]] = ()) -> list[str]:  # noqa: ARG002 - nothing is told of them yet
        """See `Reply`."""
        return self._send(
            Event(type="response.created", response=self._start),
            Event(type="response.in_progress", response=self._start),
        )

    def news(self, index: int, output: RequestOutput) -> list[str]:  # noqa: ARG002 - a conversation is one prompt
        """See `Reply`."""
        return self._send(*self._read(output))

    def closing(self) -> list[str]:
        """See `Reply`."""
        assert self._latest is not None, "a generation has at least one output"
        final = self._final(self._latest)
        is_complete = final.status == "completed"
        return self._send(Event(type="response.completed" if is_complete else "response.incomplete", response=final))

    def failure(self, status: int, detail: ErrorDetail) -> list[str]:  # noqa: ARG002 - the body says enough
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
        return lead + self._send(Event(type="response.failed", response=failed), error)

    def _read(self, output: RequestOutput) -> _Events:
        """New text, cut where scored tokens begin: each must go where its text goes, and none into a call."""
        self._latest = output
        (choice,) = output.outputs
        news = self._progress.advance(choice)
        if news is None:
            return []
        bounds = [each.offset - self._num_read for each in news.positions] + [len(news.text)]
        self._num_read += len(news.text)
        events = self._take(news.text[: bounds[0]])
        for position, begin, end in zip(news.positions, bounds, bounds[1:], strict=False):
            self._unplaced.append(position)
            events += self._take(news.text[begin:end])
        if news.finish_reason is not None:
            events += self._take("", is_last=True)
            if self._unplaced and self._items.ends_with_message:  # the end token, or what a stop string cut off
                events += self._items.add_text("message", "", self._take_logprobs())
            events += self._items.finish("completed" if news.finish_reason is FinishReason.STOP else "incomplete")
        return events

    def _take(self, text: str, is_last: bool = False) -> _Events:
        events: _Events = []
        for piece in self._answer.read(text, is_last):
            logprobs = self._take_logprobs()
            if isinstance(piece, CallPiece):
                call = self._answer.calls[piece.index]
                events += self._items.add_call(call, piece.name is not None, piece.arguments)
            elif isinstance(piece, ReasoningPiece):
                events += self._items.add_text("reasoning", piece.text, [])
            else:
                events += self._items.add_text("message", piece.text, logprobs)
        return events

    def _take_logprobs(self) -> list[TokenLogprob]:
        positions, self._unplaced = self._unplaced, []
        return [cast(TokenLogprob, each.as_fields()) for each in positions]

    def _final(self, output: RequestOutput) -> ResponseObject:
        reason = output.outputs[0].finish_reason
        is_complete = reason is FinishReason.STOP
        details = IncompleteDetails(reason="max_output_tokens" if reason is FinishReason.LENGTH else None)
        final = self._start.model_copy(
            update={
                "status": "completed" if is_complete else "incomplete",
                "completed_at": int(time.time()) if is_complete else None,
                "incomplete_details": None if is_complete else details,
                "output": self._items.so_far(),
                "usage": ResponseUsage.of(Usage.of([output])),
            }
        )
        if self._keep is not None:
            self._keep(final)
        return final

    def _send(self, *events: Event | ErrorEvent | str) -> list[str]:
        return [_numbered(each, number) for each, number in zip(events, self._numbers, strict=False)]


def _numbered(each: Event | ErrorEvent | str, number: int) -> str:
    """As it goes over the wire."""
    if isinstance(each, str):
        return each.replace(_NUMBER, f'"sequence_number":{number}', 1)
    each.sequence_number = number
    return event(each, each.type)


def _response_at_its_start(
    response_id: str, body: ResponsesRequest, params: SamplingParams, model: str
) -> ResponseObject:
    """With what was asked for, and what was left open filled in."""
    text: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
    if body.text is not None and body.text.format is not None:
        text["format"] = body.text.format.model_dump(by_alias=True, exclude_none=True)
    choice = body.tool_choice or "auto"
    texts = {"previous_response_id", "instructions", "user", "safety_identifier", "prompt_cache_key"}
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model,
        metadata=body.metadata or {},
        parallel_tool_calls=body.is_parallel,
        temperature=params.temperature,
        text=text,
        store=bool(body.store),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[
            UsedTool(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))
            for tool in body.tools or []
            if isinstance(tool, FunctionTool)
        ],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        reasoning=ReasoningUsed(effort=body.effort),
        **body.model_dump(include={"max_output_tokens", *texts}),
    )


# --- stored responses

MAX_STORED_BYTES = 2**26
"""Limit of all conversations and replies together."""

NOT_STORED = "there is no such response here (any more); ask for responses with store: true to have them kept"

_OVERHEAD_BYTES = 1024  # that a response takes beside its texts
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(InputItems)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation that it answers, without instructions; both as JSON."""

    conversation: bytes  # a list of messages, as chat templates know them
    reply: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.conversation) + len(self.reply) + _OVERHEAD_BYTES

    def messages(self) -> list[Message]:
        """The conversation up to and with the response."""
        output = _ITEMS.validate_python(json.loads(self.reply)["output"])
        return template_messages(output, json.loads(self.conversation))


class ResponseStore:
    """Responses by owner and id. No owner can read, delete or continue another's. Usable from any thread."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._responses: dict[str, dict[str, StoredResponse]] = {}  # of each owner, from the oldest
        self._num_bytes: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()

    def keep(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Makes room: the oldest of the owner who has most goes first. One larger than all of it is not kept."""
        with self._lock:
            if response.num_bytes > self._max_bytes:
                return
            self._responses.setdefault(owner, {})[response_id] = response
            self._num_bytes[owner] += response.num_bytes
            while self._num_bytes.total() > self._max_bytes:
                richest = max(self._num_bytes, key=self._num_bytes.__getitem__)
                self._remove(richest, next(iter(self._responses[richest])))

    async def settled(self) -> None:
        """At once: it is the one place where all look."""

    def find(self, owner: str, response_id: str) -> StoredResponse | None:
        with self._lock:
            return self._responses.get(owner, {}).get(response_id)

    def delete(self, owner: str, response_id: str) -> bool:
        """False if there is no such response."""
        with self._lock:
            is_there = response_id in self._responses.get(owner, {})
            if is_there:
                self._remove(owner, response_id)
            return is_there

    def _remove(self, owner: str, response_id: str) -> None:
        self._num_bytes[owner] -= self._responses[owner].pop(response_id).num_bytes
        if not self._responses[owner]:
            del self._responses[owner], self._num_bytes[owner]
