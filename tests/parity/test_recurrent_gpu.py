"""On a GPU: families with a recurrent state give the logits and tokens of transformers' own classes on the CPU.

In float32; where the number format is bfloat16, tolerances are its own. All of it runs on a CPU as well, but for graphs
and kernels, which shows that the comparisons hold.
"""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM
from chairlift.config import AttentionBackend, DType
from chairlift.models import PiecewiseForward, load_backend, load_model, open_checkpoint
from tests.parity.test_families import assert_greedy_answers, assert_near, reference_logits
from tests.parity.test_recurrent import FAMILIES
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around
from tests.support.gpu import GPU_MARKS, needs_gpu

# Before 5.23 transformers normalises all features of a Granite's Mamba as one, and not by group. With one group that is
# the same, so the reference is right in every version.
SERVED: dict[str, dict[str, Any]] = {
    **{name: FAMILIES[name] for name in ("qwen3_5_text", "lfm2", "nemotron_h", "falcon_h1, normed")},
    "granitemoehybrid, rope": {**FAMILIES["granitemoehybrid, rope"], "mamba_n_groups": 1},
}
DEVICES = ["cpu", pytest.param("cuda", marks=GPU_MARKS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


@cache
def checkpoint(directory: Path, family: str) -> tuple[str, Any]:
    """A random checkpoint of that family, and transformers' model of it."""
    fields = {"model_type": family.partition(",")[0], "max_position_embeddings": 512, **SERVED[family]}
    return str(directory / family), make_checkpoint(directory / family, seed=3, **fields)


def load(path: str, dtype: DType, device: str) -> Bench:
    model = load_model(open_checkpoint(path), dtype, device, SLOT_LEN)
    attention = load_backend(AttentionBackend.TORCH, model.config, model.dtype, torch.device(device))
    return Bench(model.config, model.dtype, PiecewiseForward(model, attention), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", SERVED)
def test_logits_are_those_of_transformers_in_chunks_among_others(directory: Path, family: str, device: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [60])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 50, 51, 52, 59])
    bench = load(path, DType.FLOAT32, device)
    assert_near(logits_of(bench, steps).cpu(), reference_logits(reference, tokens))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", SERVED)
def test_in_bfloat16_they_are_near(directory: Path, family: str, device: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(8, [50])
    bench = load(path, DType.BFLOAT16, device)
    logits = torch.cat([bench.run([Row(1, part)])[0] for part in (tokens[:30], tokens[30:])]).cpu()
    expected = reference_logits(reference, tokens)
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().max()


@needs_gpu
@pytest.mark.parametrize(("backend", "steps"), [("torch", 1), ("triton", 4)])
@pytest.mark.parametrize("family", SERVED)
def test_greedy_tokens_are_those_of_transformers_on_reused_prefixes(
    directory: Path, family: str, backend: str, steps: int
) -> None:
    path, reference = checkpoint(directory, family)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 90])
    prompts = [first, shared + second, shared + third]
    engine: dict[str, Any] = {"max_batch_size": 3, "max_num_batched_tokens": 33, "max_steps_per_launch": steps}
    engine |= {"device": "cuda", "dtype": "float32", "max_seq_len": SLOT_LEN, "kv_cache_memory_bytes": 2**26}
    with LLM(path, attention_backend=backend, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, 40)
        assert_greedy_answers(reference, llm, prompts[1:], 40)  # each prompt is known by now
