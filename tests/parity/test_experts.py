"""Families with mixtures of experts give the logits of transformers' own classes, in every mix of batch and chunk."""

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import ExpertGatingFuncType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file

from chairlift import LLM
from chairlift.config import DType
from chairlift.models import TorchForward, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.grouped import GroupedWeight
from chairlift.models.loader import grouped_size
from chairlift.models.parallel import find_split_obstacle
from chairlift.params import SamplingParams
from tests.models.support import edit, read_config, refusal, write_config
from tests.parity.support import Checkpoints, bench
from tests.parity.test_families import assert_greedy_answers, assert_near, reference_logits
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.engines import core_of
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around
from tests.support.gguf_files import Kind, add_names_and, write_model
from tests.support.kernels import needs_kernels

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 32}
SHARED: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 56}
OLMOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "hidden_size": 128}
LOCAL: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 32}
GRANITE: dict[str, Any] = {
    "num_local_experts": 6,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "hidden_size": 128,
}
GLM: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "head_dim": 64,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

# A name begins with the model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**LOCAL, "sliding_window": 62},
    "olmoe": OLMOE,
    "olmoe, normalised": {**OLMOE, "norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen2_moe": {**SHARED, "hidden_size": 128},
    "qwen3_moe": EXPERTS,
    "qwen3_moe, one layer dense": {
        **EXPERTS,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "tie_word_embeddings": True,
    },
    "qwen3_5_moe_text": {
        **SHARED,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 80,
    },
    "qwen3_next": {
        **SHARED,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 80,
    },
    "qwen3_next, one layer dense": {
        **SHARED,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_only_layers": [1],
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "granitemoe": {**GRANITE, "logits_scaling": 4.0},
    "granitemoehybrid": {
        **GRANITE,
        "shared_intermediate_size": 80,
        "mamba_d_state": 16,
        "mamba_n_heads": 8,
        "mamba_chunk_size": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2_moe": {
        **EXPERTS,
        "hidden_size": 128,
        "num_dense_layers": 1,
        "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention", "conv"],
        "routed_scaling_factor": 0.8,
    },
    "lfm2_moe, no bias": {
        **EXPERTS,
        "hidden_size": 128,
        "num_dense_layers": 0,
        "layer_types": ["conv", "full_attention", "conv"],
        "use_expert_bias": False,
        "norm_topk_prob": False,
    },
    "gpt_oss": {**LOCAL, "sliding_window": 62, "rope_parameters": YARN},
    "gpt_oss, windows alone": {
        **LOCAL,
        "head_dim": 64,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 3,
        "swiglu_limit": 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "glm4_moe": {**GLM, "use_qk_norm": True, "attention_bias": True},
    "dots1": {**GLM, "sliding_window": 62, "max_window_layers": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4_moe, one group": {**GLM, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "norm_topk_prob": False},
}


ROUTERS = ("qwen3_moe", "gpt_oss", "lfm2_moe", "glm4_moe", "qwen3_next", "ernie4_5_moe")
"""A family for each kind of router, and of what stands beside it."""

checkpoint = Checkpoints(FAMILIES).get


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_in_chunks_among_others(directory: Path, family: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [150])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 140, 148, 149])
    assert_near(logits_of(bench(path), steps), reference_logits(reference, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_with_reuse_and_guesses(directory: Path, family: str) -> None:
    path, reference = checkpoint(directory, family)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 50])
    prompts = [first, shared + second, shared + third]
    engine: dict[str, Any] = {"max_batch_size": 2, "max_num_batched_tokens": 33}
    guessing = {"speculation": "ngram", "batch_invariant": True}  # in torch guesses need the second
    engine |= guessing if family in ROUTERS else {"max_steps_per_launch": 3}
    with LLM(str(path), attention_backend="torch", max_seq_len=SLOT_LEN, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, 64)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe_text"])
def test_a_batch_invariant_model_gives_the_same_bits_in_chunks_among_others(directory: Path, family: str) -> None:
    path, _ = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [40])
    alone = bench(path, is_invariant=True).run([Row(1, tokens)])[0]
    steps = steps_around(random.Random(6), 4, tokens, [1, 3, 17, 39])
    assert torch.equal(logits_of(bench(path, is_invariant=True), steps), alone)


