"""`chairlift serve` with a device that only sleeps: the real server, scheduler and host half of the runner, no model.

    FAKE_DEVICE_STEP_S=0.008 FAKE_DEVICE_FILE=FILE python benchmarks/fake_server.py [flags of `chairlift serve`]

A launch takes so long for each of its steps, whatever is in it, beside the host as on a GPU: one launch is ahead. Every
row writes the letter Z until its length is reached.
"""

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from peers.sleeping_device import Device

from chairlift.__main__ import COMMANDS, serve
from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import ResolvedConfig
from chairlift.device import Arrival
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.runner import Launch, ModelRunner
from chairlift.engine.parts import Pacing, Parts
from chairlift.engine.thread import LocalEngine
from chairlift.flags import read_settings
from chairlift.models import Checkpoint
from chairlift.models.attention import BatchMetadata
from chairlift.plan import StepPlan

LETTER = "Z"


@dataclass(frozen=True)
class _Arrival(Arrival):
    """The end of what the device has to do by now."""

    device: Device
    time: float

    def wait(self) -> None:
        self.device.wait_until(self.time)


class _Forward:
    """See `forward.Forward`: hidden states of one element, and logits that are the same at every place."""

    def __init__(self, device: Device, vocab_size: int) -> None:
        self._device = device
        self._logits = torch.zeros(vocab_size)
        self._logits[ord(LETTER)] = 1.0  # the bundled tokenizer's tokens are bytes

    def hidden(
        self, batch: BatchMetadata, input_ids: torch.Tensor, cache: ContinuousBatchingKVCacheCollection
    ) -> torch.Tensor:
        del batch, cache
        self._device.launch(len(input_ids))
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits.repeat(len(hidden), 1)


class _Runner(ModelRunner):
    """Its launches end when the device has ended them."""

    device: Device

    def launch(self, plan: StepPlan) -> Launch:
        return replace(super().launch(plan), arrival=_Arrival(None, self.device, self.device.end))


def parts_of(device: Device) -> Parts:
    """The parts of an engine that runs on the device."""

    def load(checkpoint: Checkpoint, _: ResolvedConfig) -> _Forward:
        return _Forward(device, checkpoint.config.vocab_size)

    def make_runner(*given: Any, **named: Any) -> ModelRunner:
        runner = _Runner(*given, **named)
        runner.device = device
        return runner

    return Parts(load_forward=load, make_runner=make_runner, pacing=Pacing(num_launches_ahead=1))


def main() -> int:
    """Serves until a signal, as `chairlift serve` does."""
    parts = parts_of(Device())
    engine_config, config = read_settings(COMMANDS["serve"], sys.argv[1:])
    return serve(engine_config, config, lambda given: AsyncLLM.of(LocalEngine(EngineCore(given, parts))))


if __name__ == "__main__":
    sys.exit(main())
