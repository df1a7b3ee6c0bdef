"""Models with latent attention give the logits of transformers' classes, which make every head's keys and values."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from chairlift import LLM
from chairlift.config import DType
from chairlift.models import TorchForward, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from tests.models.compressed_support import fine_grained, float8
from tests.models.support import edit, read_config, refusal, write_config
from tests.parity.support import Checkpoints, bench
from tests.parity.test_families import assert_greedy_answers, assert_near, reference_logits
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.engines import core_of
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around
from tests.support.gguf_files import Kind, add_names_and, write_model
from tests.support.kernels import needs_kernels

SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 80,
}
EXPERTS: dict[str, Any] = {
    **SIZES,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
TWENTY = {"num_attention_heads": 20, "num_key_value_heads": 20}
# A name begins with the model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        **EXPERTS,
        "q_lora_rank": None,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "deepseek_v2, groups": {**EXPERTS, **GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**EXPERTS, **GROUPS, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_v3, halves": {**EXPERTS, "n_group": 1, "topk_group": 1, "rope_interleave": False, "attention_bias": True},
    "glm4_moe_lite": {
        **EXPERTS,
        **TWENTY,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
    },
    "youtu": {**SIZES, "tie_word_embeddings": True},
}
GGUF = {
    **{name: FAMILIES[name] for name in ("deepseek_v2", "deepseek_v2, groups", "deepseek_v3", "youtu")},
    "glm4_moe_lite": {**EXPERTS, **TWENTY, "mlp_layer_types": ["dense", "sparse", "sparse"]},  # dense ones come first
}

checkpoint = Checkpoints(FAMILIES).get


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("latents")


@cache
def native(directory: Path, family: str) -> tuple[ModelConfig, CpuDecoder]:
    model = load_model(open_checkpoint(str(checkpoint(directory, family)[0])), DType.FLOAT32, "cpu", SLOT_LEN)
    return model.config, CpuDecoder(model, SLOT_LEN)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_in_chunks_among_others(directory: Path, family: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [150])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 140, 148, 149])
    assert_near(logits_of(bench(path), steps), reference_logits(reference, tokens))


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_native_logits_are_those_of_transformers_with_the_same_bits_in_every_mix(directory: Path, family: str) -> None:
    _, reference = checkpoint(directory, family)
    config, forward = native(directory, family)
    (tokens,) = random_prompts(4, [150])
    alone = Bench(config, torch.float32, forward).run([Row(1, tokens)])[0]
    assert_near(alone, reference_logits(reference, tokens))
    for seed, cuts in enumerate(([1, 2, 17, 60, 61, 62, 140, 148, 149], list(range(1, 150)), [64, 128])):
        steps = steps_around(random.Random(seed), 4, tokens, cuts)
        assert torch.equal(logits_of(Bench(config, torch.float32, forward), steps), alone)


@pytest.mark.parametrize(
    ("family", "engine"),
    [
        ("deepseek_v2, groups", {"attention_backend": "torch", "batch_invariant": True}),
        *(
            pytest.param(family, {"attention_backend": "cpu"}, marks=needs_kernels)
            for family in ("deepseek_v2", "glm4_moe_lite", "youtu")
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else given["attention_backend"],
)
def test_answers_are_those_of_transformers_on_reused_prefixes_with_guesses(
    directory: Path, family: str, engine: dict[str, Any]
) -> None:
    path, reference = checkpoint(directory, family)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 80])
    prompts = [first, shared + second, shared + third]
    engine = {"max_batch_size": 2, "max_num_batched_tokens": 33, "speculation": "ngram", **engine}
    with LLM(str(path), max_seq_len=SLOT_LEN, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, 64)
        assert_greedy_answers(reference, llm, prompts, 64)  # which are now known as guesses
        totals = core_of(llm).read_stats().totals
    assert totals.num_cached_tokens > 50
    if engine["attention_backend"] == "cpu":  # in torch a guess costs more, and whether one is made depends on times
        assert totals.num_accepted_tokens > 50


@pytest.mark.slow
def test_ranks_that_have_some_of_the_heads_answer_as_transformers_does(directory: Path) -> None:
    """Each of them keeps all latent vectors."""
    path, reference = checkpoint(directory, "youtu")
    engine: dict[str, Any] = {"attention_backend": "torch", "device": "cpu", "tensor_parallel_size": 2}
    with LLM(str(path), max_seq_len=SLOT_LEN, max_batch_size=2, max_num_batched_tokens=33, **engine) as llm:
        assert_greedy_answers(reference, llm, random_prompts(6, [3, 40, 90]), 24)


def test_a_slot_keeps_a_latent_vector_instead_of_the_keys_and_values_of_heads(directory: Path) -> None:
    """And 32 elements of the key, and as many that stay zeros."""
    config = open_checkpoint(str(checkpoint(directory, "glm4_moe_lite")[0])).config
    assert config.token_bytes(DType.BFLOAT16) == 3 * (64 + 32 + 32) * 2


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("family", GGUF)
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, family: str, backend: str) -> None:
    fields = {"model_type": family.partition(",")[0], "max_position_embeddings": 512, **GGUF[family]}
    reference = make_checkpoint(tmp_path, seed=3, **fields)
    opened = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf")))
    assert opened.config.architecture == reference.config.architectures[0].replace("Glm4MoeLite", "DeepseekV3")
    (tokens,) = random_prompts(4, [100])
    assert_near(bench_of(opened, backend).run([Row(2, tokens)])[0], reference_logits(reference, tokens))


def bench_of(opened: Any, backend: str) -> Bench:
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    forward = TorchForward(model, TorchBackend(model.config.attention)) if backend == "torch" else None
    return Bench(model.config, model.dtype, forward or CpuDecoder(model, SLOT_LEN))


def test_matrices_of_heads_in_few_bits_are_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, seed=3, model_type="youtu", **SIZES)
    kinds = {"attn_k_b": Kind.Q8_0, "attn_v_b": Kind.Q8_0, "": Kind.F32}
    read = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf", kinds))).open_weights()
    name = "model.layers.1.self_attn.kv_b_proj.weight"
    rounded, exact = read.read(name), reference.get_parameter(name).detach()
    assert isinstance(rounded, torch.Tensor)
    assert 0 < float((rounded - exact).abs().amax()) <= float(exact.abs().amax()) / 127


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("youtu", lambda writer: writer.add_kv_lora_rank(60), "slots keep 92 elements of a token, and attention.key"),
        ("youtu", lambda writer: writer.add_key_length_mla(32), "its heads have 32 elements, of which 32 rotate"),
        ("youtu", lambda writer: writer.add_expert_group_count(4), "expert_group_count (4) is not supported"),
        ("deepseek_v2", lambda writer: writer.add_expert_weights_norm(True), "expert_weights_norm True is not"),
        ("youtu", lambda writer: writer.add_tensor("blk.1.attn_k_b.bias", np.ones(4, np.float32)), "no place for"),
    ],
)
def test_gguf_files_whose_sizes_are_at_odds_are_refused(
    tmp_path: Path, family: str, change: Callable[[GGUFWriter], object], said: str
) -> None:
    reference = make_checkpoint(tmp_path, model_type=family, **FAMILIES[family])
    message = refusal(write_model(reference, tmp_path / "model.gguf", tokenizer=add_names_and(change)))
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("youtu", {"kv_lora_rank": 0}, "kv_lora_rank must be a whole number from 1 to 65536, not 0"),
        ("youtu", {"q_lora_rank": 2.0}, "q_lora_rank"),
        ("youtu", {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads"),
        ("youtu", {"v_head_dim": 81}, "kv_b_proj.weight has shape [576, 64]; the model needs [580, 64]"),
        ("deepseek_v2", {"topk_method": "best"}, "topk_method 'best' is not supported"),
        ("deepseek_v2, groups", {"topk_group": 5}, "3 experts cannot be chosen of 5 groups of 3"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must say of each layer"),
    ],
)
def test_configs_that_make_no_such_model_are_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], reason: str
) -> None:
    make_checkpoint(tmp_path, model_type=family.partition(",")[0], **FAMILIES[family])
    write_config(tmp_path, read_config(tmp_path), **fields)
    message = refusal(tmp_path)
    assert reason in message
    assert "\n" not in message


def test_layers_that_guess_further_tokens_are_skipped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="deepseek_v3", **FAMILIES["deepseek_v3"])
    edit(tmp_path, {"model.layers.3.eh_proj.weight": torch.ones(4, 4)})
    write_config(tmp_path, read_config(tmp_path), num_nextn_predict_layers=1)
    assert len(bench(tmp_path).run([Row(2, [1, 2])])[0]) == 2


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
def test_a_checkpoint_in_float8_is_read_as_the_numbers_that_it_stands_for(tmp_path: Path, backend: str) -> None:
    """As DeepSeek-V3 is published: a scale for each block of a matrix, among them blocks across heads."""
    reference = make_checkpoint(tmp_path, seed=3, model_type="youtu", **FAMILIES["youtu"])
    changed: dict[str, torch.Tensor | None] = {}
    for seed, (name, parameter) in enumerate(reference.named_parameters()):
        base = name.removesuffix(".weight")
        if "_proj" not in base:
            continue
        high, wide = parameter.shape
        stored, exact = float8(base, seed, (high, wide), (128, 128), "weight_scale_inv")
        parameter.data.copy_(exact)
        changed |= {name: None, **stored}
    edit(tmp_path, changed)
    write_config(tmp_path, read_config(tmp_path), quantization_config=fine_grained((128, 128)))
    (tokens,) = random_prompts(4, [40])
    rows = bench_of(open_checkpoint(str(tmp_path)), backend).run([Row(2, tokens)])[0]
    assert_near(rows, reference_logits(reference, tokens))
