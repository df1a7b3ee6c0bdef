"""Families with a recurrent state give the logits of transformers' own classes, in every mix of batch and chunk."""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from chairlift import LLM
from chairlift.config import AttentionBackend, DType
from chairlift.models import PiecewiseForward, find_obstacle, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.parallel import CheckpointPart, Group, find_split_obstacle
from tests.models.support import edit, read_config, refusal, write_config
from tests.parity.support import Checkpoints, bench
from tests.parity.test_families import assert_greedy_answers, assert_near, reference_logits
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around

DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}

GRANITE: dict[str, Any] = {
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
FALCON: dict[str, Any] = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 4,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
    "lm_head_multiplier": 0.7,
    "embedding_multiplier": 2.0,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "ssm_multipliers": [0.9, 0.8, 0.7, 1.2, 1.1],
    "ssm_in_multiplier": 1.3,
    "ssm_out_multiplier": 0.6,
}

# A name begins with the model type.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"num_hidden_layers": 4, "head_dim": 32, **DELTA_NET},
    "qwen3_5_text, as many heads": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "tie_word_embeddings": True,
        "head_dim": 24,
        **DELTA_NET,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 3,
    },
    "qwen3_next, dense": {"num_hidden_layers": 4, "head_dim": 32, "mlp_only_layers": [0, 1, 2, 3], **DELTA_NET},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"], "tie_word_embeddings": True},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 10,
        "ssm_state_size": 12,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 16,
    },
    "nemotron_h, biases": {
        "layers_block_type": ["full_attention", "linear_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "head_dim": 32,
        "use_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "time_step_min": 0.7,
        "time_step_max": 0.9,
    },
    "granitemoehybrid": {
        **GRANITE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_proj_bias": True,
        "mamba_n_heads": 8,
    },
    "granitemoehybrid, rope": {
        **GRANITE,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "logits_scaling": 4.0,
    },
    "falcon_h1": {**FALCON},
    "falcon_h1, normed": {**FALCON, "mamba_rms_norm": True, "attention_bias": True, "mlp_bias": True},
    "falcon_h1, normed after its gate": {
        **FALCON,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "mamba_n_groups": 2,
        "projectors_bias": True,
    },
    "lfm2, biases": {
        "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True,
        "conv_L_cache": 4,
        "block_auto_adjust_ff_dim": False,
    },
}

NATIVE_FALCON: dict[str, Any] = {"head_dim": 32, "mamba_d_ssm": 128, "mamba_d_head": 32, "mamba_d_state": 16}

NATIVE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        **FAMILIES["qwen3_5_text"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 80,
    },
    "qwen3_5_text, as many heads": {
        **FAMILIES["qwen3_5_text, as many heads"],
        "head_dim": 64,
        "linear_value_head_dim": 128,
    },
    "qwen3_next, dense": {
        **FAMILIES["qwen3_next, dense"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 80,
    },
    "lfm2": {**FAMILIES["lfm2"], "hidden_size": 128},
    "nemotron_h": {
        **FAMILIES["nemotron_h"],
        "mamba_num_heads": 18,
        "mamba_head_dim": 16,
        "ssm_state_size": 32,
        "head_dim": 32,
    },
    "nemotron_h, biases": {**FAMILIES["nemotron_h, biases"], "mamba_head_dim": 80, "intermediate_size": 90},
    "granitemoehybrid": {
        **FAMILIES["granitemoehybrid"],
        "hidden_size": 128,
        "mamba_d_state": 16,
        "time_step_limit": [0.4, 0.7],
    },
    "granitemoehybrid, rope": {
        **FAMILIES["granitemoehybrid, rope"],
        "hidden_size": 128,
        "mamba_d_state": 16,
        "mamba_conv_bias": False,
    },
    "falcon_h1": {**FAMILIES["falcon_h1"], **NATIVE_FALCON},
    "falcon_h1, normed": {**FAMILIES["falcon_h1, normed"], **NATIVE_FALCON},
    "falcon_h1, normed after its gate": {**FAMILIES["falcon_h1, normed after its gate"], **NATIVE_FALCON},
}
"""Shapes that native code takes."""


checkpoint = Checkpoints(FAMILIES).get
native_checkpoint = Checkpoints(NATIVE).get


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_in_chunks_among_others(directory: Path, family: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [150])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 140, 148, 149])
    assert_near(logits_of(bench(path), steps), reference_logits(reference, tokens))


