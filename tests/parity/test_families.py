"""Every decoder gives the logits and the greedy tokens of transformers' own class, in every mix of batch and chunk.

Those in `ADAPTED` are in no family: transformers' own code runs over our slots.
"""

import itertools
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as BackendTokenizer

from chairlift import LLM, EngineConfig, SamplingParams
from chairlift.config import DType
from chairlift.engine.core import EngineCore
from chairlift.models import Checkpoint, TorchForward, load_adapted, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.checkpoint import find_model
from chairlift.models.config import AdaptedConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.scheduler import Request
from tests.models.support import read_config, write_config
from tests.support.checkpoints import assert_greedy, make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row, logits_of, steps_around
from tests.support.gguf_files import Kind, add_byte_level_tokenizer, write_model
from tests.support.kernels import needs_kernels

CPU = (DType.FLOAT32, "cpu")
NUM_TOKENS = 32
WINDOW = 24  # tokens, of sequences of more than twice as many
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, **YARN, "rope_type": "llama3", "factor": 8.0}


def longrope(short: list[float], long: list[float]) -> dict[str, Any]:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 400}
    return {"rope_parameters": {**rope, "short_factor": short, "long_factor": long}, "max_position_embeddings": 2048}


GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
GEMMA = {"query_pre_attn_scalar": 24, "sliding_window": WINDOW, "tie_word_embeddings": True}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
PARTIAL = {"hidden_size": 128, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 400}
ODD = {"num_key_value_heads": 2, "hidden_size": 60}
FACTORS = [1.0 + 0.1 * i for i in range(12)], [2.0 + 0.3 * i for i in range(12)]

LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
AFMOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "head_dim": 16,
    "layer_types": LAYERS,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
}

# A name begins with the model type, unless the fields have it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama, yarn": {"rope_parameters": YARN},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, another theta": {"rope_parameters": {"rope_theta": 500.0}, "num_attention_heads": 6, **ODD},
    "llama, linear rope": {"rope_parameters": LINEAR, "num_attention_heads": 10, **ODD, "tie_word_embeddings": True},
    "llama, llama3 rope": {"rope_parameters": LLAMA3, "num_key_value_heads": 1, "num_hidden_layers": 1},
    "mistral, window": {"sliding_window": WINDOW},
    "mistral, no window": {"sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2, window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"tie_word_embeddings": True},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "granite": {**GRANITE, "logits_scaling": 8.0},
    "phi3": {"pad_token_id": 0, "sliding_window": WINDOW, "num_key_value_heads": 4},
    "phi3, partial longrope": {"pad_token_id": 0, **PARTIAL, **longrope(*FACTORS)},
    "olmo2": {},
    "gemma2": {**GEMMA, **CAPS},
    "gemma3": {"model_type": "gemma3_text", **GEMMA, "num_hidden_layers": 6},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
# Of sizes that native code does not take; test_experts.py has those that it does.
IN_TORCH: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3, yarn": {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}
ADAPTED: dict[str, dict[str, Any]] = {
    "minicpm3, long values": {**LATENT, "v_head_dim": 40},
    "cohere": {"logit_scale": 0.25, "pad_token_id": 0},
    "gpt_neox": {"rotary_pct": 0.5},
    "starcoder2": {"sliding_window": WINDOW},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "pad_token_id": 0},
    "nemotron": {"pad_token_id": 0},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32, "dropout": 0.0, "pad_token_id": 1},
    "afmoe": AFMOE,
    "phimoe, window of the context": {"num_local_experts": 4, "sliding_window": 512, "pad_token_id": 0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0},
    "apertus, longrope": longrope(FACTORS[0][:8], [2.0] * 8),
    "cohere2, dynamic rope": {
        "logit_scale": 0.25,
        "pad_token_id": 0,
        "rope_parameters": DYNAMIC,
        "layer_types": ["full_attention"] * 3,
    },
}

NATIVE_CASES = [pytest.param(family, "cpu", marks=needs_kernels) for family in FAMILIES]
CASES = [*((family, "torch") for family in (*FAMILIES, *IN_TORCH, *ADAPTED)), *NATIVE_CASES]
GREEDY_CASES = [
    *(pytest.param(family, "torch", marks=pytest.mark.slow) for family in FAMILIES),
    *((family, "torch") for family in (*IN_TORCH, *ADAPTED)),
    *NATIVE_CASES,
]


def make_model(directory: Path, family: str, shape: dict[str, Any]) -> Any:
    """transformers' model of that family, which is also in that directory."""
    fields = {"model_type": family.partition(",")[0], "max_position_embeddings": 512, **shape}
    return make_checkpoint(directory, seed=3, **fields)


