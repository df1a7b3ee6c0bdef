"""Every decoder gives the logits and the greedy tokens of transformers' own class, however batches are made up.

Those in `ADAPTED` are in no family: transformers' own code runs over our slots.
"""

import json
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as BackendTokenizer

from chairlift import LLM, SamplingParams
from chairlift.config import DType
from chairlift.models import Checkpoint, TorchForward, load_adapted, load_model, open_checkpoint
from chairlift.models.attention import Forward
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.checkpoint import find_model
from chairlift.models.config import AdaptedConfig
from chairlift.models.cpu import CpuDecoder
from tests.support.checkpoints import assert_greedy, make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around
from tests.support.gguf_files import Kind, add_byte_level_tokenizer, write_model
from tests.support.kernels import needs_kernels

CPU = (DType.FLOAT32, "cpu")
NUM_TOKENS = 64
WINDOW = 24  # tokens, of sequences of more than twice as many
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

LONG: dict[str, Any] = {
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

ADAPTED: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": WINDOW},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "head_dim": 32,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2},
    "cohere": {"model_type": "cohere", "logit_scale": 0.25, "pad_token_id": 0},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.5},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": WINDOW},
    "gpt2": {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0},
    "apertus, longrope": {
        "model_type": "apertus",
        "max_position_embeddings": 2048,
        "rope_parameters": {**LONG, "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0] * 8},
    },
    "granitemoe, dynamic rope": {
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        "attention_multiplier": 0.2,
    },
}

CASES = [
    *((family, "torch") for family in (*FAMILIES, *ADAPTED)),
    *(pytest.param(family, "cpu", marks=needs_kernels) for family in FAMILIES),
]


@cache
def checkpoint(directory: Path, family: str) -> tuple[Path, Any]:
    """A random checkpoint of that family, and transformers' model of it."""
    path = directory / family
    shape = {"head_dim": 32, **FAMILIES[family]} if family in FAMILIES else ADAPTED[family]
    return path, make_checkpoint(path, seed=3, **{"max_position_embeddings": 512, **shape})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def bench(path: Path, backend: str) -> Bench:
    opened = open_checkpoint(str(path))
    return Bench(opened.config, torch.float32, load(opened, backend))


def load(opened: Checkpoint, backend: str) -> Forward:
    if isinstance(opened.config, AdaptedConfig):
        return TorchForward(load_adapted(opened, *CPU), TorchBackend(opened.config.attention))
    model = load_model(opened, *CPU, SLOT_LEN)
    return (
        CpuDecoder(model, SLOT_LEN) if backend == "cpu" else TorchForward(model, TorchBackend(model.config.attention))
    )


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_logits_are_those_of_transformers_in_chunks_among_other_rows(
    directory: Path, family: str, backend: str
) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [300])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 190, 298, 299])
    ours, theirs = logits_of(bench(path, backend), steps), reference_logits(reference, tokens)
    assert theirs.std() > 0.05  # or else there would be nothing to compare
    assert torch.linalg.vector_norm(ours - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize(("family", "backend"), CASES)
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
        assert_greedy(reference, prompt, output.outputs[0].token_ids, NUM_TOKENS)


def test_batch_invariant_attention_obeys_windows_and_caps(directory: Path) -> None:
    path, reference = checkpoint(directory, "gemma2")
    prompts = random_prompts(9, [40, 5])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(path), attention_backend="torch", batch_invariant=True, max_seq_len=SLOT_LEN) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids, 12)


BEYOND: dict[str, dict[str, Any]] = {
    "longrope": {**FAMILIES["phi3, partial longrope"], "original_max_position_embeddings": 32},
    "dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    },
}


