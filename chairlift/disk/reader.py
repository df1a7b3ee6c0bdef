"""The thread that reads saved prefixes, one after the other and part by part, while their requests wait."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from chairlift.disk.folder import Item, PrefixFolder
from chairlift.plan import SavedPart

logger = logging.getLogger(__name__)

_MAX_UNTAKEN_BYTES = 64 * 2**20  # read ahead of who takes the parts


@dataclass(frozen=True, slots=True)
class ItemToRead:
    """A file with the tokens `[start, end)` of a prefix."""

    item: Item
    start: int
    end: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Order:
    """The files of a prefix, in order. There is at least one."""

    ticket: int
    items: tuple[ItemToRead, ...]


class PrefixReader:
    """Reads what is ordered. Every order that is not cancelled gets a last part, whatever happens."""

    def __init__(self, folder: PrefixFolder, note_read: Callable[[int, float], None]) -> None:
        """`note_read`: called in the reader's thread with the bytes of each file and the seconds that it took."""
        self._folder = folder
        self._note_read = note_read
        self._changed = threading.Condition()
        self._orders: deque[Order] = deque()
        self._parts: deque[SavedPart] = deque()
        self._cancelled = set[int]()
        self._num_untaken_bytes = 0
        self._is_over = False
        self._thread: threading.Thread | None = None

    def begin(self, order: Order) -> None:
        """Queues an order. The first one starts the thread."""
        with self._changed:
            self._orders.append(order)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chairlift-prefix-reader", daemon=True)
            self._thread.start()

    def cancel(self, ticket: int) -> None:
        """Drops an order that is not complete; nothing is heard of it any more."""
        with self._changed:
            self._cancelled.add(ticket)
            kept = [part for part in self._parts if part.ticket != ticket]
            self._parts = deque(kept)
            self._num_untaken_bytes = sum(_size(part) for part in kept)
            self._changed.notify_all()

    def take(self, most_bytes: int) -> list[SavedPart]:
        """Takes the parts that were read, in order: one at least if there is any, and no more than `most_bytes`."""
        taken: list[SavedPart] = []
        with self._changed:
            while self._parts and (not taken or most_bytes >= _size(self._parts[0])):
                part = self._parts.popleft()
                most_bytes -= _size(part)
                self._num_untaken_bytes -= _size(part)
                taken.append(part)
            if taken:
                self._changed.notify_all()
        return taken

    def wait(self, seconds: float) -> None:
        """Waits until there is a part to take, so long at most."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._parts), seconds)

    def stop(self) -> None:
        """Ends the thread after the file that it is reading."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (order := self._next()) is not None:
            try:
                self._read(order)
            except Exception as error:  # the request must not wait for ever
                logger.error("reading a saved prefix failed", exc_info=error)
                self._put(SavedPart(order.ticket, 0, 0, None, is_last=True))

    def _next(self) -> Order | None:
        with self._changed:
            self._changed.wait_for(lambda: self._orders or self._is_over)
            if self._is_over:
                return None
            return self._orders.popleft()

    def _read(self, order: Order) -> None:
        read: list[Item] = []
        for each in order.items:
            if not self._wait_for_turn(order.ticket):
                return
            begin = time.perf_counter()
            content = self._folder.read(each.item, each.num_bytes)
            if content is None:
                self._put(SavedPart(order.ticket, each.start, each.start, None, is_last=True))
                break
            self._note_read(len(content), time.perf_counter() - begin)
            read.append(each.item)
            is_last = each is order.items[-1]
            self._put(SavedPart(order.ticket, each.start, each.end, content, each.item.has_state, is_last))
        self._folder.touch(read, time.time_ns())

    def _wait_for_turn(self, ticket: int) -> bool:
        """Waits until there is room for another part. False if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_untaken_bytes < _MAX_UNTAKEN_BYTES or ticket in self._cancelled or self._is_over
            )
            is_wanted = ticket not in self._cancelled and not self._is_over
            self._cancelled.discard(ticket)
            return is_wanted

    def _put(self, part: SavedPart) -> None:
        with self._changed:
            if part.ticket in self._cancelled:
                return
            self._parts.append(part)
            self._num_untaken_bytes += _size(part)
            self._changed.notify_all()


def _size(part: SavedPart) -> int:
    return len(part.content) if isinstance(part.content, bytearray) else 0
