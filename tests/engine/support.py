"""What the tests of the engine share: requests and events in one line, a core held back, waiting without sleeping."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chairlift.config import AttentionBackend, DType, ResolvedConfig
from chairlift.engine.core import EngineCore
from chairlift.params import FinishReason, SamplingParams
from chairlift.scheduler import Request, TokenEvent
from tests.engine.tokenizers_made import make_byte_tokenizer
from tests.support.checkpoints import make_checkpoint

DEADLINE_S = 20.0
VOCAB_SIZE = 259  # of the byte tokenizer: 256 bytes, then <|endoftext|>, <|im_start|>, <|im_end|>
END_TOKEN = 258

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": END_TOKEN,
}

# One thread: at this size a second one only waits for the first.
ENGINE: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}


def make_tiny_checkpoint(directory: Path) -> str:
    """A model of a few thousand weights that answers at once, and its path."""
    make_checkpoint(directory, seed=3, **TINY)
    make_byte_tokenizer(directory)
    return str(directory)


def make_request(
    params: SamplingParams,
    slot: int | None = None,
    prompt: list[int] | None = None,
    seed: int = 0,
    eos: frozenset[int] = frozenset(),
) -> Request:
    request = Request("r-0", prompt or [1], params, max_tokens=10_000, seed=seed, eos_token_ids=eos)
    request.slot = slot
    return request


def event(
    request_id: str, token_ids: list[int], finish: FinishReason | None = None, stop_reason: int | None = None
) -> TokenEvent:
    return TokenEvent(request_id, token_ids, finish, stop_reason)


def resolved_config(model: Path | str, **changes: Any) -> ResolvedConfig:
    """Slots of 64 tokens on the CPU."""
    fields: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "dtype": DType.FLOAT32,
        "attention_backend": AttentionBackend.TORCH,
        "max_batch_size": 4,
        "max_seq_len": 64,
        "max_num_batched_tokens": 64,
        "max_steps_per_launch": 1,
    }
    return ResolvedConfig(**{**fields, **changes})


class StepGate:
    """Lets an engine take a step only when the test says so. Open it for good before closing the engine."""

    def __init__(self, core: EngineCore) -> None:
        self._step = core.step
        self._permits = threading.Semaphore(0)
        self._is_open = False
        self._entered = threading.Semaphore(0)

    def step(self) -> list[TokenEvent]:
        """In the place of `core.step`."""
        self._entered.release()
        if not self._is_open:
            self._permits.acquire()
        return self._step()

    def allow(self, num_steps: int) -> None:
        self._permits.release(num_steps)

    def open(self) -> None:
        """All steps may be taken from now on."""
        self._is_open = True
        self._permits.release()

    def fail(self, error: Exception) -> None:
        """The step that waits, and all after it, raise this."""

        def failing_step() -> list[TokenEvent]:
            raise error

        self._step = failing_step
        self.open()

    async def wait_until_in_step(self) -> None:
        """Returns when a step has begun (one more than at the last call) and waits at the gate."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=DEADLINE_S), "the engine takes no step"


async def wait_until(is_true: Callable[[], bool], what: str) -> None:
    """Gives the event loop and the engine thread time until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, f"not so in time: {what}"
        await asyncio.sleep(0.001)
