"""Steps with prompts in them as CUDA graphs, with the kernels of attention that are installed, in bfloat16."""

import random
from pathlib import Path

import pytest
import torch

from chairlift.config import AttentionBackend, DType
from chairlift.engine.execution.recorder import CudaRecorder
from chairlift.models import find_obstacle, load_backend, load_model, open_checkpoint
from chairlift.models.attention import PaddingBackend
from tests.engine.support import make_tiny_checkpoint
from tests.engine.test_mixed import NUM_SLOTS, SLOT_LEN, Bench, Step
from tests.support.gpu import needs_gpu, no_waiting

DEVICE = torch.device("cuda:0")
LARGEST_ERROR = 0.05  # of a token's vector, as a part of its length; one of another token is as wrong as it is long


def assert_near(vectors: torch.Tensor, expected: torch.Tensor) -> None:
    errors = (vectors.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    assert errors.max().item() < LARGEST_ERROR


@pytest.fixture(params=list(AttentionBackend))
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Bench:
    """Heads and layers of a size that every kernel takes; graphs for up to 512 tokens."""
    shape = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    path = make_tiny_checkpoint(tmp_path, num_hidden_layers=4, max_position_embeddings=SLOT_LEN, **shape)
    model = load_model(open_checkpoint(path), DType.BFLOAT16, "cuda:0", SLOT_LEN, SLOT_LEN)
    if obstacle := find_obstacle(request.param, model.config, DType.BFLOAT16, "cuda:0"):
        pytest.skip(obstacle)
    attention = load_backend(request.param, model.config, torch.bfloat16, DEVICE)
    if not isinstance(attention, PaddingBackend):
        pytest.skip(f"{type(attention).__name__} is not recorded for such steps")
    return Bench(model, attention, 512, CudaRecorder(DEVICE), DEVICE)


@needs_gpu
def test_random_steps_equal_those_operator_by_operator(bench: Bench) -> None:
    rng = random.Random(7)
    with torch.inference_mode():
        for _ in range(60):
            step = Step.drawn(rng, 7, 5, 55)
            replayed = bench.replay(step)
            assert replayed is not None
            replayed = replayed.clone()
            written = bench.blocks.clone()
            expected, blocks = bench.compute(step)
            assert_near(replayed, expected)
            assert_near(written[:-1], blocks[:-1])
            assert written.isfinite().all()


@needs_gpu
def test_a_replay_does_not_wait_for_the_device(bench: Bench) -> None:
    step = Step(range(NUM_SLOTS), [1] * 8 + [100] * 4, [9] * NUM_SLOTS, 8, [5] * 408)
    expected = bench.replay(step)
    assert expected is not None
    expected = expected.clone()
    with no_waiting():
        replayed = bench.run(step.plan)
    assert replayed is not None
    assert torch.equal(replayed.hidden, expected)
