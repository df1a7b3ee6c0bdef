"""The record of a request while it is served, for its line in the log, the metrics and its trace."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING

from aiohttp import web

from chairlift.errors import EngineClosed, QueueFull, QueueTimeout
from chairlift.params import CompletionOutput, FinishReason, RequestOutput, RequestTimes

if TYPE_CHECKING:  # the check of settings imports this, but must not import the engine
    from chairlift.engine.async_llm import Numbered
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
    latest: dict[int, RequestOutput] = field(default_factory=dict)  # the newest output of each generation
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

    async def follow(self, outputs: "AsyncGenerator[Numbered]") -> "AsyncGenerator[Numbered]":
        """Passes outputs on, and notes the newest ones and how they end."""
        try:
            async with aclosing(outputs):
                async for index, output in outputs:
                    self.latest[index] = output
                    yield index, output
        except Exception as error:
            self.error = error
            raise

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of every sequence, in order."""
        unfinished = _OUTCOMES_OF_ERRORS.get(type(self.error), Outcome.ERROR)
        found = []
        for index, generation in enumerate(self.generations):
            output = self.latest.get(index)
            choices = [None] * generation.params.n if output is None else output.outputs
            found += [unfinished if choice is None else _outcome_of(choice) or unfinished for choice in choices]
        return found

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(generation.prompt_token_ids) for generation in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        return sum(output.num_cached_tokens for output in self.latest.values())

    @property
    def output_lengths(self) -> list[int]:
        """The number of tokens of every sequence that has any."""
        return [len(choice.token_ids) for output in self.latest.values() for choice in output.outputs]

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
        known = [output.times for output in self.latest.values() if output.times is not None]
        return reduce(RequestTimes.first_of, known) if known else None


def _outcome_of(choice: CompletionOutput) -> Outcome | None:
    """None while the sequence runs."""
    if choice.finish_reason is None:
        return None
    if choice.error is not None:
        return Outcome.ERROR
    is_late = choice.finish_reason is FinishReason.ABORT and choice.stop_reason is not None
    return Outcome.TIMEOUT if is_late else Outcome(choice.finish_reason)


OBSERVATION = web.RequestKey("chairlift_observation", Observation)
"""The observation of a POST request."""
