"""`chairlift serve` with a device that only sleeps: the real server, scheduler and host half of the runner, no model.

    FAKE_DEVICE_STEP_S=0.008 FAKE_DEVICE_FILE=FILE python benchmarks/fake_server.py [flags of `chairlift serve`]

A launch takes so long for each of its steps, whatever is in it, beside the host as on a GPU: one launch is ahead. Every
row writes the letter Z until its length is reached.
"""

import sys

import torch
from peers.sleeping_device import Device

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.config import ResolvedConfig
from chairlift.engine import executor
from chairlift.engine.execution import runner
from chairlift.models import Checkpoint
from chairlift.models.attention import BatchMetadata

LETTER = "Z"


class _Arrival:
    """See `transfers.Arrival`; there is one device."""

    device: Device

    def __init__(self) -> None:
        self._time = self.device.end

    @classmethod
    def mark(cls, _: torch.device) -> "_Arrival":
        return cls()

    def wait(self) -> None:
        self.device.wait_until(self._time)


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


def install(device: Device) -> None:
    """Every engine that this process makes from here on runs on the device."""

    def load(checkpoint: Checkpoint, _: ResolvedConfig) -> _Forward:
        return _Forward(device, checkpoint.config.vocab_size)

    _Arrival.device = device
    pacing = executor.Pacing(num_launches_ahead=1)
    for owner, name, replacement in (
        (executor, "load_forward", load),
        (executor.Pacing, "of", lambda _: pacing),
        (runner, "Arrival", _Arrival),
    ):
        setattr(owner, name, replacement)


def main() -> int:
    """Serves until a signal, as `chairlift serve` does."""
    from chairlift.__main__ import main as run

    install(Device())
    return run(["serve", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
