"""Chairlift's engine, driven as its own thread drives it, with a clock beside it."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comparison.ceiling import Workload

from chairlift import EngineConfig, SamplingParams
from chairlift.config import ResolvedConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.runner import Launch, ModelRunner
from chairlift.engine.parts import Pacing, Parts
from chairlift.models import Checkpoint, load_forward
from chairlift.models.attention import Forward
from chairlift.plan import StepPlan
from chairlift.scheduler import Request
from on_gpu.device import Idle, profile_idle, wait_for
from on_gpu.scale import GREEDY, PENALTY, SAMPLINGS, Decode

_NUM_WARM = 17  # tokens of each row before the clock runs: two launches of eight, after the prompt's
_NUM_ARRIVALS = 7  # of single prompts, of whose times the median counts; the first one's is left out
TOKENS_BESIDE = 48 * _NUM_ARRIVALS  # of each row while they arrive, which is more than it takes


class Graphs(StrEnum):
    """Names the steps that are recorded as CUDA graphs."""

    ALL = "graphs"
    DECODE = "graphs of decode steps"
    NONE = "no graphs"


def parts_of(device: torch.device, graphs: Graphs) -> Parts:
    """The device's own, but for the graphs. A CPU has none."""
    pacing = Pacing.of(device)
    match graphs:
        case Graphs.ALL:
            return Parts(pacing=pacing)
        case Graphs.DECODE:
            return Parts(pacing=pacing, load_forward=_load_unpadded)
    return Parts(pacing=replace(pacing, recorder=None))


def _load_unpadded(checkpoint: Checkpoint, config: ResolvedConfig) -> Forward:
    return unpadded(load_forward(checkpoint, config))


def unpadded(forward: Forward) -> Forward:
    """Makes it one that runs no padded steps, and is otherwise as before: so steps with prompts are not recorded."""
    forward.__class__ = type("Unpadded", (type(forward),), {"can_pad": False})
    return forward


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean seconds of a decode step, and how many tokens the rows had generated in the middle of that time."""

    seconds: float
    num_generated: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Median seconds from a prompt's arrival to its first token, and of these the host's for launching its step."""

    seconds: float
    host_seconds: float


class _TimedRunner(ModelRunner):
    """Notes how long the host takes for the newest launch with a prompt in it."""

    prompt_seconds = 0.0

    def launch(self, plan: StepPlan) -> Launch:
        start = time.perf_counter()
        launch = super().launch(plan)
        if not plan.is_decode:
            self.prompt_seconds = time.perf_counter() - start
        return launch


