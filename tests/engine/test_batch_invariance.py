"""`batch_invariant`: a request's logits are the same, bit for bit, whatever else is in the batch.

The cpu backend has that property anyway; the torch backend has it on demand.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import EngineConfig, SamplingParams
from chairlift.config import DType
from chairlift.engine.core import EngineCore
from chairlift.engine.sampling import NOTHING_GUESSED, Guessed
from chairlift.engine.sampling.sampler import Sampled, SamplingBatch
from chairlift.models import InvariantForward, load_model, open_checkpoint
from chairlift.models.decoder import Decoder
from chairlift.plan import RowPlan
from chairlift.scheduler import Request
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels import needs_kernels

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TORCH = {"batch_invariant": True, "attention_backend": "torch", "dtype": "float32"}


class Recorder:
    """A core, and the logits of each step of the request "x" in it."""

    def __init__(self, model: str = "bundled", **config: object) -> None:
        sizes = {"max_batch_size": 8, "max_seq_len": 192, "max_num_batched_tokens": 512, "max_steps_per_launch": 1}
        fields = {"model": model, "device": "cpu", **sizes, **TORCH, **config}
        self.core = EngineCore(EngineConfig.model_validate(fields))
        self._rows: list[str] = []
        self._seen: list[torch.Tensor] = []
        sampler = self.core.executor.sampler
        sample, gather = sampler.sample, sampler.prepare

        def record(logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
            if "x" in self._rows:
                self._seen.append(logits[self._rows.index("x")].clone())
            return sample(logits, batch, step)

        def prepare(rows: Sequence[RowPlan], num_steps: int, guessed: Guessed = NOTHING_GUESSED) -> SamplingBatch:
            self._rows = [row.key.tag for row in rows]
            return gather(rows, num_steps, guessed)

        sampler.sample, sampler.prepare = record, prepare  # type: ignore[method-assign]

    def logits(self, prompt: list[int], others: Sequence[list[int]] = (), place: int = 0) -> torch.Tensor:
        """`[NUM_TOKENS, vocab]` of the prompt's steps, among others that come before (up to `place`) and after it."""
        self._seen.clear()
        named = [(f"other {index}", other) for index, other in enumerate(others)]
        named.insert(place, ("x", prompt))
        self.core.add(*(Request(name, token_ids, PARAMS, NUM_TOKENS, seed=0) for name, token_ids in named))
        while self.core.has_work:
            self.core.step()
        return torch.stack(self._seen[:NUM_TOKENS])


def prompt_of(rng: random.Random, num_tokens: int | None = None) -> list[int]:
    return [rng.randrange(250) for _ in range(num_tokens or rng.randrange(1, 120))]


def variations(model: str = "bundled", **config: Any) -> list[torch.Tensor]:
    """Logits of one prompt in many circumstances; the first: alone, computed at once."""
    rng = random.Random(7)
    prompt = prompt_of(rng, 90)
    found = []
    for budget in (512, 13):  # how prompts are cut
        recorder = Recorder(model, max_num_batched_tokens=budget, **config)
        for num_others, place in ((0, 0), (1, 1), (3, 0), (6, 4)):
            found.append(recorder.logits(prompt, [prompt_of(rng) for _ in range(num_others)], place))
    return found


def native(**config: object) -> Any:
    return pytest.param({"attention_backend": "cpu", **config}, marks=needs_kernels)


@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        native(),
        native(dtype="bfloat16"),
        native(quantization="int4"),
        native(dtype="bfloat16", quantization="int8"),
        native(dtype="bfloat16", batch_invariant=False),
    ],
    ids=str,
)
def test_logits_do_not_depend_on_the_batch_the_slot_or_the_chunks(config: dict[str, Any]) -> None:
    alone, *others = variations(**config)
    assert all(torch.equal(alone, other) for other in others)


def test_sizes_that_no_vector_width_divides_are_no_exception(tmp_path: Path) -> None:
    heads: dict[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 1}
    make_checkpoint(tmp_path, hidden_size=40, intermediate_size=72, vocab_size=261, **heads)
    alone, *others = variations(str(tmp_path))
    assert all(torch.equal(alone, other) for other in others)


def test_without_it_they_do_depend() -> None:
    """So that the tests above can fail: on every machine seen so far some of these differ in their last bits."""
    alone, *others = variations(batch_invariant=False)
    assert not all(torch.equal(alone, other) for other in others)
    assert all(torch.allclose(alone, other, atol=1e-3) for other in others)


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_kernels), "torch"])
def test_a_token_gets_the_same_bits_prefilled_and_decoded_and_nearly_those_of_other_ways(backend: str) -> None:
    rng = random.Random(3)
    prompt = prompt_of(rng, 60)
    recorder = Recorder(attention_backend=backend)
    decoded = recorder.logits(prompt)
    longer = [*prompt, *decoded.argmax(dim=-1).tolist()[:5]]
    assert torch.equal(recorder.logits(longer)[0], decoded[5])
    several = Recorder(attention_backend=backend, max_steps_per_launch=4)
    assert torch.equal(several.logits(prompt, [prompt_of(rng) for _ in range(2)]), decoded)
    assert torch.allclose(decoded, Recorder(batch_invariant=False).logits(prompt), atol=1e-3)


class Uneven(Decoder):
    """Computes logits as a kernel might do that treats a fifth row differently."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        changed = super().logits(hidden)
        changed[4:] += 1e-3
        return changed


def test_an_uneven_tile_size_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    even = load_model(open_checkpoint("bundled"), DType.FLOAT32, "cpu", NUM_TOKENS)
    model = Uneven(even.config).requires_grad_(False)
    model.finalize(NUM_TOKENS)
    model.load_state_dict(even.state_dict())
    with caplog.at_level("INFO"):
        InvariantForward(model)
    assert "tiles of 4" in caplog.text
