"""Records and results to compute with, without a server."""

from chairlift.bench import BenchConfig
from chairlift.bench.failures import Failure, FailureKind
from chairlift.bench.own_load import OwnLoad
from chairlift.bench.records import RequestRecord
from chairlift.bench.summary import BenchResult

CALM = OwnLoad(lags=(0.001, 0.001), busy_share=0.25)
TIMEOUT = Failure(FailureKind.TIMEOUT, "no complete reply within 9 s")
BUSY = Failure(FailureKind.HTTP_STATUS, "queue is full", 503)
BUSY_AGAIN = Failure(FailureKind.HTTP_STATUS, "queue is still full", 503)


def record(index: int) -> RequestRecord:
    """A reply of three tokens, a second for the first and half a second for each other."""
    start = 50.0 + index
    return RequestRecord(
        index=index,
        intended_at=start,
        sent_at=start,
        ended_at=start + 2.0,
        chunk_times=(start + 1.0, start + 1.5, start + 2.0),
        usage_prompt_tokens=10,
        usage_output_tokens=3,
        asked_prompt_tokens=12,
        asked_output_tokens=3,
    )


def failed(index: int, failure: Failure) -> RequestRecord:
    """A request that failed after nine seconds."""
    start = 50.0 + index
    return RequestRecord(index=index, intended_at=start, sent_at=start, ended_at=start + 9.0, failure=failure)


def result(
    *records: RequestRecord, duration_s: float = 4.0, own_load: OwnLoad = CALM, **settings: object
) -> BenchResult:
    """A test that began at time 50."""
    config = BenchConfig.model_validate({"url": "http://host:8000"} | settings)
    return BenchResult(config.resolved("tiny"), records, started_at=50.0, duration_s=duration_s, own_load=own_load)