class Engine:
    """An `EngineCore` on random weights. Not to be used by two threads."""

    def __init__(
        self,
        model: Path,
        device: str,
        dtype: str,
        *,
        num_slots: int,
        slot_len: int,
        num_steps: int,
        graphs: Graphs = Graphs.ALL,
        load_format: str = "dummy",
        attention: str = "auto",
        quantization: str | None = None,
    ) -> None:
        """`num_steps`: decode steps a launch."""
        config = EngineConfig(
            model=str(model),
            device=device,
            dtype=dtype,
            load_format=load_format,
            attention_backend=attention,
            quantization=quantization,
            max_batch_size=num_slots,
            max_seq_len=slot_len,
            max_steps_per_launch=num_steps,
        )
        self._device = torch.device(device)
        parts = replace(parts_of(self._device, graphs), make_runner=self._make_runner)
        self._runners: list[_TimedRunner] = []
        self._core = EngineCore(config, parts)
        self._ids = count()
        name = Graphs.NONE if parts.pacing is None or parts.pacing.recorder is None else graphs
        self.variant = f"{self._core.config.attention_backend}, {name}, {num_steps} a launch"

    def step_time(self, decode: Decode, num_tokens: int) -> StepTime:
        """While all rows decode, about that many tokens each, and nothing else happens."""
        num_tokens += self._num_warm(decode)
        self._add(decode.lengths, num_tokens, decode.sampling)
        warm = [mark for mark in self._progress(decode.num_rows) if mark.fewest >= _NUM_WARM]
        first, last = warm[0], [mark for mark in warm if mark.most < num_tokens][-1]
        return StepTime(
            (last.seconds - first.seconds) / (last.fewest - first.fewest), (first.fewest + last.fewest) // 2
        )

    def idle(self, decode: Decode, num_launches: int, num_steps: int) -> Idle:
        """Returns how much of the time the device has nothing to do, over that many launches of decode steps."""
        num_tokens = self._num_warm(decode) + (num_launches + 2) * num_steps
        self._add(decode.lengths, num_tokens, decode.sampling)
        progress = self._progress(decode.num_rows)
        next(mark for mark in progress if mark.fewest >= _NUM_WARM)

        def run() -> None:
            for _ in range(num_launches):
                self._core.step()
            wait_for(self._device)

        idle = profile_idle(run, self._device)
        for _ in progress:
            pass
        return idle

    def seconds(self, workload: Workload) -> float:
        """From the arrival of all requests to the last token of the last one."""
        start = time.perf_counter()
        self._add([workload.prompt_tokens] * workload.num_requests, workload.output_tokens)
        for _ in self._progress(workload.num_requests):
            pass
        return time.perf_counter() - start

    def first_token(self, num_prompt_tokens: int, beside: Decode | None = None) -> FirstToken:
        """Measures a prompt that arrives at an engine that is idle, or while `beside`'s rows decode."""
        if beside is not None:
            self._add(beside.lengths, self._num_warm(beside) + TOKENS_BESIDE, beside.sampling)
            next(mark for mark in self._progress(beside.num_rows) if mark.fewest >= _NUM_WARM)
        times = [self._arrive(num_prompt_tokens) for _ in range(_NUM_ARRIVALS)][1:]
        if beside is not None and not self._core.has_work:
            raise RuntimeError("the rows ended before all prompts had come")
        while self._core.has_work:
            self._core.step()
        return FirstToken(median(each.seconds for each in times), median(each.host_seconds for each in times))

    def _arrive(self, num_prompt_tokens: int) -> FirstToken:
        """One prompt, whose first token is its last."""
        start = time.perf_counter()
        (name,) = self._add([num_prompt_tokens], 1)
        while not any(event.request_id == name and event.new_token_ids for event in self._core.step()):
            pass
        return FirstToken(time.perf_counter() - start, self._runners[0].prompt_seconds)

    def _make_runner(self, *parts: Any, **options: Any) -> ModelRunner:
        self._runners.append(_TimedRunner(*parts, **options))
        return self._runners[-1]

    def _num_warm(self, decode: Decode) -> int:
        """Tokens of the first row when the last one is warm: it decodes while the others' prompts are computed."""
        num_prompt_tokens = max(1, self._core.config.max_num_batched_tokens - decode.num_rows)  # of a step
        return _NUM_WARM + -(-sum(decode.lengths) // num_prompt_tokens)

    def _add(self, lengths: Sequence[int], num_tokens: int, sampling: str = GREEDY) -> list[str]:
        """Adds a request with a random prompt for each length; returns their names."""
        requests: list[Request] = []
        for length, number in zip(lengths, self._ids, strict=False):
            generator = torch.Generator().manual_seed(number)
            prompt = torch.randint(0, self._core.vocab_size, (length,), generator=generator).tolist()
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **SAMPLINGS[sampling])
            if sampling == PENALTY and not requests:
                params = params.model_copy(update={"repetition_penalty": 1.1})
            requests.append(Request(str(number), prompt, params, max_tokens=num_tokens, seed=number))
        for request in requests:
            self._core.add(request)
        return [request.request_id for request in requests]

    def _progress(self, num_rows: int) -> Iterator["_Mark"]:
        """After each step, until all rows have ended."""
        counts: Counter[str] = Counter()
        while self._core.has_work:
            for event in self._core.step():
                counts[event.request_id] += len(event.new_token_ids)
            fewest = min(counts.values()) if len(counts) == num_rows else 0
            yield _Mark(time.perf_counter(), fewest, max(counts.values(), default=0))


@dataclass(frozen=True, slots=True)
class _Mark:
    """Says how far the rows have come at that time: generated tokens of the row with the fewest, and with the most."""

    seconds: float
    fewest: int
    most: int
