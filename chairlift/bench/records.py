"""What was seen of one request, and the latencies that follow from it.

Definitions are those of `vllm bench serve` (vllm/benchmarks/serve.py), so figures compare. All times are
`time.perf_counter()` seconds. Latencies count from the intended send time: with a fixed concurrency that is
when the request was sent; with a schedule it is when that wanted it sent.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from chairlift.bench.failures import Failure

MS_PER_S = 1e3


class TokenSource(StrEnum):
    """Who counted the tokens."""

    USAGE = "server's usage"
    CHUNKS = "chunks received"
    REQUESTED = "length asked for"
    NOBODY = "not known"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, ended well or (with `failure`) badly. Latencies mean something only if it ended well.

    `chunk_times` are the arrivals of content chunks, at least one if it ended well. `ended_at` is the arrival
    of the last chunk with a choice, so the usage chunk after it does not count; of a failure, the time it was
    noticed. `usage_*` are what the server's usage chunk said, None where it said nothing; cached are those of the
    prompt's tokens that it had computed before. `turn` counts from 0 within a conversation. `asked_*` are the lengths
    asked for; None for a prompt that only the server can count.
    """

    index: int
    intended_at: float
    sent_at: float
    ended_at: float
    chunk_times: tuple[float, ...] = ()
    usage_prompt_tokens: int | None = None
    usage_output_tokens: int | None = None
    usage_cached_tokens: int | None = None
    failure: Failure | None = None
    turn: int = 0
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: the server's word for it, else the length asked for, else 0."""
        if self.usage_prompt_tokens is not None:
            return self.usage_prompt_tokens
        return self.asked_prompt_tokens or 0

    @property
    def output_tokens(self) -> int:
        """Tokens generated: the server's word for it, else the number of content chunks."""
        return len(self.chunk_times) if self.usage_output_tokens is None else self.usage_output_tokens

    @property
    def output_token_source(self) -> TokenSource:
        return TokenSource.CHUNKS if self.usage_output_tokens is None else TokenSource.USAGE

    @property
    def prompt_token_source(self) -> TokenSource:
        if self.usage_prompt_tokens is not None:
            return TokenSource.USAGE
        return TokenSource.NOBODY if self.asked_prompt_tokens is None else TokenSource.REQUESTED

    @property
    def is_short(self) -> bool:
        """Whether the reply has fewer tokens than were asked for."""
        return self.asked_output_tokens is not None and self.output_tokens < self.asked_output_tokens

    @property
    def queue_time(self) -> float:
        """Seconds that the request waited in the client: it was due, but sent only then."""
        return self.sent_at - self.intended_at

    @property
    def latency(self) -> float:
        """E2EL, end-to-end latency in seconds: from sending to the last token."""
        return self.ended_at - self.intended_at

    @property
    def ttft(self) -> float:
        """Time to first token in seconds: from sending to the first content chunk."""
        return self.chunk_times[0] - self.intended_at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds: (latency - TTFT) / (output tokens - 1).

        None for fewer than two tokens, which have no such time; the mean leaves them out.
        """
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """ITL in seconds: gaps between content chunks after the first. A chunk may carry several tokens."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]