@pytest.mark.parametrize(
    ("family", "backend"), [*((family, "torch") for family in FAMILIES), *((family, "cpu") for family in NATIVE)]
)
def test_greedy_tokens_are_those_of_transformers_on_reused_prefixes(directory: Path, family: str, backend: str) -> None:
    made = checkpoint(directory, family) if backend == "torch" else native_checkpoint(directory / "native", family)
    path, reference = made
    first, second, third, shared = random_prompts(6, [3, 40, 17, 90])
    prompts = [first, shared + second, shared + third]
    engine: dict[str, Any] = {"max_batch_size": 2, "max_num_batched_tokens": 33, "max_steps_per_launch": 3}
    with LLM(str(path), attention_backend=backend, max_seq_len=SLOT_LEN, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, 64)
        assert_greedy_answers(reference, llm, prompts[1:], 64)  # each prompt is known by now


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_chunks_of_a_prompt(directory: Path, family: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(9, [80])
    expected = reference_logits(reference, tokens)
    for size in (1, 7, 64, len(tokens)):
        ours = bench(path)
        chunks = [ours.run([Row(2, tokens[start : start + size])])[0] for start in range(0, len(tokens), size)]
        assert_near(torch.cat(chunks), expected)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2, biases", "nemotron_h", "granitemoehybrid, rope"])
def test_two_ranks_give_the_logits_of_one(directory: Path, family: str) -> None:
    opened = open_checkpoint(str(checkpoint(directory, family)[0]))
    assert find_split_obstacle(opened, 2) is None
    (tokens,) = random_prompts(4, [40])
    steps = steps_around(random.Random(6), 4, tokens, [1, 17, 39])
    store = HashStore()

    def run(rank: int) -> torch.Tensor:
        part = CheckpointPart.of(opened, Group(rank, 2, store, torch.device("cpu"), timedelta(seconds=60)))
        model = load_model(part, DType.FLOAT32, "cpu", SLOT_LEN)
        part.connect(model)
        forward = PiecewiseForward(model, TorchBackend(model.config.attention))
        return logits_of(Bench(model.config, model.dtype, forward), steps)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(run, range(2))
    assert torch.equal(first, second)
    assert_near(first, logits_of(bench(checkpoint(directory, family)[0]), steps))


@pytest.mark.parametrize(
    ("family", "num_ranks", "reason"),
    [
        ("qwen3_5_text", 4, "the 2 key heads of its Gated DeltaNets cannot be divided by that"),
        ("lfm2", 3, "the 64 features of its convolutions cannot be divided by that"),
        ("granitemoehybrid", 2, "the 1 groups of its Mamba layers cannot be divided by that"),
    ],
)
def test_recurrent_blocks_that_cannot_be_divided_say_so(
    directory: Path, family: str, num_ranks: int, reason: str
) -> None:
    opened = open_checkpoint(str(checkpoint(directory, family)[0]))
    assert find_split_obstacle(opened, num_ranks) == reason


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_a_batch_invariant_model_gives_the_same_bits_in_chunks_among_others(directory: Path, family: str) -> None:
    path, _ = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [40])
    alone = bench(path, is_invariant=True).run([Row(1, tokens)])[0]
    steps = steps_around(random.Random(6), 4, tokens, [1, 3, 17, 39])
    assert torch.equal(logits_of(bench(path, is_invariant=True), steps), alone)


@cache
def native(directory: Path, family: str, dtype: DType) -> tuple[ModelConfig, CpuDecoder, Any]:
    """The checkpoint of that family in native code, and transformers' model of it."""
    path, reference = native_checkpoint(directory / "native", family)
    model = load_model(open_checkpoint(str(path)), dtype, "cpu", SLOT_LEN)
    return model.config, CpuDecoder(model, SLOT_LEN), reference


@pytest.mark.parametrize("family", NATIVE)
def test_native_logits_are_those_of_transformers_with_the_same_bits_in_every_mix(directory: Path, family: str) -> None:
    config, forward, reference = native(directory, family, DType.FLOAT32)
    (tokens,) = random_prompts(4, [150])
    alone = Bench(config, torch.float32, forward).run([Row(1, tokens)])[0]
    assert_near(alone, reference_logits(reference, tokens))
    evenly = (list(range(size, 150, size)) for size in (1, 7, 64))
    for seed, cuts in enumerate(([1, 2, 17, 60, 61, 62, 140, 148, 149], *evenly)):
        steps = steps_around(random.Random(seed), 4, tokens, cuts)
        assert torch.equal(logits_of(Bench(config, torch.float32, forward), steps), alone)


