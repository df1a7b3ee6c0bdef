"""The items of one `/v1/responses` reply while they grow, and the events that tell of it.

At most one item is open, the last one; text after a call begins a new message.
"""

from collections.abc import Sequence
from typing import Literal
from uuid import uuid4

from chairlift.api.wire.chat import TokenLogprob
from chairlift.api.wire.response_object import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemEvent,
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    PartEvent,
    TextDelta,
    TextDone,
)


class _OpenMessage:
    """A message that is being written."""

    def __init__(self, index: int) -> None:
        self._id = f"msg_{uuid4().hex}"
        self._index = index
        self._text = ""
        self._logprobs: list[TokenLogprob] = []

    def opening(self) -> list[Event]:
        item = OutputMessage(id=self._id, status="in_progress", content=[])
        return [
            ItemEvent(type="response.output_item.added", output_index=self._index, item=item),
            self._part_event("response.content_part.added"),
        ]

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> Event:
        self._text += text
        self._logprobs += logprobs
        return TextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=list(logprobs))

    def closing(self, item: OutputItem) -> list[Event]:
        return [
            TextDone(item_id=self._id, output_index=self._index, text=self._text, logprobs=self._logprobs),
            self._part_event("response.content_part.done"),
            ItemEvent(type="response.output_item.done", output_index=self._index, item=item),
        ]

    def item(self, status: ItemStatus) -> OutputItem:
        return OutputMessage(id=self._id, status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText(text=self._text, logprobs=self._logprobs)

    def _part_event(self, kind: Literal["response.content_part.added", "response.content_part.done"]) -> Event:
        return PartEvent(type=kind, item_id=self._id, output_index=self._index, part=self._part())


class _OpenCall:
    """A call that is being written."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self._id = f"fc_{uuid4().hex}"
        self._index = index
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def opening(self) -> list[Event]:
        return [ItemEvent(type="response.output_item.added", output_index=self._index, item=self.item("in_progress"))]

    def add(self, arguments: str) -> Event:
        self._arguments += arguments
        return ArgumentsDelta(item_id=self._id, output_index=self._index, delta=arguments)

    def closing(self, item: OutputItem) -> list[Event]:
        return [
            ArgumentsDone(item_id=self._id, output_index=self._index, name=self._name, arguments=self._arguments),
            ItemEvent(type="response.output_item.done", output_index=self._index, item=item),
        ]

    def item(self, status: ItemStatus) -> OutputItem:
        return OutputCall(id=self._id, status=status, call_id=self._call_id, name=self._name, arguments=self._arguments)


class OutputItems:
    """All items of one reply."""

    def __init__(self) -> None:
        self._closed: list[OutputItem] = []
        self._open: _OpenMessage | _OpenCall | None = None

    def so_far(self) -> list[OutputItem]:
        """All items; one that is open counts as incomplete."""
        return self._closed + ([] if self._open is None else [self._open.item("incomplete")])

    def add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[Event]:
        """What a message has more."""
        events: list[Event] = []
        if not isinstance(self._open, _OpenMessage):
            events += self._close("completed")
            self._open = _OpenMessage(len(self._closed))
            events += self._open.opening()
        return [*events, self._open.add(text, logprobs)]

    def begin_call(self, call_id: str, name: str) -> list[Event]:
        """A new call, without arguments yet."""
        events = self._close("completed")
        self._open = _OpenCall(len(self._closed), call_id, name)
        return events + self._open.opening()

    def add_arguments(self, arguments: str) -> list[Event]:
        """What the call that was begun last has more."""
        assert isinstance(self._open, _OpenCall), "a call's pieces come in a row"
        return [self._open.add(arguments)] if arguments else []

    def finish(self, status: ItemStatus) -> list[Event]:
        """The end of the answer, `status` for its last item. An answer of nothing is an empty message."""
        events: list[Event] = []
        if self._open is None and not self._closed:
            self._open = _OpenMessage(0)
            events += self._open.opening()
        return events + self._close(status)

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        item = self._open.item(status)
        events = self._open.closing(item)
        self._closed.append(item)
        self._open = None
        return events
