"""Streams that run on while long prompts come in: the engine with one step's token budget, measured in process.

One long prompt is always on its way: the next is sent when the last has its first token. So every step that the streams
see in that time is a mixed one, and how they fare does not depend on how often prompts come.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Self

import numpy as np

from chairlift import AsyncLLM, SamplingParams
from chairlift.bench.records import MS_PER_S

_SETTLING_TOKENS = 8  # of each stream, before anything is measured


@dataclass(frozen=True, slots=True)
class Mix:
    """What runs beside what; lengths in tokens. `quiet_tokens`: of each stream, measured before long prompts come."""

    num_streams: int
    stream_prompt_tokens: int
    quiet_tokens: int
    num_long_prompts: int
    long_prompt_tokens: int

    @property
    def num_slots(self) -> int:
        return self.num_streams + 1


@dataclass(frozen=True, slots=True)
class MixFigures:
    """What was seen of one budget: gaps between a stream's tokens and times to the long prompts' first tokens, in ms.

    `busy_s`: seconds in which long prompts were on their way. `streamed_tokens`: what all streams got in that time.
    """

    budget: int
    quiet_gaps_ms: tuple[float, ...]
    gaps_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    busy_s: float
    streamed_tokens: int


async def measure(model: Path, dtype: str, budget: int, mix: Mix, max_seq_len: int, seed: int) -> MixFigures:
    """Runs the mix once, on an engine of its own."""
    generator = np.random.default_rng(seed)
    async with AsyncLLM(
        str(model),
        dtype=dtype,
        max_batch_size=mix.num_slots,
        max_seq_len=max_seq_len,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    ) as llm:
        vocab_size = len(llm.inputs.tokenizer.backend.get_vocab())
        prompts = generator.integers(vocab_size, size=(mix.num_streams, mix.stream_prompt_tokens)).tolist()
        long_prompts = generator.integers(vocab_size, size=(mix.num_long_prompts, mix.long_prompt_tokens)).tolist()
        async with Streams(llm, prompts) as streams:
            await streams.wait_for(_SETTLING_TOKENS)
            quiet_from = perf_counter()
            await streams.wait_for(_SETTLING_TOKENS + mix.quiet_tokens)
            busy_from = perf_counter()
            seconds = [await _first_token(llm, prompt) for prompt in long_prompts]
            busy_to = perf_counter()
            streams.require_running()
    return MixFigures(
        budget=budget,
        quiet_gaps_ms=tuple(streams.gaps_ms(quiet_from, busy_from)),
        gaps_ms=tuple(streams.gaps_ms(busy_from, busy_to)),
        ttft_ms=tuple(each * MS_PER_S for each in seconds),
        busy_s=busy_to - busy_from,
        streamed_tokens=streams.num_tokens(busy_from, busy_to),
    )


class Streams:
    """An async context in which prompts are continued until it is left; it notes when each token came."""

    def __init__(self, llm: AsyncLLM, prompts: Sequence[list[int]]) -> None:
        self._llm = llm
        self._prompts = prompts
        self._times: list[list[float]] = [[] for _ in prompts]
        self._has_news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        pairs = zip(self._prompts, self._times, strict=True)
        self._tasks = [asyncio.create_task(self._follow(prompt, times)) for prompt, times in pairs]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def wait_for(self, num_tokens: int) -> None:
        """Until every stream has so many. Raises `RuntimeError` if one ended before."""
        while min(map(len, self._times)) < num_tokens:
            self._has_news.clear()
            await self._has_news.wait()
            self.require_running()

    def require_running(self) -> None:
        """Raises what ended a stream, or `RuntimeError` if its slot was full."""
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a stream's slot was full before all was measured: raise --max-seq-len")

    def gaps_ms(self, since: float, until: float) -> list[float]:
        """Milliseconds between a stream's tokens, where the later one came in that time (of `perf_counter`)."""
        return [
            (later - earlier) * MS_PER_S
            for times in self._times
            for earlier, later in pairwise(times)
            if since < later <= until
        ]

    def num_tokens(self, since: float, until: float) -> int:
        """Of all streams in that time."""
        return sum(bisect_right(times, until) - bisect_right(times, since) for times in self._times)

    async def _follow(self, prompt: list[int], times: list[float]) -> None:
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        try:
            async for output in self._llm.generate(prompt, params):
                now = perf_counter()
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
                self._has_news.set()
        finally:
            self._has_news.set()


async def _first_token(llm: AsyncLLM, prompt: list[int]) -> float:
    """Seconds to it."""
    sent_at = perf_counter()
    async for _ in llm.generate(prompt, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)):
        return perf_counter() - sent_at
    raise RuntimeError("a long prompt ended without a token")