@pytest.mark.parametrize("family", NATIVE)
def test_native_code_takes_tokens_back(directory: Path, family: str) -> None:
    """Wrong guesses of every length leave no trace: the state goes on from the tokens that were accepted."""
    config, forward, _ = native(directory, family, DType.FLOAT32)
    (tokens,) = random_prompts(6, [60])
    alone = Bench(config, torch.float32, forward).run([Row(1, tokens)])[0]
    guessing, done = Bench(config, torch.float32, forward), 7
    logits = [guessing.run([Row(2, tokens[:done])])[0]]
    for num_guessed, num_right in ((4, 0), (4, 3), (1, 1), (6, 6), (5, 2), (3, 0), (3, 3)):
        right = tokens[done : done + 1 + num_right]
        wrong = [(token + 1) % 300 for token in tokens[done + 1 + num_right : done + 1 + num_guessed]]
        (told,) = guessing.guess([Row(2, right + wrong)], num_guessed, len(wrong))
        logits.append(told[: len(right)])
        done += len(right)
    assert torch.equal(torch.cat(logits), alone[:done])


@pytest.mark.parametrize("family", NATIVE)
def test_native_bfloat16_is_near(directory: Path, family: str) -> None:
    """Every number between products is rounded, so this is no more than a check of the format's code."""
    config, forward, reference = native(directory, family, DType.BFLOAT16)
    (tokens,) = random_prompts(8, [50])
    logits = Bench(config, torch.bfloat16, forward).run([Row(1, tokens)])[0]
    expected = reference_logits(reference, tokens)
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().max()


def test_native_code_says_which_block_it_lacks(directory: Path) -> None:
    families = {"qwen3_5_text": "linear_attn", "nemotron_h, biases": "mamba"}
    for family, lacking in families.items():
        config = open_checkpoint(str(checkpoint(directory, family)[0])).config
        obstacle = find_obstacle(AttentionBackend.CPU, config, DType.FLOAT32, "cpu")
        assert obstacle == f"it has no code for blocks like {lacking}"


LAYERS = ["linear_attention", "full_attention", "linear_attention"]


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3_5_text", {"layer_types": [*LAYERS[:2], "chunked_attention"]}, "layer type .chunked_attention"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "3 linear value heads cannot share 2 key heads"),
        ("qwen3_5_text", {"linear_key_head_dim": 0}, "linear_key_head_dim must be at least 1, not 0"),
        ("qwen3_5_text", {"linear_key_head_dim": 8}, r"in_proj_qkv.weight has shape \[160, 64\]; .* \[128, 64\]"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 5}, r"conv1d.weight has shape \[160, 1, 4\]; .* \[160, 1, 5\]"),
        ("nemotron_h", {"layers_block_type": ["linear_attention", "moe"]}, "layer type 'moe' is not supported"),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 2000}, "it has 2000 layers, and 1024 are the most"),
        ("nemotron_h", {"n_groups": 4}, "6 Mamba heads do not make 4 groups of one size"),
        ("nemotron_h", {"time_step_min": -0.1}, "time_step_min must be a number from 0 on, not -0.1"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "activation 'gelu' is not supported without a gate, only relu2"),
        ("granitemoehybrid", {"num_local_experts": 4}, r"lacks model.layers.0.block_sparse_moe.0.down_proj.weight"),
        ("granitemoehybrid", {"mamba_d_state": 8}, r"in_proj.weight has shape \[288, 64\]; .* \[280, 64\]"),
        ("granitemoehybrid", {"residual_multiplier": None}, "residual_multiplier must be a positive number, not None"),
        ("falcon_h1", {"ssm_in_multiplier": None}, "ssm_in_multiplier must be a positive number, not None"),
        ("falcon_h1", {"time_step_limit": [0.3, 0.1]}, "time_step_limit must be two rising numbers from 0 on"),
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache must be at least 2, not 1"),
        ("lfm2", {"layer_types": ["conv", "sliding_attention", "full_attention"]}, "layer.*sliding_attention"),
    ],
)
def test_configs_that_make_no_recurrent_model_are_refused(
    tmp_path: Path, family: str, fields: dict[str, Any], reason: str
) -> None:
    shape = {**FAMILIES[family], "num_hidden_layers": 3}
    make_checkpoint(tmp_path, model_type=family, **shape)
    write_config(tmp_path, read_config(tmp_path), **fields)
    message = refusal(tmp_path)
    assert re.search(reason, message), message


def test_missing_weights_of_a_convolution_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="lfm2", **FAMILIES["lfm2"])
    edit(tmp_path, {"model.layers.1.conv.conv.weight": None})
    assert refusal(tmp_path).endswith("the checkpoint lacks model.layers.1.conv.conv.weight")


def test_layers_that_guess_further_tokens_are_skipped(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type="qwen3_5_text", **FAMILIES["qwen3_5_text"])
    edit(tmp_path, {"mtp.fc.weight": torch.zeros(4, 4)})
    assert load_model(open_checkpoint(str(tmp_path)), DType.FLOAT32, "cpu", SLOT_LEN).config.num_layers == 4
    edit(tmp_path, {"more.fc.weight": torch.zeros(4, 4)})
    assert refusal(tmp_path).endswith("the checkpoint has tensors that this model has no place for: more.fc.weight")
