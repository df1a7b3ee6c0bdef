"""A rank other than the first: its program, which computes the plans that rank 0 sends (`parallel`).

It ends at once when its link to rank 0 closes.
"""

import logging
import os
import pickle
import select
import signal
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

from chairlift.engine.execution.runner import Launch
from chairlift.engine.executor import Executor, open_model
from chairlift.engine.parallel import Divided
from chairlift.engine.plan_pickling import PlanReader
from chairlift.engine.rank_bytes import RankReplies
from chairlift.engine.rank_processes import Question, Reply
from chairlift.errors import ConfigurationError
from chairlift.plan import Job, SlotRange, StepPlan

logger = logging.getLogger(__name__)


class _Link(Connection):
    """A rank's end of its link to rank 0. Several threads may send."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._lock = threading.Lock()

    def send(self, obj: object) -> None:
        """Sends one message. OSError if rank 0 is gone."""
        with self._lock:
            super().send(obj)


class Follower(Divided):
    """A rank other than 0. Its process ends when a plan fails, or when rank 0 ends."""

    def __init__(self, link: _Link) -> None:
        super().__init__(*link.recv())
        self._link = link
        self._reader = PlanReader()

    def least(self, own: int) -> int:
        self._link.send(own)
        least: int = self._link.recv()
        return least

    def reply(self, reply: Reply) -> None:
        """Sends a reply to rank 0. From any thread."""
        self._link.send(reply)

    def receive(self) -> StepPlan | Sequence[Job] | Question | None:
        """Waits for the next plan, for copies and scrubs alone, or for a question. None: the end."""
        message: bytes | Sequence[Job] | Question | None = pickle.loads(self._link.recv_bytes())
        return self._reader.read(message) if isinstance(message, bytes) else message


def follow(fd: int) -> None:
    """The program of a rank other than 0; `fd` is its end of the link to rank 0. Ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 handles these
        signal.signal(number, signal.SIG_IGN)
    logging.getLogger("chairlift").setLevel(logging.ERROR)  # rank 0 logs the rest as well
    threading.Thread(target=_end_with_link, args=(fd,), daemon=True).start()
    link, code = _Link(fd), 0
    try:
        _obey(Follower(link))
    except BaseException as error:
        code = 1
        if not isinstance(error, ConfigurationError):
            logger.critical("a rank failed", exc_info=error)
        with suppress(OSError):
            link.send(f"{type(error).__name__}: {error}")
    finally:
        os._exit(code)  # without waiting for other threads


def _obey(ranks: Follower) -> None:
    executor = Executor(open_model(ranks.config), ranks)
    ranks.meet()  # the engine is ready
    launches: deque[Launch] = deque()
    replies = RankReplies(ranks.reply)
    while (message := ranks.receive()) is not None:
        if isinstance(message, Question):
            assert isinstance(message.content, SlotRange), "rank 0 asks for nothing else"
            replies.put(message.number, executor.runner.copy_out(message.content))
            continue
        if not isinstance(message, StepPlan):
            executor.runner.perform(message)
            continue
        launches.append(executor.runner.launch(message))
        if len(launches) > executor.pacing.num_launches_ahead:
            launches.popleft().arrival.wait()  # raises the device's error, if there is one


def _end_with_link(fd: int) -> None:
    """In a thread: ends this process when rank 0 is gone, even if its device waits for rank 0 for ever."""
    poll = select.poll()
    poll.register(fd, 0)  # a closed other end is reported in any case
    poll.poll()
    os._exit(1)
