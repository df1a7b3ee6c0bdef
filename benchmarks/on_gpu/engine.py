"""Chairlift's engine, driven as its own thread drives it, with a clock beside it."""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from comparison.ceiling import Workload

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.core import EngineCore
from chairlift.engine.parts import Pacing, Parts
from chairlift.scheduler import Request
from on_gpu.device import Idle, profile_idle, wait_for
from on_gpu.scale import Decode

_NUM_WARM = 17  # tokens of each row before the clock runs: two launches of eight, after the prompt's


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean seconds of a decode step, and how many tokens the rows had generated in the middle of that time."""

    seconds: float
    num_generated: int


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
        has_graphs: bool = True,
    ) -> None:
        """`num_steps`: decode steps a launch."""
        config = EngineConfig(
            model=str(model),
            device=device,
            dtype=dtype,
            load_format="dummy",
            max_batch_size=num_slots,
            max_seq_len=slot_len,
            max_steps_per_launch=num_steps,
        )
        self._device = torch.device(device)
        pacing = Pacing.of(self._device) if has_graphs else Pacing(int(device != "cpu"), recorder=None)
        self._core = EngineCore(config, Parts(pacing=pacing))
        self._ids = count()
        graphs = "no graphs" if pacing.recorder is None else "graphs"
        self.variant = f"{self._core.config.attention_backend}, {graphs}, {num_steps} a launch"

    def step_time(self, decode: Decode, num_tokens: int) -> StepTime:
        """While all rows decode, about that many tokens each, and nothing else happens."""
        num_tokens += self._num_warm(decode)
        self._add(decode.num_rows, decode.context, num_tokens)
        warm = [mark for mark in self._progress(decode.num_rows) if mark.fewest >= _NUM_WARM]
        first, last = warm[0], [mark for mark in warm if mark.most < num_tokens][-1]
        return StepTime(
            (last.seconds - first.seconds) / (last.fewest - first.fewest), (first.fewest + last.fewest) // 2
        )

    def idle(self, decode: Decode, num_launches: int, num_steps: int) -> Idle:
        """How much of the time the device has nothing to do, over that many launches of decode steps."""
        num_tokens = self._num_warm(decode) + (num_launches + 2) * num_steps
        self._add(decode.num_rows, decode.context, num_tokens)
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
        self._add(workload.num_requests, workload.prompt_tokens, workload.output_tokens)
        for _ in self._progress(workload.num_requests):
            pass
        return time.perf_counter() - start

    def _num_warm(self, decode: Decode) -> int:
        """Tokens of the first row when the last one is warm: it decodes while the others' prompts are computed."""
        return _NUM_WARM + -(-decode.num_rows * decode.context // self._core.config.max_num_batched_tokens)

    def _add(self, num_rows: int, num_prompt_tokens: int, num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        for _ in range(num_rows):
            number = next(self._ids)
            generator = torch.Generator().manual_seed(number)
            prompt = torch.randint(0, self._core.vocab_size, (num_prompt_tokens,), generator=generator).tolist()
            self._core.add(Request(str(number), prompt, params, max_tokens=num_tokens, seed=0))

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
    """How far the rows have come at that time: generated tokens of the row with the fewest, and with the most."""

    seconds: float
    fewest: int
    most: int
