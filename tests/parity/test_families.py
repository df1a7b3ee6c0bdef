"""Every family gives the logits and the greedy tokens of transformers' own class, however batches are made up."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.config import DType
from chairlift.engine.execution.forward import TorchForward
from chairlift.models import load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.cpu import CpuDecoder
from tests.support.checkpoints import make_checkpoint, random_prompts, reference_tokens
from tests.support.forward_bench import SLOT_LEN, Bench, logits_of, steps_around
from tests.support.kernels import needs_kernels

NUM_TOKENS = 64
WINDOW = 24  # tokens, of sequences of more than twice as many
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [2.0 + 0.3 * i for i in range(12)],
    "original_max_position_embeddings": 400,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    "llama, biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral, window": {"model_type": "mistral", "sliding_window": WINDOW},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2, window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.015625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": WINDOW, "num_key_value_heads": 4},
    "phi3, partial longrope": {
        "model_type": "phi3",
        "hidden_size": 128,
        "pad_token_id": 0,
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 400,
        "partial_rotary_factor": 0.75,
        "rope_parameters": LONG,
    },
    "olmo2": {"model_type": "olmo2"},
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "num_hidden_layers": 6,
        "tie_word_embeddings": True,
    },
    "seed_oss": {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0},
}


BACKENDS = ["torch", pytest.param("cpu", marks=needs_kernels)]


@cache
def checkpoint(directory: Path, family: str) -> tuple[Path, Any]:
    """A random checkpoint of that family, and transformers' model of it."""
    path = directory / family
    return path, make_checkpoint(path, seed=3, **{"head_dim": 32, "max_position_embeddings": 512, **FAMILIES[family]})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def bench(path: Path, backend: str) -> Bench:
    model = load_model(open_checkpoint(str(path)), DType.FLOAT32, "cpu", SLOT_LEN)
    if backend == "cpu":
        return Bench(model, CpuDecoder(model, SLOT_LEN))
    return Bench(model, TorchForward(model, TorchBackend(model.config.attention)))


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_in_chunks_among_other_rows(
    directory: Path, family: str, backend: str
) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [300])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 190, 298, 299])
    ours, theirs = logits_of(bench(path, backend), steps), reference_logits(reference, tokens)
    assert theirs.std() > 0.05  # or else there would be nothing to compare
    assert torch.linalg.vector_norm(ours - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_with_reused_prefixes(
    directory: Path, family: str, backend: str
) -> None:
    path, reference = checkpoint(directory, family)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 50])
    prompts = [first, shared + second, shared + third]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine: dict[str, Any] = {"max_batch_size": 2, "max_num_batched_tokens": 13, "max_steps_per_launch": 3}
    with LLM(str(path), attention_backend=backend, max_seq_len=SLOT_LEN, **engine) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == reference_tokens(reference, prompt, NUM_TOKENS)
