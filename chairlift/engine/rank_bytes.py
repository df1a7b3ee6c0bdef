"""The bytes of all ranks as one content, which is saved and restored as a whole: those of rank 0, then rank 1, ...

Each rank has its own heads and states of the same tokens, so every part has the same size. Rank 0 asks the others for
theirs (`RankReplies` answers), and gives each its own back (`jobs_of_rank`).
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue

from chairlift.disk.entry import Bytes
from chairlift.engine.rank_processes import Reply
from chairlift.engine.ranks import BytesToCome
from chairlift.plan import Job, SlotLoad

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SpreadBytes:
    """Bytes of this rank and of the others, on their way."""

    own: BytesToCome
    others: Sequence[Future[bytes | None]]  # in the order of the ranks

    def wait(self) -> list[Bytes]:
        """Returns them in the order of the ranks. From any thread. OSError if a rank failed to copy, or is lost."""
        found: list[Bytes] = list(self.own.wait())
        for other in self.others:
            content = other.result()
            if content is None:
                raise OSError("a rank could not copy its part")
            found.append(content)
        return found


class RankReplies:
    """Sends what a rank has copied to rank 0, in a thread, so that the rank need not wait for its device."""

    def __init__(self, send: Callable[[Reply], None]) -> None:
        """`send`: called in that thread. OSError if rank 0 is gone, at which this process ends anyway."""
        self._send = send
        self._queue = SimpleQueue[tuple[int, BytesToCome]]()
        threading.Thread(target=self._run, name="chairlift-rank-replies", daemon=True).start()

    def put(self, number: int, coming: BytesToCome) -> None:
        """Queues the reply to the question with this number."""
        self._queue.put((number, coming))

    def _run(self) -> None:
        while True:
            number, coming = self._queue.get()
            content: bytes | None = None
            try:
                content = b"".join(coming.wait())
            except Exception as error:  # the device's, say: without a reply rank 0 would wait for ever
                logger.error("a rank could not copy its part of a prompt", exc_info=error)
            self._send(Reply(number, content))


def jobs_of_rank(jobs: Sequence[Job], rank: int, num_ranks: int) -> tuple[Job, ...]:
    """Returns the jobs as that rank must do them: of what was read for all it gets its own part."""
    return tuple(_own_load(job, rank, num_ranks) if isinstance(job, SlotLoad) else job for job in jobs)


def _own_load(job: SlotLoad, rank: int, num_ranks: int) -> SlotLoad:
    content = job.part.content
    assert isinstance(content, bytearray), "only what was read is loaded"
    size = len(content) // num_ranks
    own = bytearray(memoryview(content)[rank * size : (rank + 1) * size])
    return replace(job, part=replace(job.part, content=own))