@pytest.mark.parametrize("kind", BEYOND)
def test_beyond_the_original_length_rope_is_that_of_the_longest_sequence(tmp_path: Path, kind: str) -> None:
    reference = make_checkpoint(tmp_path, **BEYOND[kind])
    (tokens,) = random_prompts(8, [100])
    opened = open_checkpoint(str(tmp_path))
    model = load_model(opened, *CPU, max_seq_len=len(tokens), num_positions=SLOT_LEN)
    bench = Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention)))
    ours = torch.cat([bench.run([Row(1, tokens[:60])])[0], bench.run([Row(1, tokens[60:])])[0]])
    torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("qkv_bias", "bias"), [(False, False), (True, False), (True, True)])
def test_internlm3_is_a_llama_with_biases_of_its_own(tmp_path: Path, qkv_bias: bool, bias: bool) -> None:
    reference = make_checkpoint(tmp_path, attention_bias=qkv_bias or bias, mlp_bias=bias)
    if not bias:
        for layer in reference.model.layers:
            layer.self_attn.o_proj.bias = None
        reference.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del fields["attention_bias"], fields["mlp_bias"]
    fields |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "qkv_bias": qkv_bias, "bias": bias}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    (tokens,) = random_prompts(7, [40])
    ours = bench(tmp_path, "torch").run([Row(2, tokens)])[0]
    torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=1e-4, atol=1e-5)


# --- GGUF files that are made of checkpoints


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

GGUF_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_parameters": LINEAR},
    "llama, tied, biases": {**FAMILIES["llama, biases"], "tie_word_embeddings": True},
    "llama 3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "qwen2, yarn": {"model_type": "qwen2", "rope_parameters": YARN},
    **{
        name: FAMILIES[name]
        for name in ("mistral, window", "qwen3", "granite", "phi3", "phi3, partial longrope", "olmo2")
    },
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0},
    "gemma2": {**FAMILIES["gemma2"], "query_pre_attn_scalar": 32},
    "gemma3": {**FAMILIES["gemma3"], "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
}


def make_gguf_reference(directory: Path, family: str) -> Any:
    return make_checkpoint(
        directory, seed=3, **{"head_dim": 32, "max_position_embeddings": 512, **GGUF_FAMILIES[family]}
    )


@pytest.mark.parametrize("family", GGUF_FAMILIES)
@torch.inference_mode()
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    reference = make_gguf_reference(tmp_path, family)
    opened = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf")))
    assert opened.config.architecture == reference.config.architectures[0]
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    (tokens,) = random_prompts(4, [100])
    ours = Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention)))
    (logits,) = ours.run([Row(2, tokens)])
    theirs = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    assert theirs.std() > 0.05  # or else there would be nothing to compare
    assert torch.linalg.vector_norm(logits - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_description_is_that_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    reference = make_gguf_reference(tmp_path, family)
    ours = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf"))).config
    theirs = open_checkpoint(str(tmp_path)).config
    assert repr(ours).replace(repr(ours.rms_norm_eps), repr(theirs.rms_norm_eps)) == repr(theirs)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q8_0])
def test_greedy_tokens_of_a_file_are_those_of_the_numbers_in_it(tmp_path: Path, kind: Kind) -> None:
    reference = make_checkpoint(tmp_path / "checkpoint", seed=5, max_position_embeddings=512)
    backend = BackendTokenizer.from_file(str(find_model("bundled") / "tokenizer.json"))
    tokenizer = partial(add_byte_level_tokenizer, backend=backend, rule="gpt-2", size=320)
    path = write_model(reference, tmp_path / "one" / "model.gguf", kind, tokenizer)
    weights = open_checkpoint(str(path)).open_weights()
    for name, parameter in reference.named_parameters():
        stored = weights.read(name)
        parameter.data = stored.float() if isinstance(stored, torch.Tensor) else stored.dequantize()
    (prompt,) = random_prompts(2, [40])
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with LLM(str(path.parent), dtype="float32", attention_backend="torch", max_seq_len=128) as llm:
        assert_greedy(reference, prompt, llm.generate([prompt], params)[0].outputs[0].token_ids, 20)
        assert llm.inputs.tokenize("Hi!") == list(b"Hi!")
