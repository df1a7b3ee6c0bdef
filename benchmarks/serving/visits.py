"""Users who share a system prompt: what they send, when they come, and what one round of them sees.

Each user holds a conversation; turn k repeats the system prompt, the turns before it and the server's own answers.
Texts are random words of a seed: a round with a seed of its own finds nothing of an earlier round in any cache.
"""

from dataclasses import dataclass
from typing import Any, Self

from chairlift.bench import BenchConfig
from chairlift.bench.records import MS_PER_S
from chairlift.bench.summary import BenchResult, Distribution
from serving.checkpoint import MESSAGE_TOKENS

_LENGTH_STEP = 128  # tokens to which a context is rounded up: the size of vLLM's blocks on a CPU
_PROMPT_END_TOKENS = 1  # the mark with which the assistant's turn begins


@dataclass(frozen=True, slots=True)
class Arrival:
    """How users arrive: all at once, or (with `rate`) so many a second as a Poisson process."""

    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """ "all", or users per second. Raises `ValueError`."""
        if text == "all":
            return cls()
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if not 0.0 < rate < float("inf"):
            raise ValueError(f"{text!r} is no arrival: write all, or users per second")
        return cls(rate)

    @property
    def name(self) -> str:
        return "all at once" if self.rate is None else f"{self.rate:g} users/s"


@dataclass(frozen=True, slots=True)
class Visits:
    """What the users of a round send. Lengths are in tokens, `think_time` is in seconds."""

    num_users: int
    num_turns: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    think_time: float

    @property
    def max_tokens(self) -> int:
        """Of the longest conversation with its last answer, rounded up."""
        turn_tokens = self.question_tokens + self.output_tokens + 2 * MESSAGE_TOKENS
        most = self.prefix_tokens + MESSAGE_TOKENS + self.num_turns * turn_tokens + _PROMPT_END_TOKENS
        return -(-most // _LENGTH_STEP) * _LENGTH_STEP

    def test(self, url: str, arrival: Arrival, seed: int) -> BenchConfig:
        """A round as a load test of the server at `url`."""
        when: dict[str, Any] = {"request_rate": arrival.rate} if arrival.rate else {"concurrency": self.num_users}
        return BenchConfig(
            url=url,
            endpoint="chat",
            num_requests=self.num_users * self.num_turns,
            turns=self.num_turns,
            prefix_tokens=self.prefix_tokens,
            prompt_tokens=self.question_tokens,
            output_tokens=self.output_tokens,
            think_time=self.think_time,
            warmup=0,
            seed=seed,
            **when,
        )


@dataclass(frozen=True, slots=True)
class Round:
    """What the users of one round saw. `ttft_ms` has the times to first tokens of each turn, in milliseconds.

    `cached_tokens`: of the prompts' tokens, as the server says; some leave it out where it is 0. `lag_p99_ms`: how late
    the client itself was. `failure`: the first of `num_failed`.
    """

    ttft_ms: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    duration_s: float
    lag_p99_ms: float
    num_failed: int
    failure: str | None

    @classmethod
    def of(cls, result: BenchResult, num_turns: int) -> Self:
        good = result.succeeded
        failures = [str(record.failure) for record in result.records if record.failure is not None]
        lag = Distribution.of_seconds(result.own_load.lags)
        turns = [[record.ttft * MS_PER_S for record in good if record.turn == turn] for turn in range(num_turns)]
        return cls(
            ttft_ms=tuple(map(tuple, turns)),
            prompt_tokens=sum(record.prompt_tokens for record in good),
            cached_tokens=sum(record.usage_cached_tokens or 0 for record in good),
            output_tokens=sum(record.output_tokens for record in good),
            duration_s=result.duration_s,
            lag_p99_ms=0.0 if lag is None else lag.p99,
            num_failed=len(failures),
            failure=failures[0] if failures else None,
        )