@cache
def checkpoint(directory: Path, family: str) -> tuple[Path, Any]:
    """A random checkpoint of that family, and transformers' model of it."""
    shape = {"head_dim": 32, **FAMILIES[family]} if family in FAMILIES else (IN_TORCH | ADAPTED)[family]
    return directory / family, make_model(directory / family, family, shape)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


def torch_bench(opened: Checkpoint, **lengths: Any) -> Bench:
    model = load_model(opened, *CPU, **{"max_seq_len": SLOT_LEN, **lengths})
    return Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention)))


def bench(path: Path, backend: str) -> Bench:
    opened = open_checkpoint(str(path))
    if isinstance(opened.config, AdaptedConfig):
        forward = TorchForward(load_adapted(opened, *CPU), TorchBackend(opened.config.attention))
        return Bench(opened.config, torch.float32, forward)
    if backend == "torch":
        return torch_bench(opened)
    return Bench(opened.config, torch.float32, CpuDecoder(load_model(opened, *CPU, SLOT_LEN), SLOT_LEN))


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(("family", "backend"), CASES)
def test_logits_are_those_of_transformers_in_chunks_among_others(directory: Path, family: str, backend: str) -> None:
    path, reference = checkpoint(directory, family)
    (tokens,) = random_prompts(4, [300])
    steps = steps_around(random.Random(5), 4, tokens, [1, 2, 17, 60, 61, 62, 190, 298, 299])
    ours, theirs = logits_of(bench(path, backend), steps), reference_logits(reference, tokens)
    assert_near(ours, theirs)


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.std() > 0.05  # or else there would be nothing to compare
    assert torch.linalg.vector_norm(ours - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)


