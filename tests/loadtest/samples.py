"""Records and results to compute with, without a server."""

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.summary import BenchResult, RequestFailure, RequestRecord, Sweep

TIMEOUT = RequestFailure("timeout", "no complete reply within 9 s")
BUSY = RequestFailure("HTTP 503", "queue is full")
BUSY_AGAIN = RequestFailure("HTTP 503", "queue is still full")


def record(index: int) -> RequestRecord:
    """A reply of three tokens, a second for the first and half a second for each other."""
    start = 50.0 + index
    return RequestRecord(
        index=index,
        intended_at=start,
        sent_at=start,
        ended_at=start + 2.0,
        chunk_times=[start + 1.0, start + 1.5, start + 2.0],
        usage_prompt_tokens=10,
        usage_output_tokens=3,
        asked_prompt_tokens=12,
        asked_output_tokens=3,
    )


def failed(index: int, failure: RequestFailure) -> RequestRecord:
    """A request that failed after nine seconds."""
    start = 50.0 + index
    return RequestRecord(index=index, intended_at=start, sent_at=start, ended_at=start + 9.0, failure=failure)


def result(
    *records: RequestRecord, duration_s: float = 4.0, lag: float = 0.001, busy_share: float = 0.25, **settings: object
) -> BenchResult:
    """A test that began at time 50."""
    config = BenchConfig.model_validate({"url": "http://host:8000"} | settings)
    return BenchResult(config.resolved("tiny"), records, 50.0, duration_s, (lag, lag), busy_share)


def sweep(*tests: tuple[RequestRecord, ...]) -> Sweep:
    """Tests at the rates 1, 2, 4 and so on, with a limit of 1,000 ms on the first token."""
    rates = {2.0**n: result(*records, request_rate=2.0**n, goodput="ttft:1000") for n, records in enumerate(tests)}
    return Sweep(BenchConfig(sweep="rate=1", goodput="ttft:1000"), "rate", rates)