@cache
def native(directory: Path, family: str, dtype: DType) -> tuple[ModelConfig, CpuDecoder, Any]:
    """The checkpoint of that family in native code, and transformers' model of it."""
    path, reference = checkpoint(directory, family)
    model = load_model(open_checkpoint(str(path)), dtype, "cpu", SLOT_LEN)
    return model.config, CpuDecoder(model, SLOT_LEN), reference


@needs_kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_native_logits_are_those_of_transformers_with_the_same_bits_in_every_mix(directory: Path, family: str) -> None:
    config, forward, reference = native(directory, family, DType.FLOAT32)
    (tokens,) = random_prompts(4, [150])
    alone = Bench(config, torch.float32, forward).run([Row(1, tokens)])[0]
    assert_near(alone, reference_logits(reference, tokens))
    for seed, cuts in enumerate(([1, 2, 17, 60, 61, 62, 140, 148, 149], list(range(1, 150)), [64, 128])):
        steps = steps_around(random.Random(seed), 4, tokens, cuts)
        assert torch.equal(logits_of(Bench(config, torch.float32, forward), steps), alone)


@needs_kernels
@pytest.mark.parametrize("family", ROUTERS)
def test_native_answers_are_those_of_transformers_on_reused_prefixes_with_guesses(directory: Path, family: str) -> None:
    path, reference = checkpoint(directory, family)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 80])
    prompts = [first, shared + second, shared + third]
    engine: dict[str, Any] = {"max_batch_size": 2, "max_num_batched_tokens": 33, "speculation": "ngram"}
    with LLM(str(path), attention_backend="cpu", max_seq_len=SLOT_LEN, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, 64)
        assert_greedy_answers(reference, llm, prompts, 64)  # which are now known as guesses
        totals = core_of(llm).read_stats().totals
    assert totals.num_cached_tokens > 50
    assert totals.num_accepted_tokens > 50


@needs_kernels
@pytest.mark.parametrize(
    ("family", "format"),
    [("qwen3_moe", {"dtype": "float32"}), ("gpt_oss", {"dtype": "bfloat16", "quantization": "int8"})],
)
def test_requests_get_the_same_bits_alone_as_among_two_hundred(
    directory: Path, family: str, format: dict[str, str]
) -> None:
    path, _ = checkpoint(directory, family)
    numbers = random.Random(7)
    prompts = random_prompts(8, [numbers.randint(1, 24) for _ in range(200)])
    params = [
        SamplingParams(temperature=numbers.choice([0.0, 1.0]), seed=index, max_tokens=numbers.randint(1, 5), logprobs=2)
        for index in range(len(prompts))
    ]
    engine: dict[str, Any] = {"attention_backend": "cpu", "max_seq_len": 64, **format}
    answers = []
    for num_slots, num_tokens in ((1, 64), (16, 40)):
        with LLM(str(path), max_batch_size=num_slots, max_num_batched_tokens=num_tokens, **engine) as llm:
            answers.append([output.outputs[0] for output in llm.generate(prompts, params)])
    alone, together = ([(each.token_ids, each.logprobs) for each in run] for run in answers)
    assert together == alone


@pytest.mark.parametrize("has_inputs_first", [False, True])
def test_stacked_experts_are_read_as_single_ones_are(tmp_path: Path, has_inputs_first: bool) -> None:
    reference = make_checkpoint(tmp_path, seed=3, model_type="qwen3_5_moe_text", **FAMILIES["qwen3_5_moe_text"])
    stacked: dict[str, torch.Tensor | None] = {}
    for name in load_file(tmp_path / "model.safetensors"):
        if match := re.fullmatch(r"(.*\.mlp\.experts)\.\d+\..*", name):
            stacked[name] = None
            for part in ("gate_up_proj", "down_proj"):
                weight = reference.get_parameter(f"{match[1]}.{part}").detach()
                stacked[f"{match[1]}.{part}"] = (weight.mT if has_inputs_first else weight).clone(
                    memory_format=torch.contiguous_format
                )
    edit(tmp_path, stacked)
    (tokens,) = random_prompts(4, [40])
    assert_near(bench(tmp_path).run([Row(2, tokens)])[0], reference_logits(reference, tokens))


