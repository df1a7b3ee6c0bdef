"""The prefixes that an engine has on disk: it reads them for requests (`SavedPrefixes`), and saves warm slots.

Three threads: the engine's looks prefixes up in an index in memory, and copies; one reads files, one writes them.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.cache.prefixes import cut_tokens
from chairlift.config import ResolvedConfig
from chairlift.disk.folder import Item, PrefixFolder, segment_item
from chairlift.disk.keys import SEGMENT_TOKENS, PrefixKeys
from chairlift.disk.reader import ItemToRead, Order, PrefixReader
from chairlift.disk.root import PrefixRoot
from chairlift.disk.writer import PrefixWriter
from chairlift.engine.forks import finalize
from chairlift.engine.ranks import Computer
from chairlift.engine.saved.costs import Costs, SavedCounts
from chairlift.engine.saved.identity import describe_cache
from chairlift.engine.saved.saver import Saver
from chairlift.errors import sized
from chairlift.models import Checkpoint
from chairlift.plan import SavedPart
from chairlift.scheduler.placement import Placement

logger = logging.getLogger(__name__)

_MIN_GAIN = SEGMENT_TOKENS // 2  # tokens: computing fewer is quicker than waiting for them
_MEASURED_BYTES = 8 * 2**20
_SLOW_S_PER_BYTE = 1e-8  # a hundred megabytes in a second, if reading cannot be measured
_MAX_BYTES_AT_ONCE = 32 * 2**20  # written into slots between two steps: some milliseconds


@dataclass(slots=True)
class _Ticket:
    """A reading that is not complete."""

    begin: float
    deadline: float  # when computing would have been quicker
    num_held: int


class PrefixStore:
    """Finds, reads and saves prefixes for one engine. Belongs to its thread, but for `counts`."""

    def __init__(
        self,
        folder: PrefixFolder,
        cache: ContinuousBatchingKVCacheManager,
        computer: Computer,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`cache`: of rank 0, whose slots are those of all; `computer`: of all ranks."""
        self._folder, self._cache, self._computer, self._clock = folder, cache, computer, clock
        seconds = folder.measure(_MEASURED_BYTES)
        self._costs = Costs(_SLOW_S_PER_BYTE if seconds is None else seconds / _MEASURED_BYTES)
        self._reader = PrefixReader(folder, self._costs.note_read)
        self._writer = PrefixWriter(folder, self._note_written)
        self._writer.start()
        self._saver = Saver(folder, self._writer, cache, computer)
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count()
        self._is_clearing = False
        finalize(self, _stop, self._reader, self._writer)

    @property
    def is_reading(self) -> bool:
        """True while requests wait for prefixes."""
        return bool(self._tickets)

    @property
    def counts(self) -> SavedCounts:
        """Counts what was read and written so far. From any thread."""
        return replace(self._costs.counts, num_bytes_held=self._folder.num_bytes)

    def begin(self, tokens: bytes, salt: str, num_held: int, most: int) -> int | None:
        """See `SavedPrefixes`."""
        if self._is_clearing or most - num_held < _MIN_GAIN:
            return None
        first = self._folder.keys.of_segments(cut_tokens(tokens, SEGMENT_TOKENS), salt)
        if not self._folder.count_segments(first):
            return None
        keys = self._folder.keys.of_segments(tokens, salt)
        items = self._find(keys, num_held, most)
        num_new = min(items[-1].end, most) - num_held if items else 0
        if num_new < _MIN_GAIN or not self._costs.pays(num_new, sum(each.num_bytes for each in items)):
            return None
        ticket, now = next(self._numbers), self._clock()
        self._tickets[ticket] = _Ticket(now, now + self._costs.patience_for(num_new), num_held)
        self._reader.begin(Order(ticket, tuple(items)))
        return ticket

    def cancel(self, ticket: int) -> None:
        """See `SavedPrefixes`."""
        if self._tickets.pop(ticket, None) is not None:
            self._reader.cancel(ticket)

    def forget(self, tokens: bytes, salt: str) -> None:
        """See `SavedPrefixes`."""
        keys = self._folder.keys.of_segments(tokens, salt)
        items = [segment_item(keys, index) for index in range(keys.num_segments)]
        if (state := self._folder.find_state(keys, keys.num_segments, len(tokens))) is not None:
            items.append(state)
        self._folder.hide(items)
        self._writer.call(lambda: self._folder.remove(items))

    def take(self) -> list[SavedPart]:
        """Takes what was read since the last call, and last parts for those who have waited too long."""
        if not self._tickets:
            return []
        now, taken = self._clock(), list[SavedPart]()
        for part in self._reader.take(_MAX_BYTES_AT_ONCE):
            known = self._tickets.get(part.ticket)
            if known is None:
                continue
            taken.append(part)
            if part.is_last:
                del self._tickets[part.ticket]
                if (num_tokens := part.end - known.num_held) > 0:
                    self._costs.note_restored(num_tokens, now - known.begin)
        for number, late in list(self._tickets.items()):
            if now > late.deadline:
                self.cancel(number)
                taken.append(SavedPart(number, 0, 0, None, is_last=True))
        return taken

    def wait(self, seconds: float) -> None:
        """Waits until something was read, so long at most."""
        self._reader.wait(seconds)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Takes in a launch: its prompt tokens, 0 if it has decoded as well, and the time that it took."""
        self._costs.note_computed(num_tokens, seconds)
        self._saver.earn(seconds)

    def can_save_beside(self, placement: Placement) -> bool:
        """Returns true if `save_next` may be called beside steps."""
        return self._saver.can_save_beside(placement)

    def save_next(self, placement: Placement, patience_s: float = 0.0) -> bool:
        """Copies the next piece of a warm slot, to be written. False if all is copied, or the disk has failed.

        `patience_s`: how long this may wait for the writer. Pending work on the cache must have been performed.
        """
        if not self._writer.has_room:
            self._writer.wait(patience_s)
            return not self._writer.is_paused
        return self._saver.save_next(placement)

    def finish_writing(self, seconds: float) -> bool:
        """Waits until everything copied is written, so long at most. False if it is not."""
        self._writer.wait(seconds, until_idle=True)
        return self._writer.is_idle

    def reset(self) -> None:
        """Removes everything saved, also what is about to be. Nothing is found from here on that was there before."""
        self._is_clearing = True
        for number in list(self._tickets):
            self.cancel(number)
        self._saver.forget()
        self._writer.drop_files()
        self._folder.forget()
        self._writer.call(self._clear)

    def stop(self) -> None:
        """Ends the threads after the files that they are at."""
        _stop(self._reader, self._writer)

    def _clear(self) -> None:
        try:
            self._folder.clear()
        finally:
            self._is_clearing = False

    def _note_written(self, num_bytes: int, seconds: float) -> None:
        self._costs.note_written(num_bytes)
        self._saver.spend(seconds)

    def _find(self, keys: PrefixKeys, num_held: int, most: int) -> list[ItemToRead]:
        """Finds the files of the longest prefix of at most `most` tokens or a little more; empty if there is none."""
        num_segments, last = self._folder.count_segments(keys), None
        if self._cache.states is not None:
            last = self._folder.find_state(keys, num_segments, most)
            num_segments = 0 if last is None else last.depth
        begin = num_held // SEGMENT_TOKENS
        found = [self._to_read(segment_item(keys, index)) for index in range(begin, num_segments)]
        if last is not None:
            found.append(self._to_read(last))
        return found

    def _to_read(self, item: Item) -> ItemToRead:
        start, end = item.depth * SEGMENT_TOKENS, item.depth * SEGMENT_TOKENS + item.num_tokens
        return ItemToRead(item, start, end, self._computer.count_bytes(item.num_tokens, has_state=item.has_state))


def _stop(reader: PrefixReader, writer: PrefixWriter) -> None:
    reader.stop()
    writer.stop()


def open_store(
    checkpoint: Checkpoint,
    config: ResolvedConfig,
    cache: ContinuousBatchingKVCacheManager,
    computer: Computer,
    clock: Callable[[], float] = time.perf_counter,
) -> PrefixStore | None:
    """Opens the directory that the configuration names. None if it names none, or if that cannot be used, with a line.

    ConfigurationError if others may write to it.
    """
    if config.prefix_cache_dir is None:
        return None
    path = Path(config.prefix_cache_dir).expanduser()
    root = PrefixRoot(path)
    try:
        root.prepare()
        folder = PrefixFolder(root, describe_cache(checkpoint, config, path), config.prefix_cache_bytes)
    except OSError as error:
        logger.warning(
            "prefix_cache_dir: %s cannot be used, so no prefixes are saved: %s", path, error.strerror or error
        )
        return None
    logger.info(
        "prefixes: %s of this model are saved in %s, which may take %s",
        *(sized(folder.num_bytes), folder.path, sized(config.prefix_cache_bytes)),
    )
    return PrefixStore(folder, cache, computer, clock)
