"""Gemma 3n and 4, whose layers differ from each other, give the logits and tokens of transformers' own classes."""

import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from chairlift import LLM, SamplingParams
from chairlift.config import DType
from chairlift.models import load_model, open_checkpoint
from chairlift.models.cpu import CpuDecoder
from chairlift.models.grouped import GroupedWeight
from tests.models.support import edit, read_config, refusal, write_config
from tests.models.test_gguf import rewritten
from tests.parity.support import Checkpoints, bench, native_bench
from tests.parity.test_families import assert_greedy_answers, assert_near, reference_logits
from tests.support.checkpoints import random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around
from tests.support.gguf_files import Kind, finish, write_model
from tests.support.kernels import needs_kernels

WINDOW = 24  # tokens, of sequences of more than twice as many
KINDS = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 2.0,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "layer_types": KINDS * 2,
}
INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320}
SHARING: dict[str, Any] = {**GEMMA, **INPUTS, "num_hidden_layers": 6, "layer_types": KINDS * 3}
VALUES_OF_KEYS: dict[str, Any] = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "global_head_dim": 128,  # of which 32 elements rotate
}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 40,
}

# A name begins with the model's, at whose shapes these are small ones.
MODELS: dict[str, dict[str, Any]] = {
    "gemma 4 E2B": {**SHARING, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_key_value_heads": 1},
    "gemma 4 E4B": {**SHARING, "num_kv_shared_layers": 2},
    "gemma 4 12B": {**GEMMA, **VALUES_OF_KEYS, "model_type": "gemma4_unified_text"},
    "gemma 4 26B-A4B": {**GEMMA, **VALUES_OF_KEYS, **EXPERTS},
    "gemma 4 31B": {**GEMMA, **VALUES_OF_KEYS, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    "gemma 3n": {
        **SHARING,
        "model_type": "gemma3n_text",
        "vocab_size_per_layer_input": 300,  # the other tokens have the inputs of token 0
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
    },
}
del MODELS["gemma 3n"]["global_head_dim"]


checkpoint = Checkpoints(MODELS).get


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gemmas")


NATIVE = [pytest.param(name, "cpu", marks=needs_kernels) for name in MODELS]
of_every_model = pytest.mark.parametrize(("name", "backend"), [*((name, "torch") for name in MODELS), *NATIVE])


@of_every_model
def test_logits_are_those_of_transformers_in_chunks_among_others(directory: Path, name: str, backend: str) -> None:
    path, reference = checkpoint(directory, name)
    (tokens,) = random_prompts(4, [100])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 98, 99])
    ours = logits_of(bench(path) if backend == "torch" else native_bench(path), steps)
    assert_near(ours, reference_logits(reference, tokens))


@of_every_model
def test_greedy_tokens_are_those_of_transformers_on_reused_prefixes(directory: Path, name: str, backend: str) -> None:
    path, reference = checkpoint(directory, name)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 50])
    prompts = [first, shared + second, shared + third]
    engine: dict[str, Any] = {"max_batch_size": 2, "max_num_batched_tokens": 33, "max_steps_per_launch": 3}
    with LLM(str(path), attention_backend=backend, max_seq_len=SLOT_LEN, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, 64)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_kernels)])
def test_answers_are_those_of_transformers_with_guesses(directory: Path, backend: str) -> None:
    path, reference = checkpoint(directory, "gemma 4 E2B")
    prompts, speculation = random_prompts(6, [3, 40]), {"batch_invariant": True, "speculation": "ngram"}
    with LLM(str(path), attention_backend=backend, max_seq_len=SLOT_LEN, **speculation) as llm:
        assert_greedy_answers(reference, llm, prompts, 64)
        assert_greedy_answers(reference, llm, prompts, 64)  # which are now known as guesses


@needs_kernels
@pytest.mark.parametrize("name", ["gemma 4 E2B", "gemma 4 12B"])
def test_prompts_of_layers_that_differ_are_found_on_disk_after_a_restart(
    directory: Path, tmp_path: Path, name: str
) -> None:
    path, _ = checkpoint(directory, name)
    (prompt,), scored = random_prompts(7, [100]), SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    answers = []
    for _ in range(2):
        with LLM(str(path), attention_backend="cpu", max_seq_len=SLOT_LEN, prefix_cache_dir=str(tmp_path)) as llm:
            answers += llm.generate([prompt], scored)
    assert [each.num_cached_tokens for each in answers] == [0, 64]
    cold, warm = (each.outputs[0] for each in answers)
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