def assert_greedy_answers(model: Any, llm: LLM, prompts: list[list[int]], num_tokens: int) -> None:
    """Asserts the greedy answers of transformers' own code."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert_greedy(model, prompt, output.outputs[0].token_ids, num_tokens)


@pytest.mark.parametrize(("family", "backend"), GREEDY_CASES)
def test_greedy_tokens_are_those_of_transformers_on_reused_prefixes(directory: Path, family: str, backend: str) -> None:
    path, reference = checkpoint(directory, family)
    first, second, third, shared = random_prompts(6, [3, 40, 17, 50])
    prompts = [first, shared + second, shared + third]
    engine: dict[str, Any] = {"max_batch_size": 2, "max_num_batched_tokens": 13, "max_steps_per_launch": 3}
    with LLM(str(path), attention_backend=backend, max_seq_len=SLOT_LEN, **engine) as llm:
        assert_greedy_answers(reference, llm, prompts, NUM_TOKENS)


ENGINES = {  # slots, tokens in a batch, steps in a launch
    "all at once": (8, 512, 1),
    "one slot": (1, 512, 1),
    "fewer slots than requests": (3, 512, 4),
    "small chunks": (8, 8, 1),
    "odd chunks, multistep": (5, 7, 3),
    "long launches": (8, 512, 16),
}
PROMPTS = random_prompts(2, [1, 5, 17, 40, 3, 64, 2, 29])


def sizes(slots: int, budget: int, steps: int) -> dict[str, Any]:
    return {"max_batch_size": slots, "max_num_batched_tokens": budget, "max_steps_per_launch": steps}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES.keys())
def test_any_mix_of_batch_chunk_and_steps_gives_the_same_tokens(directory: Path, engine: tuple[int, int, int]) -> None:
    path, reference = checkpoint(directory, "llama, biases")
    params = [SamplingParams(temperature=0.0, max_tokens=5 + index, ignore_eos=True) for index in range(len(PROMPTS))]
    with LLM(str(path), **sizes(*engine)) as llm:
        outputs = llm.generate(PROMPTS, params)
    for index, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert_greedy(reference, prompt, output.outputs[0].token_ids, 5 + index)  # each ends at its own length
        assert output.outputs[0].finish_reason == "length"


def test_an_answer_may_fill_its_slot_to_the_last_token(directory: Path) -> None:
    path, reference = checkpoint(directory, "llama, biases")
    with LLM(str(path), max_seq_len=76, max_steps_per_launch=8) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(reference, prompt, output.outputs[0].token_ids, 76 - len(prompt))


@pytest.mark.parametrize("steps", [1, 3])
def test_aborts_in_the_middle_change_nothing_for_those_who_stay(directory: Path, steps: int) -> None:
    path, reference = checkpoint(directory, "llama, biases")
    core = EngineCore(EngineConfig(model=str(path), **sizes(3, 16, steps)))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        core.add(Request(str(index), prompt, params, 12, seed=0))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(PROMPTS))}
    aborts = {2: "1", 5: "6", 9: "3"}  # one that runs, one that waits, one that has ended or not
    for step in itertools.takewhile(lambda step: core.has_work or step <= 9, range(200)):
        if step in aborts:
            core.abort(aborts[step])
        core.check()
        for event in core.step() if core.has_work else []:
            tokens[event.request_id] += event.new_token_ids
    assert not core.has_work
    core.check()
    for prompt, (request_id, answer) in zip(PROMPTS, tokens.items(), strict=True):
        assert_greedy(reference, prompt, answer, len(answer) if request_id in aborts.values() else 12)
    assert len(tokens["1"]) < 12
    assert tokens["6"] == []


def test_batch_invariant_attention_obeys_windows_and_caps(directory: Path) -> None:
    path, reference = checkpoint(directory, "gemma2")
    with LLM(str(path), attention_backend="torch", batch_invariant=True, max_seq_len=SLOT_LEN) as llm:
        assert_greedy_answers(reference, llm, random_prompts(9, [40, 5]), 12)


BEYOND: dict[str, dict[str, Any]] = {
    "phi3, longrope": {**FAMILIES["phi3, partial longrope"], "original_max_position_embeddings": 32},
    "llama, dynamic": {"max_position_embeddings": 64, "rope_parameters": {**DYNAMIC, "factor": 4.0}},
}


@pytest.mark.parametrize("family", BEYOND)
def test_beyond_the_original_length_rope_is_that_of_the_longest_sequence(tmp_path: Path, family: str) -> None:
    reference = make_model(tmp_path, family, BEYOND[family])
    (tokens,) = random_prompts(8, [100])
    bench = torch_bench(open_checkpoint(str(tmp_path)), max_seq_len=len(tokens), num_positions=SLOT_LEN)
    ours = torch.cat([bench.run([Row(1, part)])[0] for part in (tokens[:60], tokens[60:])])
    torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("qkv_bias", "bias"), [(False, False), (True, False), (True, True)])
def test_internlm3_is_a_llama_with_biases_of_its_own(tmp_path: Path, qkv_bias: bool, bias: bool) -> None:
    reference = make_checkpoint(tmp_path, attention_bias=qkv_bias or bias, mlp_bias=bias)
    if not bias:
        for layer in reference.model.layers:
            layer.self_attn.o_proj.bias = None
        reference.save_pretrained(tmp_path)
    fields = read_config(tmp_path)
    del fields["attention_bias"], fields["mlp_bias"]
    fields |= {"architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3"}
    write_config(tmp_path, fields, qkv_bias=qkv_bias, bias=bias)
    (tokens,) = random_prompts(7, [40])
    ours = bench(tmp_path, "torch").run([Row(2, tokens)])[0]
    torch.testing.assert_close(ours, reference_logits(reference, tokens), rtol=1e-4, atol=1e-5)


SAME = ("mistral, window", "qwen3", "granite", "phi3", "phi3, partial longrope", "olmo2")
GGUF_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LINEAR},
    "llama, tied, biases": {**FAMILIES["llama, biases"], "tie_word_embeddings": True},
    "llama, 3": {"rope_parameters": LLAMA3},
    "qwen2, yarn": {"rope_parameters": YARN},
    **{name: FAMILIES[name] for name in SAME},
    "smollm3": {"num_hidden_layers": 5, "pad_token_id": 0},
    "gemma2": {**FAMILIES["gemma2"], "query_pre_attn_scalar": 32},
    "gemma3": {**FAMILIES["gemma3"], "query_pre_attn_scalar": 32, "num_hidden_layers": 7},
}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_logits_of_a_gguf_file_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    reference = make_model(tmp_path, family, {"head_dim": 32, **GGUF_FAMILIES[family]})
    opened = open_checkpoint(str(write_model(reference, tmp_path / "model.gguf")))
    assert opened.config.architecture == reference.config.architectures[0]
    (tokens,) = random_prompts(4, [100])
    assert_near(torch_bench(opened).run([Row(2, tokens)])[0], reference_logits(reference, tokens))
    if family in ("llama", "phi3"):
        ours, theirs = opened.config, open_checkpoint(str(tmp_path)).config
        eps, exact = (repr(each.rms_norm_eps) for each in (ours, theirs))  # type: ignore[attr-defined]
        assert repr(ours).replace(eps, exact) == repr(theirs)


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
    with LLM(str(path.parent), dtype="float32", attention_backend="torch", max_seq_len=128) as llm:
        assert_greedy_answers(reference, llm, random_prompts(2, [40]), 20)
        assert llm.inputs.tokenize("Hi!") == list(b"Hi!")
