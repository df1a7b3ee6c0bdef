"""Records what was seen of one request, and computes its latencies.

Times are `time.perf_counter()` seconds. Latencies count from the intended send time: with a fixed concurrency that is
when the request was sent; with a schedule it is when the request was due.

Exception
+-- BenchError       the test cannot be made at all; its message is one line for the user
+-- RequestFailed    one request failed; its `failure` goes into that request's record
"""

from dataclasses import dataclass, field
from itertools import pairwise

MS_PER_S = 1e3
MAX_MESSAGE_CHARS = 200
INCOMPLETE_STREAM = "incomplete stream"


def one_line(text: str) -> str:
    """`text` fit for a table: white space collapsed, cut to MAX_MESSAGE_CHARS."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."


class BenchError(Exception):
    """The test cannot be made: no server there, or none that speaks the OpenAI API."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """Says why a request failed. Failures are counted by their label, such as `timeout` or `HTTP 503`."""

    label: str
    message: str

    def __str__(self) -> str:
        return f"{self.label}: {self.message}" if self.message else self.label


class RequestFailed(Exception):
    """Tells that one request failed, and how."""

    def __init__(self, label: str, message: str) -> None:
        self.failure = RequestFailure(label, one_line(message))
        super().__init__(str(self.failure))


@dataclass(slots=True)
class RequestRecord:
    """One request, filled in while its reply streams. Latencies have a meaning only where `failure` is None.

    `chunk_times` are the arrivals of content chunks. `ended_at` is the arrival of the last chunk with a choice, so the
    usage chunk after it does not count; of a failure, the time it was noticed. `usage_*` are the server's counts, None
    where it sent none: cached prompt tokens were reused, accepted and rejected tokens were speculated. `turn` counts
    from 0 within a conversation. `asked_*` are the lengths asked for; None for a prompt that only the server can count.
    """

    index: int
    intended_at: float
    sent_at: float = 0.0
    ended_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    usage_prompt_tokens: int | None = None
    usage_output_tokens: int | None = None
    usage_cached_tokens: int | None = None
    usage_accepted_tokens: int | None = None
    usage_rejected_tokens: int | None = None
    failure: RequestFailure | None = None
    turn: int = 0
    asked_prompt_tokens: int | None = None
    asked_output_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """The server's count, else the length asked for, else 0."""
        return self.usage_prompt_tokens if self.usage_prompt_tokens is not None else self.asked_prompt_tokens or 0

    @property
    def prompt_token_source(self) -> str:
        """Says who counted the prompt's tokens."""
        if self.usage_prompt_tokens is not None:
            return "server's usage"
        return "not known" if self.asked_prompt_tokens is None else "length asked for"

    @property
    def guessed_tokens(self) -> int:
        """Tokens that the server speculated, as far as it reports them; see docs/speculation.md."""
        return (self.usage_accepted_tokens or 0) + (self.usage_rejected_tokens or 0)

    @property
    def output_tokens(self) -> int:
        """The server's count, else the number of content chunks."""
        return len(self.chunk_times) if self.usage_output_tokens is None else self.usage_output_tokens

    @property
    def output_token_source(self) -> str:
        """Says who counted the reply's tokens."""
        return "chunks received" if self.usage_output_tokens is None else "server's usage"

    @property
    def queue_time(self) -> float:
        """Seconds from when it was due to when it was sent."""
        return self.sent_at - self.intended_at

    @property
    def latency(self) -> float:
        """E2EL, end-to-end latency in seconds: to the last token."""
        return self.ended_at - self.intended_at

    @property
    def ttft(self) -> float:
        """Time to first token in seconds: to the first content chunk."""
        return self.chunk_times[0] - self.intended_at

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first: (latency - TTFT) / (tokens - 1); None for fewer than two."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens >= 2 else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """ITL in seconds: gaps between content chunks. A chunk may carry several tokens."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]
