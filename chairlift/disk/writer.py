"""The thread that writes prefixes to disk, and does everything else there that can wait."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chairlift.disk.entry import Bytes
from chairlift.disk.folder import Item, PrefixFolder

logger = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 16 * 2**20  # copied, and not written yet
_PAUSE_S = 60.0  # after a failure
_REFRESH_S = 10.0


@dataclass(frozen=True, slots=True)
class Save:
    """A file to write."""

    item: Item
    content: Callable[[], Sequence[Bytes]]  # may wait for a device; called in the writer's thread
    num_bytes: int
    used_ns: int  # when it was last used


Task = Callable[[], object]


class PrefixWriter:
    """Writes what is submitted, in order. After a failure it warns once, and refuses everything for a minute."""

    def __init__(self, folder: PrefixFolder, note_written: Callable[[int, float], None]) -> None:
        """`note_written`: called in the writer's thread with the bytes of each file and the processor's seconds."""
        self._folder = folder
        self._note_written = note_written
        self._changed = threading.Condition()
        self._tasks: deque[Save | Task] = deque()
        self._queued = set[str]()  # names of files that are to be written
        self._num_queued_bytes = 0
        self._is_busy = self._is_over = False
        self._paused_until = 0.0
        self._has_warned = False
        self._refreshed_at = time.monotonic()
        self._thread: threading.Thread | None = None

    @property
    def is_paused(self) -> bool:
        """True for some time after a failure."""
        return time.monotonic() < self._paused_until

    @property
    def has_room(self) -> bool:
        """True if another file can be submitted without waiting."""
        return self._num_queued_bytes < _MAX_QUEUED_BYTES

    @property
    def is_idle(self) -> bool:
        """True if everything submitted is done."""
        with self._changed:
            return not self._tasks and not self._is_busy

    def is_queued(self, item: Item) -> bool:
        """Returns true if that file is to be written."""
        with self._changed:
            return item.name in self._queued

    def submit(self, save: Save) -> None:
        """Queues a file. It may be dropped, if the disk fails."""
        with self._changed:
            self._queued.add(save.item.name)
            self._num_queued_bytes += save.num_bytes
        self.call(save)

    def call(self, task: Save | Task) -> None:
        """Queues anything else that is to be done there; OSErrors are treated like those of writing."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()
        self.start()

    def drop_files(self) -> None:
        """Drops all files that are not written yet."""
        with self._changed:
            self._tasks = deque(task for task in self._tasks if not isinstance(task, Save))
            self._queued.clear()
            self._num_queued_bytes = 0

    def start(self) -> None:
        """Starts the thread, if it does not run."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="chairlift-prefix-writer", daemon=True)
            self._thread.start()

    def wait(self, seconds: float, *, until_idle: bool = False) -> None:
        """Waits until there is room for another file, or nothing is left to do, so long at most."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._tasks and not self._is_busy if until_idle else self.has_room, seconds
            )

    def stop(self) -> None:
        """Ends the thread after the file that it is writing."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._do(task)
                self._refresh()
            except OSError as error:
                self._pause(error)
            except Exception as error:
                logger.error("saving prefixes failed", exc_info=error)
                self._paused_until = time.monotonic() + _PAUSE_S
            finally:
                with self._changed:
                    self._is_busy = False
                    if isinstance(task, Save) and task.item.name in self._queued:
                        self._queued.discard(task.item.name)
                        self._num_queued_bytes -= task.num_bytes
                    self._changed.notify_all()

    def _next(self) -> Save | Task | None:
        """The next task; the renewal of the index if there was none for some time. None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._is_over, _REFRESH_S)
            if self._is_over:
                return None
            self._is_busy = bool(self._tasks)
            return self._tasks.popleft() if self._tasks else self._refresh

    def _do(self, task: Save | Task) -> None:
        if not isinstance(task, Save):
            task()
        elif not self.is_paused:
            begin = time.thread_time()
            num_bytes = self._folder.write(task.item, task.content(), task.used_ns)
            self._note_written(num_bytes, time.thread_time() - begin)
            self._has_warned = False

    def _refresh(self) -> None:
        if time.monotonic() >= self._refreshed_at + _REFRESH_S:
            self._refreshed_at = time.monotonic()
            self._folder.refresh()

    def _pause(self, error: OSError) -> None:
        self._paused_until = time.monotonic() + _PAUSE_S
        if not self._has_warned:
            self._has_warned = True
            reason = error.strerror or str(error)
            logger.warning(
                "prefixes cannot be saved in %s now, and are served as without: %s", self._folder.path, reason
            )
