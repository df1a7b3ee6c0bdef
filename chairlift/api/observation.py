"""What is noted of a request for tokens while it is served: for its line in the log, the metrics and its trace."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

from aiohttp import web

from chairlift.engine.async_llm import Numbered
from chairlift.engine.inputs import Generation
from chairlift.errors import EngineClosed, QueueFull, QueueTimeout
from chairlift.params import CompletionOutput, FinishReason, RequestOutput

CLIENT_LEFT = 499
"""The status of a request whose client left before there was a reply; by the name that nginx gave it."""


class Outcome(StrEnum):
    """How one sequence ended; there are as many as prompts times `n`."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the slot is full
    ABORT = "abort"  # the client left, another sequence of its request failed, or the server went down
    TIMEOUT = "timeout"  # it waited or ran longer than it may
    ERROR = "error"  # it could not be computed, or the engine died
    REJECTED = "rejected"  # the queue was full


@dataclass(slots=True)
class Observation:
    """One request, from its headers to the end of its reply. Times are `time.perf_counter`'s."""

    request_id: str
    path: str  # the route's, in which a model has no name
    begin: float
    end: float | None = None
    status: int = CLIENT_LEFT  # until there is a reply
    reply_id: str | None = None  # by which the client knows the reply; None if it did not come to that
    is_streamed: bool = False
    generations: Sequence[Generation] = ()
    latest: dict[int, RequestOutput] = field(default_factory=dict)  # the newest output of each generation
    error: Exception | None = None  # that ended all of them

    def note_job(self, reply_id: str, generations: Sequence[Generation], *, is_streamed: bool) -> None:
        """The request is fine: this is what it wants to be computed."""
        self.reply_id = reply_id
        self.generations = generations
        self.is_streamed = is_streamed

    async def follow(self, outputs: AsyncGenerator[Numbered]) -> AsyncGenerator[Numbered]:
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
        """Of every sequence, in order."""
        return [
            self._outcome_of(self._choice(index, place))
            for index, generation in enumerate(self.generations)
            for place in range(generation.params.n)
        ]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(generation.prompt_token_ids) for generation in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts: tokens whose keys and values were there already."""
        return sum(output.num_cached_tokens for output in self.latest.values())

    @property
    def output_lengths(self) -> list[int]:
        """Tokens of every sequence that has any."""
        return [len(choice.token_ids) for output in self.latest.values() for choice in output.outputs]

    @property
    def queue_seconds(self) -> float | None:
        """From the sequences' coming to the first slot that one of them got. None if none did."""
        return self._seconds_until([each.admission_time for gen in self.generations for each in gen.requests])

    @property
    def first_token_seconds(self) -> float | None:
        """From the sequences' coming to the first token of one of them. None if there was none."""
        return self._seconds_until([each.first_token_time for gen in self.generations for each in gen.requests])

    @property
    def total_seconds(self) -> float | None:
        """From the request's headers to the end of its reply. None before that."""
        return None if self.end is None else self.end - self.begin

    def _seconds_until(self, times: Sequence[float | None]) -> float | None:
        reached = [time for time in times if time is not None]
        arrival = self.generations[0].requests[0].arrival_time if reached else None
        return None if arrival is None else min(reached) - arrival

    def _choice(self, index: int, place: int) -> CompletionOutput | None:
        output = self.latest.get(index)
        return None if output is None else output.outputs[place]

    def _outcome_of(self, choice: CompletionOutput | None) -> Outcome:
        if choice is None or choice.finish_reason is None:
            return self._outcome_of_error()
        if choice.error is not None:
            return Outcome.ERROR
        if choice.finish_reason is FinishReason.ABORT:
            return Outcome.ABORT if choice.stop_reason is None else Outcome.TIMEOUT
        return Outcome(choice.finish_reason)

    def _outcome_of_error(self) -> Outcome:
        match self.error:
            case None | EngineClosed():
                return Outcome.ABORT
            case QueueFull():
                return Outcome.REJECTED
            case QueueTimeout():
                return Outcome.TIMEOUT
            case _:
                return Outcome.ERROR


OBSERVATION = web.RequestKey("chairlift_observation", Observation)
"""Of a POST request."""
