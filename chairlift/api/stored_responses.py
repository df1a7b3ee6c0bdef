"""Responses that clients asked to keep (`store: true`), in memory, for GET, DELETE and `previous_response_id`."""

import json
import threading
from collections import Counter
from dataclasses import dataclass

from pydantic import TypeAdapter

from chairlift.api.wire.response_items import Item, template_messages
from chairlift.api.wire.responses import InputItems
from chairlift.engine.text.tokenizer import Message

MAX_STORED_BYTES = 2**26
"""Of all conversations and replies together."""

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
    """Responses by owner and id. No owner can read, delete or continue another's.

    When there is no room the oldest response of the owner who has most goes first. Usable from any thread.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._responses: dict[str, dict[str, StoredResponse]] = {}  # of each owner, from the oldest
        self._num_bytes: Counter[str] = Counter()  # by owner
        self._lock = threading.Lock()

    def keep(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Makes room, and does without one that is larger than all of it."""
        with self._lock:
            if response.num_bytes > self._max_bytes:
                return
            self._responses.setdefault(owner, {})[response_id] = response
            self._num_bytes[owner] += response.num_bytes
            while self._num_bytes.total() > self._max_bytes:
                richest = max(self._num_bytes, key=self._num_bytes.__getitem__)
                self._remove(richest, next(iter(self._responses[richest])))

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
