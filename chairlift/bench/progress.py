"""The live line of a running test: requests done and running, tokens per second, time to first token, failures."""

import asyncio
import statistics
import sys
from collections import deque
from contextlib import suppress
from time import perf_counter
from types import TracebackType
from typing import Self

from tqdm import tqdm

from chairlift.bench.client import LiveCounts
from chairlift.bench.records import RequestRecord

REFRESH_S = 0.5
NUM_RECENT = 50


class ProgressLine:
    """An async context that shows the line on stderr while it is a terminal, and nothing where it is not."""

    def __init__(self, num_requests: int, live: LiveCounts) -> None:
        self._live = live
        self._num_failed = 0
        self._recent_ttfts: deque[float] = deque(maxlen=NUM_RECENT)
        # `disable=None` is tqdm's word for "where stderr is not a terminal".
        self._bar = tqdm(total=num_requests, unit="request", disable=None, file=sys.stderr, dynamic_ncols=True)

    async def __aenter__(self) -> Self:
        self._refreshing = asyncio.create_task(self._refresh())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._refreshing.cancel()
        with suppress(asyncio.CancelledError):
            await self._refreshing
        self._bar.close()

    def take(self, record: RequestRecord) -> None:
        """A request has ended."""
        if record.failure is None:
            self._recent_ttfts.append(record.ttft)
        else:
            self._num_failed += 1
        self._bar.update()

    def text(self, chunks_per_s: float) -> str:
        """What stands beside the bar."""
        parts = [f"{self._live.num_running} running", f"{chunks_per_s:,.0f} tokens/s"]
        if self._recent_ttfts:
            parts.append(f"TTFT {statistics.median(self._recent_ttfts) * 1e3:,.0f} ms")
        if self._num_failed:
            parts.append(f"{self._num_failed} failed")
        return ", ".join(parts)

    async def _refresh(self) -> None:
        while True:
            seen, since = self._live.num_chunks, perf_counter()
            await asyncio.sleep(REFRESH_S)
            self._bar.set_postfix_str(self.text((self._live.num_chunks - seen) / (perf_counter() - since)))
