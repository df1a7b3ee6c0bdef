"""What a step's token budget costs running streams and brings long prompts: the figure behind the default.

    python benchmarks/token_budget.py --budgets 64 256 1024 4096

Streams decode; then long prompts come in one after another, the next when the last has its first token, so that every
step is a mixed one. For each `max_num_batched_tokens` it shows the gaps between the streams' tokens meanwhile (ITL,
median and p99), the same with no long prompt there ("alone"), the long prompts' time to first token, and what was
computed per second of either. In process, an engine of its own for each budget and round, prefix caching off; budgets
take turns, the order rotating, and figures are medians over rounds. The last line is JSON.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np
from machine import describe_commit, describe_machine, print_report
from shapes import SHAPES, make_checkpoint, make_servable

from chairlift import AsyncLLM, SamplingParams
from chairlift.loadtest.records import MS_PER_S

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
        """How many tokens all streams got in that time."""
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


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """What one round comes to. Times in ms, rates per second; of all streams together where they are tokens.

    `tpot_ms` is the time per output token of a stream while long prompts come in: all streams move on together, so it
    is every stream's. `quiet_itl_p50_ms` is the median gap before.
    """

    tpot_ms: float
    itl_p99_ms: float
    quiet_itl_p50_ms: float
    ttft_p50_ms: float
    prompt_tokens_per_s: float
    stream_tokens_per_s: float

    @classmethod
    def of(cls, seen: MixFigures, mix: Mix) -> Self:
        return cls(
            tpot_ms=seen.busy_s * MS_PER_S * mix.num_streams / seen.streamed_tokens,
            itl_p99_ms=float(np.percentile(seen.gaps_ms, 99)),
            quiet_itl_p50_ms=statistics.median(seen.quiet_gaps_ms),
            ttft_p50_ms=statistics.median(seen.ttft_ms),
            prompt_tokens_per_s=len(seen.ttft_ms) * mix.long_prompt_tokens / seen.busy_s,
            stream_tokens_per_s=seen.streamed_tokens / seen.busy_s,
        )


@dataclass(slots=True)
class Trial:
    """All rounds of one budget."""

    budget: int
    rounds: list[RoundFigures] = field(default_factory=list)

    @property
    def medians(self) -> RoundFigures:
        """Each figure's median over the rounds."""
        names = [each.name for each in fields(RoundFigures)]
        return RoundFigures(**{name: statistics.median(getattr(each, name) for each in self.rounds) for name in names})


def record(trial: Trial) -> dict[str, Any]:
    """A trial as JSON: medians over its rounds, and the rounds."""
    return {
        "budget": trial.budget,
        "medians": asdict(trial.medians),
        "rounds": [asdict(each) for each in trial.rounds],
    }


def table(trials: Sequence[Trial]) -> str:
    """A line for each budget."""
    heads = ("budget", "TPOT, ms", "ITL p99, ms", "alone, ms", "long TTFT, ms", "prompt tok/s", "stream tok/s")
    lines = ["".join(f"{head:>15}" for head in heads)]
    for trial in trials:
        of = trial.medians
        times = [of.tpot_ms, of.itl_p99_ms, of.quiet_itl_p50_ms, of.ttft_p50_ms]
        rates = [of.prompt_tokens_per_s, of.stream_tokens_per_s]
        cells = [f"{time:>15.1f}" for time in times] + [f"{rate:>15,.0f}" for rate in rates]
        lines.append(f"{trial.budget:>15}" + "".join(cells))
    return "\n".join(lines)


_BUDGETS = [64, 128, 256, 512, 1024, 2048, 4096]
_MAX_SEQ_LEN = 8192


def main() -> int:
    """Measures, prints a table, and as the last line everything as JSON; returns the exit code."""
    arguments = _parse_arguments()
    mix = Mix(**{each.name: getattr(arguments, each.name) for each in fields(Mix)})
    if complaint := _complaint(mix, arguments):
        print(f"token_budget.py: {complaint}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        weights = arguments.model or make_checkpoint(arguments.shape, Path(scratch) / "weights", arguments.dtype)
        model = make_servable(weights.absolute(), Path(scratch) / "model", arguments.max_seq_len)
        trials = _run(model, mix, arguments)
    report = {
        "settings": _described(mix, arguments),
        "machine": describe_machine(),
        "commit": describe_commit(Path(__file__).parents[1]),
        "results": [record(trial) for trial in trials],
    }
    print(table(trials))
    print_report(report, arguments.json)
    return 0


def _complaint(mix: Mix, arguments: argparse.Namespace) -> str | None:
    """What cannot be measured, and what to change."""
    if min(arguments.budgets) < mix.num_slots:
        return f"--budgets: {min(arguments.budgets)} is less than a token for each of {mix.num_slots} requests"
    if mix.long_prompt_tokens >= arguments.max_seq_len:
        most = arguments.max_seq_len
        return f"--long-prompt-tokens must be below --max-seq-len, {most}: lower the first, or raise the second"
    return None


def _run(model: Path, mix: Mix, arguments: argparse.Namespace) -> list[Trial]:
    trials = [Trial(budget) for budget in arguments.budgets]
    for number in range(arguments.rounds):
        first = number % len(trials)
        for trial in trials[first:] + trials[:first]:
            measuring = measure(model, arguments.dtype, trial.budget, mix, arguments.max_seq_len, seed=number)
            trial.rounds.append(RoundFigures.of(asyncio.run(measuring), mix))
            print(f"round {number + 1}, budget {trial.budget}: done", file=sys.stderr, flush=True)
    return trials


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="135m", help="random weights of this shape")
    parser.add_argument("--model", type=Path, help="a Llama checkpoint directory whose weights to use instead")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--budgets", type=int, nargs="+", default=_BUDGETS)
    parser.add_argument("--streams", dest="num_streams", type=int, default=16)
    parser.add_argument("--stream-prompt-tokens", type=int, default=128)
    parser.add_argument("--quiet-tokens", type=int, default=32, help="of each stream, before long prompts come")
    parser.add_argument("--long-prompts", dest="num_long_prompts", type=int, default=8, help="in each round")
    parser.add_argument("--long-prompt-tokens", type=int, default=4096)
    parser.add_argument("--max-seq-len", type=int, default=_MAX_SEQ_LEN)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the JSON too")
    return parser.parse_args()


def _described(mix: Mix, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "shape": arguments.model.name if arguments.model else arguments.shape,
        "dtype": arguments.dtype,
        "mix": asdict(mix),
        "budgets": arguments.budgets,
        "max_seq_len": arguments.max_seq_len,
        "rounds": arguments.rounds,
    }


if __name__ == "__main__":
    sys.exit(main())
