"""The processes of all ranks but the first: starts them, carries messages, and ends all when one is lost."""

import logging
import os
import pickle
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from queue import SimpleQueue

from chairlift.engine.parts import Process, StartProcess
from chairlift.errors import EngineDead

logger = logging.getLogger(__name__)

_END_S = 5.0  # for a process to end by itself


@dataclass(frozen=True, slots=True)
class Question:
    """A message to a process that it replies to, whenever it can."""

    number: int
    content: object


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to the question with the same number; None: the process failed to find it."""

    number: int
    content: bytes | None


class RankProcesses:
    """Processes with a link to each. Has no reference to the engine, so that they end when that is collected."""

    def __init__(self, greetings: Sequence[object], program: str, start: StartProcess) -> None:
        """Starts a process for each greeting, which is the first message to it.

        `program`: Python code, in which `{fd}` is replaced by the process's end of its link.
        """
        self.failure: str | None = None
        self.is_over = threading.Event()  # set with `failure`, once all have ended
        self.when_lost: Callable[[], None] | None = None
        """Called when a process is lost, in whatever thread notices it."""
        self._is_ending = False
        self._processes: list[Process] = []
        self._links: list[Connection] = []
        for greeting in greetings:
            link, theirs = Pipe()
            with theirs:
                self._processes.append(start(program.format(fd=theirs.fileno()), theirs.fileno()))
            self._links.append(link)
            link.send(greeting)
        self._answers = [SimpleQueue[int | None]() for _ in self._links]
        self._lock = threading.Lock()  # of the questions
        self._questions: list[dict[int, Future[bytes | None]]] = [{} for _ in self._links]  # by number, without a reply
        self._num_questions = 0
        self._is_deaf = False  # no reply comes any more
        self._thread = threading.Thread(target=self._listen, name="chairlift-ranks", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def answers(self) -> list[int]:
        """Waits for one answer of each. EngineDead if one of them is lost."""
        answers = [answer for queue in self._answers if (answer := queue.get()) is not None]
        if len(answers) < len(self._answers):
            raise EngineDead(self.failure)
        return answers

    def ask(self, content: object) -> list[Future[bytes | None]]:
        """Asks all the same, and returns a future for the reply of each. ConnectionError in it if none will come."""
        with self._lock:
            number, futures = self._num_questions, [Future[bytes | None]() for _ in self._links]
            self._num_questions += 1
            for questions, future in zip(self._questions, futures, strict=True):
                questions[number] = future
            is_deaf = self._is_deaf
        if is_deaf:
            self._give_up_questions()
        else:
            self.tell(Question(number, content))
        return futures

    def tell(self, message: object) -> None:
        """Sends a message to all. `_listen` notices a lost process."""
        self._send([pickle.dumps(message)] * len(self._links))

    def tell_each(self, messages: Sequence[object]) -> None:
        """Sends each its own message."""
        self._send([pickle.dumps(message) for message in messages])

    def _send(self, pickled: Sequence[bytes]) -> None:
        if not self.is_over.is_set():
            with suppress(OSError):
                for link, each in zip(self._links, pickled, strict=True):
                    link.send_bytes(each)

    def fail(self, reason: str) -> None:
        """Kills all of them at once."""
        if self.failure is None:
            self.failure = reason
            logger.critical("%s; all ranks end", reason)
        self._kill()
        self.is_over.set()
        for queue in self._answers:
            queue.put(None)
        if self.when_lost is not None:
            self.when_lost()

    def end(self) -> None:
        """Asks them to end, and waits; kills those that take too long."""
        self._is_ending = True
        for link in self._links:
            os.set_blocking(link.fileno(), False)  # one that is stopped takes no more messages, and is killed below
        self.tell(None)
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()
        if threading.current_thread() is not self._thread:  # which may also collect garbage and so call this
            self._thread.join()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def _listen(self) -> None:
        """In a thread: receives answers, replies and last words, until one of them is lost."""
        try:
            self._receive()
        finally:
            with self._lock:
                self._is_deaf = True
            self._give_up_questions()

    def _give_up_questions(self) -> None:
        """Ends all questions without a reply."""
        with self._lock:
            left = [future for questions in self._questions for future in questions.values()]
            for questions in self._questions:
                questions.clear()
        for future in left:
            future.set_exception(ConnectionError(self.failure or "the ranks have ended"))

    def _receive(self) -> None:
        last_words: dict[int, str] = {}
        while True:
            ready = wait(self._links)
            for index in (index for index, link in enumerate(self._links) if link in ready):
                try:
                    said = self._links[index].recv()
                except (EOFError, OSError):
                    if not self._is_ending:
                        self.fail(_describe_end(index + 1, self._processes[index], last_words.get(index)))
                    return
                if isinstance(said, str):
                    last_words[index] = said
                elif isinstance(said, Reply):
                    with self._lock:
                        future = self._questions[index].pop(said.number)
                    future.set_result(said.content)
                else:
                    self._answers[index].put(said)


def _describe_end(rank: int, process: Process, last_words: str | None) -> str:
    """Says why a rank has closed its link."""
    if last_words is not None:
        return f"rank {rank} failed: {last_words}"
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(_END_S)
        if code < 0:
            return f"rank {rank} was killed by signal {-code}"
    return f"rank {rank} has ended"