def test_a_batch_invariant_model_gives_the_same_bits_in_chunks_among_others(directory: Path) -> None:
    path, _ = checkpoint(directory, "gemma 4 E2B")
    (tokens,) = random_prompts(4, [40])
    alone = bench(path, is_invariant=True).run([Row(1, tokens)])[0]
    steps = steps_around(random.Random(6), 4, tokens, [1, 3, 17, 39])
    assert torch.equal(logits_of(bench(path, is_invariant=True), steps), alone)


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # Layers that keep something: keys and values, heads, their size.
        ("gemma 4 E2B", 2 * 2 * 1 * 32 + 1 * 2 * 1 * 64),  # of 6 layers, the last 3 keep nothing
        ("gemma 4 E4B", 2 * 2 * 2 * 32 + 2 * 2 * 2 * 64),  # of 6 layers, the last 2 keep nothing
        # Of keys and values of global layers, elements that do not rotate are kept once.
        ("gemma 4 12B", 2 * 2 * 2 * 32 + 2 * 1 * (2 * 128 - 64)),
        ("gemma 4 26B-A4B", 2 * 2 * 2 * 32 + 2 * 1 * (2 * 128 - 64)),
        ("gemma 4 31B", 2 * 2 * 4 * 32 + 2 * 2 * (2 * 128 - 64)),
        ("gemma 3n", 4 * 2 * 2 * 32),  # of 6 layers, the last 2 keep nothing
    ],
)
def test_a_token_takes_the_memory_of_what_layers_keep(directory: Path, name: str, elements: int) -> None:
    opened = open_checkpoint(str(checkpoint(directory, name)[0]))
    assert opened.config.token_bytes(DType.BFLOAT16) == 2 * elements
    cache = bench(checkpoint(directory, name)[0]).cache
    assert sum(blocks[0, :, :, 0].numel() for memory in cache.memories for blocks in [memory.blocks]) == elements


def test_a_file_of_small_integers_keeps_them(directory: Path, tmp_path: Path) -> None:
    _, reference = checkpoint(directory, "gemma 4 E4B")
    kinds = {"per_layer_projection": Kind.F32, "": Kind.Q4_0}  # of 16 features, and rows of whole groups
    file = write_model(reference, tmp_path / "model.gguf", kinds)
    opened = open_checkpoint(str(file))
    weights, name = opened.open_weights(), "model.embed_tokens_per_layer.weight"
    for each in (name, "model.layers.0.mlp.down_proj.weight", "model.layers.5.per_layer_input_gate.weight"):
        stored = weights.read(each)
        assert isinstance(stored, GroupedWeight)
        values = reference.get_parameter(each).detach().numpy()
        exact = gguf.dequantize(gguf.quantize(values, Kind.Q4_0), Kind.Q4_0)
        assert torch.equal(stored.dequantize(), torch.from_numpy(exact))
    tokens = torch.tensor([5, 319, 5])
    looked_up = []
    for keeps_groups in (True, False):
        inputs = load_model(opened, DType.FLOAT32, "cpu", 8, keeps_groups=keeps_groups).model.layer_inputs
        assert inputs is not None
        assert hasattr(inputs.embedding, "weight") is not keeps_groups
        looked_up.append(inputs.look_up(tokens, torch.float32))
    assert torch.equal(*looked_up)


@needs_kernels
def test_native_answers_of_such_a_file_are_those_of_the_numbers_in_it(directory: Path, tmp_path: Path) -> None:
    _, reference = checkpoint(directory, "gemma 4 E4B")
    kinds = {"per_layer_projection": Kind.F32, "": Kind.Q8_0}
    opened = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf", kinds)))
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN, keeps_groups=True)
    ours = Bench(model.config, torch.float32, CpuDecoder(model, SLOT_LEN)).run([Row(1, [3, 1, 4])])[0]
    theirs = bench(tmp_path / "model.gguf").run([Row(1, [3, 1, 4])])[0]
    assert torch.linalg.vector_norm(ours - theirs) < 0.05 * torch.linalg.vector_norm(theirs)  # inputs are rounded, too


