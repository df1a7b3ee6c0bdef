"""What went on at each moment of a test: output tokens per second, requests in flight."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from chairlift.bench.records import RequestRecord

Series = NDArray[np.float64]


def token_rates(records: Sequence[RequestRecord], started_at: float, num_bins: int, width_s: float) -> Series:
    """Output tokens per second in each of `num_bins` bins of `width_s` seconds, shape `(num_bins,)`.

    A chunk counts when it arrived; where a reply's chunks carry several tokens, each for as many on average.
    """
    totals = np.zeros(num_bins)
    for record in records:
        if record.chunk_times:
            bins = ((np.asarray(record.chunk_times) - started_at) / width_s).astype(np.int64)
            weight = record.output_tokens / len(record.chunk_times)
            np.add.at(totals, np.clip(bins, 0, num_bins - 1), weight)
    return totals / width_s


def peak_token_rate(records: Sequence[RequestRecord]) -> float:
    """Most output tokens in any second, seconds counting from the first request sent (as in `vllm bench serve`)."""
    if not records:
        return 0.0
    started_at = min(record.sent_at for record in records)
    ended_at = max(record.ended_at for record in records)
    return float(token_rates(records, started_at, int(ended_at - started_at) + 1, 1.0).max())


def running_at(records: Sequence[RequestRecord], moments: Series) -> Series:
    """How many requests are in flight at each of these times, shape as `moments`."""
    sent = np.sort([record.sent_at for record in records])
    ended = np.sort([record.ended_at for record in records])
    return (np.searchsorted(sent, moments, side="right") - np.searchsorted(ended, moments, side="right")).astype(float)


def peak_running(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at once. One that ends when another is sent is not beside it."""
    if not records:
        return 0
    return int(running_at(records, np.asarray([record.sent_at for record in records])).max())