def test_experts_in_mxfp4_are_the_numbers_of_their_codes(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, seed=3, model_type="gpt_oss", **FAMILIES["gpt_oss"])
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    changed: dict[str, torch.Tensor | None] = {}
    for name, parameter in reference.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        num_experts, num_inputs, num_outputs = parameter.shape
        codes = torch.randint(16, (num_experts, num_outputs, num_inputs // 32, 32), dtype=torch.uint8)
        exponents = torch.randint(120, 126, (num_experts, num_outputs, num_inputs // 32), dtype=torch.uint8)
        numbers = values[codes.long()] * torch.exp2(exponents[..., None].float() - 127)
        parameter.data = numbers.flatten(2).transpose(1, 2).contiguous()
        changed |= {name: None, f"{name}_blocks": codes[..., ::2] | codes[..., 1::2] << 4, f"{name}_scales": exponents}
    edit(tmp_path, changed)
    write_config(tmp_path, read_config(tmp_path), quantization_config={"quant_method": "mxfp4"})
    (tokens,) = random_prompts(4, [40])
    assert_near(bench(tmp_path).run([Row(2, tokens)])[0], reference_logits(reference, tokens))
    assert grouped_size(open_checkpoint(str(tmp_path))) is not None
    edit(tmp_path, {"model.layers.1.mlp.experts.down_proj_scales": None})
    assert "tensor model.layers.1.mlp.experts.down_proj_blocks has no scales model.layers.1." in refusal(tmp_path)


def test_layers_that_guess_further_tokens_are_skipped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="glm4_moe", **FAMILIES["glm4_moe"])
    edit(tmp_path, {"model.layers.3.eh_proj.weight": torch.ones(4, 4)})
    write_config(tmp_path, read_config(tmp_path), num_nextn_predict_layers=1)
    assert len(bench(tmp_path).run([Row(2, [1, 2])])[0]) == 2


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3_moe", {"num_local_experts": 9}, "lacks model.layers.0.mlp.experts.8.down_proj.weight"),
        ("qwen3_moe", {"num_local_experts": 7}, "no place for: model.layers.0.mlp.experts.7.down_proj.weight"),
        ("qwen3_moe", {"num_local_experts": 4096}, "its layers have 12288 experts, and the weights have 102 matrices"),
        ("qwen3_moe", {"num_local_experts": 0}, "it has 0 experts, which must be a whole number from 1 to 4096"),
        ("qwen3_moe", {"num_local_experts": 8.0}, "it has 8.0 experts, which must be a whole number"),
        ("ernie4_5_moe", {"num_experts_per_tok": 3.0}, "experts are chosen in whole numbers, not 3.0"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 of 8 experts cannot be chosen"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "its experts must have at least 1 inner feature, not 0"),
        ("qwen3_moe", {"moe_intermediate_size": 41}, r"gate_proj.weight has shape [40, 64]; the model needs [41, 64]"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be at least 1, not 0"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported in this architecture"),
        ("glm4_moe", {"scoring_func": ["sigmoid"]}, "scoring_func ['sigmoid'] is not supported in this architecture"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is not supported"),
        ("granitemoe", {"num_local_experts": 5}, "no place for: model.layers.0.block_sparse_moe.5.down_proj.weight"),
        ("lfm2_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor must be a positive number, not 0.0"),
        ("qwen3_next", {"linear_key_head_dim": 16}, "in_proj_qkvz.weight has shape [768, 64], which fits no heads"),
        ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval must be at least 1, not 0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is not supported beside shared experts"),
        ("glm4_moe", {"n_group": 5}, "12 experts do not make 5 groups of one size"),
        ("glm4_moe", {"topk_group": 5}, "3 experts cannot be chosen of 5 groups of 3"),
        ("glm4_moe", {"n_group": 12}, "3 experts cannot be chosen of 2 groups of 1"),
    ],
)
def test_configs_that_make_no_mixture_are_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], reason: str
) -> None:
    make_checkpoint(tmp_path, model_type=family, **FAMILIES[family])
    write_config(tmp_path, read_config(tmp_path), **fields)
    message = refusal(tmp_path)
    assert reason in message
    assert "\n" not in message


def test_a_stack_that_is_none_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="granitemoe", **FAMILIES["granitemoe"])
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    edit(tmp_path, {name: torch.ones(6, 191, 128)})
    assert f"tensor {name} has shape [6, 191, 128], which are no stacked matrices" in refusal(tmp_path)