def test_keys_of_layers_that_read_those_of_others_are_left_out(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, reference = checkpoint(directory, "gemma 4 E2B")
    reference.save_pretrained(tmp_path)
    edit(tmp_path, {f"model.layers.5.self_attn.{name}.weight": torch.ones(64, 64) for name in ("k_proj", "v_proj")})
    caplog.set_level("INFO")
    rows = [Row(2, [1, 2, 3])]
    assert torch.equal(bench(tmp_path).run(rows)[0], bench(path).run(rows)[0])
    assert [each for each in caplog.messages if "2 tensors are left out" in each]
    edit(tmp_path, {"model.layers.2.self_attn.k_proj.weight": None})
    assert "the checkpoint lacks model.layers.2.self_attn.k_proj.weight" in refusal(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_gguf_file_are_those_of_transformers(directory: Path, tmp_path: Path, name: str) -> None:
    path, reference = checkpoint(directory, name)
    file = write_model(reference, tmp_path / "model.gguf")
    (tokens,) = random_prompts(4, [60])
    assert_near(bench(file).run([Row(2, tokens)])[0], reference_logits(reference, tokens))
    ours, theirs = open_checkpoint(str(file)).config, open_checkpoint(str(path)).config
    assert [layer[0].kept(torch.float32) for layer in ours.layers] == [
        layer[0].kept(torch.float32) for layer in theirs.layers
    ]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("gemma 4 E4B", {"gemma4.attention.shared_kv_layers": 7}, "num_kv_shared_layers is 7, which leaves no layer"),
        ("gemma 4 E2B", {"gemma4.attention.value_length_swa": 16}, "attention.value_length_swa must be 32"),
        ("gemma 4 E2B", {"gemma4.feed_forward_length": [96, 96, 96, 96, 192, 192]}, "its layers differ in sizes in a"),
        ("gemma 4 E2B", {"gemma4.attention.sliding_window_pattern": [True]}, "does not cover 6 layers"),
        ("gemma 4 E2B", {"gemma4.embedding_length_per_layer_input": 8}, "shape [16, 64]; the model needs [8, 64]"),
        ("gemma 3n", {"gemma3n.altup.active_idx": 1}, "altup_active_idx must be 0, not 1"),
        ("gemma 3n", {"gemma3n.activation_sparsity_scale": [0.5]}, "its activation_sparsity_scale must be 6 numbers"),
    ],
)
def test_metadata_that_make_no_gemma_are_refused(
    directory: Path, tmp_path: Path, name: str, changes: dict[str, Any], reason: str
) -> None:
    whole = write_model(checkpoint(directory, name)[1], tmp_path / "whole.gguf")
    finish(rewritten(whole, tmp_path / "model.gguf", changes))
    message = refusal(tmp_path / "model.gguf")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "fields", "reason"),
    [
        ("gemma 4 E2B", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, which leaves no layer of type"),
        ("gemma 4 E2B", {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be a whole number from 0 on, not -1"),
        ("gemma 4 E2B", {"layer_types": KINDS}, "layer"),
        ("gemma 4 E2B", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not supported"),
        ("gemma 4 E2B", {"hidden_size_per_layer_input": 8}, "the model needs"),
        ("gemma 4 E2B", {"vocab_size_per_layer_input": 0}, "vocab_size_per_layer_input must be a whole number from 1"),
        (
            "gemma 4 E2B",
            {"per_layer_config": {"1": {"head_dim": 0}}},
            "head_dim must be a whole number from 1 on, not 0",
        ),
        ("gemma 4 E2B", {"per_layer_config": {"1": {"head_dim": 70000}}}, "heads of layer 1 have 70000 elements"),
        ("gemma 4 12B", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 attention heads cannot share 3"),
        ("gemma 4 26B-A4B", {"top_k_experts": 9}, "9 of 8 experts cannot be chosen"),
        ("gemma 4 26B-A4B", {"num_experts": None}, "num_experts must be at least 1, not None"),
        ("gemma 3n", {"altup_active_idx": 1}, "altup_active_idx must be 0, not 1"),
        ("gemma 3n", {"altup_num_inputs": 65}, "altup_num_inputs must be at most 64, not 65"),
        ("gemma 3n", {"laurel_rank": 0}, "laurel_rank must be a whole number from 1 on, not 0"),
        ("gemma 3n", {"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern must be shares from 0"),
    ],
)
def test_configs_that_make_no_gemma_are_refused(
    directory: Path, tmp_path: Path, name: str, fields: dict[str, Any], reason: str
) -> None:
    checkpoint(directory, name)[1].save_pretrained(tmp_path)
    write_config(tmp_path, read_config(tmp_path), **fields)
    message = refusal(tmp_path)
    assert reason in message
    assert "\n" not in message
