"""The record of a request while it is served, for its line in the log, the metrics and its trace."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING

from aiohttp import web

from chairlift.errors import EngineClosed, QueueFull, QueueTimeout
from chairlift.params import FinishReason, RequestTimes

if TYPE_CHECKING:  # the check of settings imports this, but must not import the engine
    from chairlift.engine.mailbox import Mailbox, Numbered
    from chairlift.engine.text.deltas import CompletionDelta, RequestDelta
    from chairlift.engine.text.inputs import Generation

CLIENT_LEFT = 499
"""The status of a request whose client left before there was a reply, as in nginx."""


class Outcome(StrEnum):
    """The ways in which a sequence ends; there are as many as prompts times `n`."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the slot is full
    ABORT = "abort"  # the client left, another sequence of its request failed, or the server went down
    TIMEOUT = "timeout"  # it waited or ran longer than it may
    ERROR = "error"  # it could not be computed, or the engine died
    REJECTED = "rejected"  # the queue was full


_OUTCOMES_OF_ERRORS = {  # what an error that ends a request means for its sequences; all others mean `ERROR`
    type(None): Outcome.ABORT,
    EngineClosed: Outcome.ABORT,
    QueueFull: Outcome.REJECTED,
    QueueTimeout: Outcome.TIMEOUT,
}


@dataclass(slots=True)
class Observation:
    """One request, from its headers to the end of its reply. Times are `time.perf_counter`'s."""

    request_id: str
    path: str  # the route's, without the name of a model
    begin: float
    end: float | None = None
    status: int = CLIENT_LEFT  # until there is a reply
    reply_id: str | None = None  # the id by which the client knows the reply; None if there was none
    is_streamed: bool = False
    generations: Sequence["Generation"] = ()
    mailbox: "Mailbox | None" = None  # of the generations; None: they were not begun
    error: Exception | None = None  # that ended all of them
    reason: str | None = None  # why there is an error instead of a reply
    warnings: Sequence[str] = ()  # what the answer leaves out of account

    def note_job(
        self,
        reply_id: str,
        generations: Sequence["Generation"],
        *,
        is_streamed: bool,
        warnings: Sequence[str] = (),
    ) -> None:
        """Notes what a valid request asks the engine to compute, and what its client was warned of."""
        self.reply_id = reply_id
        self.generations = generations
        self.is_streamed = is_streamed
        self.warnings = warnings

    async def follow(self, run: "AbstractAsyncContextManager[Mailbox]") -> "AsyncGenerator[Numbered]":
        """Passes deltas of a run on, and notes how it ends."""
        try:
            async with run as self.mailbox:
                async for index, delta in self.mailbox:
                    yield index, delta
        except Exception as error:
            self.error = error
            raise

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of every sequence, in order."""
        unfinished = _OUTCOMES_OF_ERRORS.get(type(self.error), Outcome.ERROR)
        if self.mailbox is None:
            return [unfinished for generation in self.generations for _ in range(generation.params.n)]
        choices = [choice for delta in self._progress for choice in delta.choices]
        return [self._outcome_of(choice) or unfinished for choice in choices]

    def _outcome_of(self, choice: "CompletionDelta") -> Outcome | None:
        """None if the sequence did not end by itself."""
        if choice.finish_reason is None or (choice.error is not None and self.error is not None):
            return None
        if choice.error is not None:
            return Outcome.ERROR
        is_late = choice.finish_reason is FinishReason.ABORT and choice.stop_reason is not None
        return Outcome.TIMEOUT if is_late else Outcome(choice.finish_reason)

    @property
    def _progress(self) -> "list[RequestDelta]":
        """Tells how far each generation has come."""
        return [] if self.mailbox is None else self.mailbox.progress

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(generation.prompt_token_ids) for generation in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        return sum(delta.num_cached_tokens for delta in self._progress)

    @property
    def output_lengths(self) -> list[int]:
        """The number of tokens of every sequence."""
        return [choice.num_tokens for delta in self._progress for choice in delta.choices]

    @property
    def queue_seconds(self) -> float | None:
        """From the arrival of the sequences to the first slot that one of them got; None if that is not known."""
        times = self._times
        return None if times is None or times.admission is None else times.admission - times.arrival

    @property
    def first_token_seconds(self) -> float | None:
        """From the arrival of the sequences to the first token of one of them; None if there was none."""
        times = self._times
        return None if times is None or times.first_token is None else times.first_token - times.arrival

    @property
    def total_seconds(self) -> float | None:
        """From the request's headers to the end of its reply. None before that."""
        return None if self.end is None else self.end - self.begin

    @property
    def _times(self) -> RequestTimes | None:
        known = [delta.times for delta in self._progress if delta.times is not None]
        return reduce(RequestTimes.first_of, known) if known else None


OBSERVATION = web.RequestKey("chairlift_observation", Observation)
"""The observation of a POST request."""
