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
from chairlift.engine.core import EngineCore
from chairlift.engine.sampling import NOTHING_GUESSED, Guessed
from chairlift.engine.sampling.sampler import Sampled, SamplingBatch
from chairlift.models import InvariantForward
from chairlift.models.cpu import CpuDecoder
from chairlift.scheduler import Request, RequestState
from tests.support.checkpoints import make_checkpoint
from tests.support.kernels import needs_kernels

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CHUNKINGS = (512, 8, 37)  # the step's token budget: how prompts are cut


class Recorder:
    """A core, and the logits of each step of the request "x" in it."""

    def __init__(
        self, model: str, max_num_batched_tokens: int = 512, max_steps_per_launch: int = 1, **config: object
    ) -> None:
        settings = {
            "model": model,
            "max_batch_size": 8,
            "max_seq_len": 192,
            "device": "cpu",
            "batch_invariant": True,
            "attention_backend": "torch",
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_steps_per_launch": max_steps_per_launch,
        }
        self.core = EngineCore(EngineConfig.model_validate(settings | config))
        self._rows: list[str] = []
        self._seen: list[torch.Tensor] = []
        sampler = self.core._runner._sampler
        sample, gather = sampler.sample, sampler.prepare

        def record(logits: torch.Tensor, batch: SamplingBatch, step: int) -> Sampled:
            if "x" in self._rows:
                self._seen.append(logits[self._rows.index("x")].clone())
            return sample(logits, batch, step)

        def prepare(
            requests: Sequence[RequestState], num_steps: int, guessed: Guessed = NOTHING_GUESSED
        ) -> SamplingBatch:
            self._rows = [request.request_id for request in requests]
            return gather(requests, num_steps, guessed)

        sampler.sample, sampler.prepare = record, prepare  # type: ignore[method-assign]

    def logits(self, prompt: list[int], others: list[list[int]], place: int = 0) -> torch.Tensor:
        """`[NUM_TOKENS, vocab]` of the prompt's steps, among others that come before (up to `place`) and after it."""
        self._seen.clear()
        names = [(f"other {index}", other) for index, other in enumerate(others)]
        names.insert(place, ("x", prompt))
        for name, token_ids in names:
            self.core.add(Request(name, token_ids, PARAMS, NUM_TOKENS, seed=0))
        while self.core.has_work:
            self.core.step()
        return torch.stack(self._seen[:NUM_TOKENS])


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sizes that no vector width divides."""
    directory: Path = tmp_path_factory.mktemp("odd")
    make_checkpoint(
        directory, hidden_size=40, intermediate_size=72, num_attention_heads=5, num_key_value_heads=1, vocab_size=261
    )
    return str(directory)


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(250) for _ in range(rng.randrange(1, 120))] for _ in range(count)]


def variations(model: str, **config: Any) -> list[torch.Tensor]:
    """Logits of one prompt in many circumstances; the first: alone, computed at once."""
    rng = random.Random(7)
    prompt = [rng.randrange(250) for _ in range(90)]
    found = []
    for budget in CHUNKINGS:
        recorder = Recorder(model, budget, **config)
        for num_others, place in ((0, 0), (1, 1), (3, 0), (6, 4)):
            found.append(recorder.logits(prompt, prompts(rng, num_others), place))
    return found


def native(**config: object) -> Any:
    return pytest.param({"attention_backend": "cpu", **config}, marks=needs_kernels)


BACKENDS = [pytest.param("cpu", marks=needs_kernels), "torch"]


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        native(dtype="float32"),
        native(dtype="bfloat16"),
        native(dtype="float32", quantization="int4"),
        native(dtype="bfloat16", quantization="int8"),
        native(dtype="bfloat16", batch_invariant=False),
    ],
)
def test_logits_do_not_depend_on_the_batch_the_slot_or_the_chunks(config: dict[str, object]) -> None:
    alone, *others = variations("bundled", **config)
    assert all(torch.equal(alone, other) for other in others)


def test_sizes_that_no_vector_width_divides_are_no_exception(odd: str) -> None:
    alone, *others = variations(odd, dtype="float32")
    assert all(torch.equal(alone, other) for other in others)


def test_without_it_they_do_depend() -> None:
    """So that the tests above can fail: on every machine seen so far some of these differ in their last bits."""
    alone, *others = variations("bundled", dtype="float32", batch_invariant=False)
    assert not all(torch.equal(alone, other) for other in others)
    assert all(torch.allclose(alone, other, atol=1e-3) for other in others)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_gets_the_same_bits_prefilled_and_decoded(backend: str) -> None:
    recorder = Recorder("bundled", dtype="float32", attention_backend=backend)
    rng = random.Random(3)
    prompt = [rng.randrange(250) for _ in range(40)]
    decoded = recorder.logits(prompt, [])
    longer = [*prompt, *decoded.argmax(dim=-1).tolist()[:5]]
    assert torch.equal(recorder.logits(longer, [])[0], decoded[5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_steps_in_a_launch_give_the_same_bits(backend: str) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(250) for _ in range(20)]
    single, several = (
        Recorder("bundled", max_steps_per_launch=steps, dtype="float32", attention_backend=backend) for steps in (1, 4)
    )
    assert torch.equal(single.logits(prompt, []), several.logits(prompt, prompts(rng, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ways_agree_but_for_rounding(backend: str) -> None:
    rng = random.Random(9)
    prompt = [rng.randrange(250) for _ in range(60)]
    plain = Recorder("bundled", dtype="float32", batch_invariant=False).logits(prompt, [])
    invariant = Recorder("bundled", dtype="float32", attention_backend=backend).logits(prompt, [])
    assert torch.allclose(invariant, plain, atol=1e-3)


@needs_kernels
def test_the_cpu_backend_is_what_runs_where_it_can() -> None:
    assert isinstance(Recorder("bundled", attention_backend="auto").core._runner._forward, CpuDecoder)
    assert isinstance(Recorder("bundled", attention_backend="torch").core._runner._forward, InvariantForward)


def test_a_tile_size_whose_places_differ_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Recorder("bundled", dtype="float32").core._runner._forward._model  # type: ignore[attr-defined]
    logits = model.logits

    def uneven(hidden: torch.Tensor) -> torch.Tensor:
        """As a kernel might do that treats a fifth row differently."""
        changed: torch.Tensor = logits(hidden)
        changed[4:] += 1e-3
        return changed

    monkeypatch.setattr(model, "logits", uneven)
    with caplog.at_level("INFO"):
        InvariantForward(model)
    assert "tiles of 4" in caplog.text