def test_experts_are_not_divided_among_devices(directory: Path) -> None:
    opened = open_checkpoint(str(checkpoint(directory, "qwen3_moe")[0]))
    assert find_split_obstacle(opened, 2) == "its experts are not divided among devices"


OTHERS = (
    *("olmoe, normalised", "qwen3_moe", "lfm2_moe, no bias", "gpt_oss, windows alone"),
    *("qwen3_next, one layer dense", "dots1"),
)
GGUF = [family for family in FAMILIES if family not in OTHERS]
"""Families whose files of llama.cpp are read: it normalises weights always or never, and some are never dense there."""


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
@pytest.mark.parametrize("family", GGUF)
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, family: str, backend: str) -> None:
    fields = {"model_type": family.partition(",")[0], "max_position_embeddings": 512, **FAMILIES[family]}
    fields |= {"mlp_only_layers": []} if family == "qwen3_moe, one layer dense" else {}
    reference = make_checkpoint(tmp_path, seed=3, **fields)
    opened = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf")))
    assert opened.config.architecture == reference.config.architectures[0]
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    forward = TorchForward(model, TorchBackend(model.config.attention)) if backend == "torch" else None
    bench = Bench(model.config, model.dtype, forward or CpuDecoder(model, SLOT_LEN))
    (tokens,) = random_prompts(4, [100])
    assert_near(bench.run([Row(2, tokens)])[0], reference_logits(reference, tokens))


def test_each_expert_of_a_gguf_file_keeps_its_type(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, model_type="qwen3_moe", **{**EXPERTS, "moe_intermediate_size": 64})
    kinds = {"ffn_gate_exps": Kind.Q4_0, "ffn_up_exps": Kind.Q8_0, "ffn_down_exps": Kind.Q5_1, "": Kind.Q8_0}
    reader = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf", kinds))).open_weights()
    stored = dict(reference.named_parameters())["model.layers.1.mlp.experts.gate_up_proj"].detach()[5, 64:]
    read = reader.read("model.layers.1.mlp.experts.5.up_proj.weight")
    assert isinstance(read, GroupedWeight)
    assert torch.equal(read.dequantize(), torch.from_numpy(dequantize(quantize(stored.numpy(), Kind.Q8_0), Kind.Q8_0)))
    formats = [reader.tensors[f"model.layers.1.mlp.experts.5.{part}_proj.weight"].groups for part in ("gate", "down")]
    assert [each and each.num_bits for each in formats] == [4, 8]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda writer: writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID),
            "a router of kind 2 is not supported",
        ),
        (lambda writer: writer.add_expert_group_count(4), "expert_group_count (4) is not supported"),
        (lambda writer: writer.add_tensor("blk.1.ffn_up_exps.bias", np.ones(5, np.float32)), "are no stacked matrices"),
        (
            lambda writer: writer.add_tensor("blk.1.ffn_up_exps.bias", np.ones((8, 40), np.float32)),
            "no place for: model.layers.1.mlp.experts.0.up_proj.bias",
        ),
    ],
)
def test_gguf_files_that_make_no_mixture_are_refused(
    tmp_path: Path, change: Callable[[GGUFWriter], object], said: str
) -> None:
    reference = make_checkpoint(tmp_path, model_type="qwen3_moe", **EXPERTS)
    message = refusal(write_model(reference, tmp_path / "model.gguf", tokenizer=add_names_and(change)))
    assert said in message
    assert "\n" not in message
