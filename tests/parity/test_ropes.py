"""Rope gives the logits of transformers' own class however config.json spells it, and is refused where that fails."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from chairlift.config import DType
from chairlift.models import TorchForward, load_adapted, load_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import AdaptedConfig
from chairlift.models.cpu import CpuDecoder
from tests.models.support import read_config, refusal, write_config
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.kernels import needs_kernels

LENGTH = 60  # tokens, below every original length that a longrope has here
LAYER_TYPES = ["full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 0]},
    "granite": {},
    "phi3": {"pad_token_id": 0, "hidden_size": 128},
    "olmo2": {},
    "gemma2": {},
    "gemma3_text": {"layer_types": LAYER_TYPES},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "olmo3": {"layer_types": LAYER_TYPES},
    "mixtral": {"num_local_experts": 4},
}
WRITTEN = ("rope_parameters", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")

YARN = {"rope_type": "yarn", "factor": 4.0}
YARN_32 = {**YARN, "original_max_position_embeddings": 32}
BANDS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 10 for i in range(16)],
    "long_factor": [2.0 + i / 3 for i in range(16)],
}
LONG_100 = {**LISTS, "original_max_position_embeddings": 100}
HALVES = {**LISTS, "short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [2.0 + i / 3 for i in range(8)]}
TOP_32, TOP_100 = ({"original_max_position_embeddings": length} for length in (32, 100))


def by_type(**full: Any) -> dict[str, Any]:
    near = {"rope_type": "default", "rope_theta": 77.0}
    return {"rope_parameters": {"full_attention": {"rope_theta": 500.0, **full}, "sliding_attention": near}}


SPELLINGS: dict[str, dict[str, Any]] = {
    "theta at the top": {"rope_theta": 500.0},
    "theta in the new dict, and at the top": {"rope_parameters": {"rope_theta": 77.0}, "rope_theta": 500.0},
    "theta in the old dict, and at the top": {"rope_scaling": {"rope_theta": 77.0}, "rope_theta": 500.0},
    "both dicts": {"rope_parameters": {"rope_theta": 77.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "both names of the kind": {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
    "a factor without a kind": {"rope_scaling": {"factor": 2.0}},
    "linear, an integer": {"rope_scaling": {"type": "linear", "factor": 2, "attention_factor": 3.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}},
    "yarn, original at the top": {"rope_scaling": YARN, **TOP_32},
    "yarn, original at both places": {"rope_scaling": {**YARN, "original_max_position_embeddings": 64}, **TOP_32},
    "yarn, original nowhere": {"rope_scaling": YARN},
    "yarn, null as factor": {"rope_scaling": {**YARN_32, "factor": None}},
    "yarn, factor below 1": {"rope_scaling": {**YARN_32, "factor": 0.5}},
    "yarn, attention_factor": {"rope_scaling": {**YARN_32, "attention_factor": 1.7}},
    "yarn, both mscales": {"rope_scaling": {**YARN_32, "mscale": 1.3, "mscale_all_dim": 0.6}},
    "yarn, one mscale": {"rope_scaling": {**YARN_32, "mscale": 1.3, "mscale_all_dim": 0}},
    "yarn, betas": {"rope_scaling": {**YARN_32, "beta_fast": 8, "beta_slow": 2}},
    "yarn, no betas": {"rope_scaling": {**YARN_32, "beta_fast": 0, "beta_slow": None}},
    "yarn, not truncated": {"rope_scaling": {**YARN_32, "truncate": False}},
    "yarn, null for truncated": {"rope_scaling": {**YARN_32, "truncate": None}},
    "llama3, original at the top": {"rope_scaling": BANDS, **TOP_32},
    "llama3, original nowhere": {"rope_parameters": {**BANDS, "rope_theta": 500.0}},
    "longrope, original at the top": {"rope_scaling": LISTS, **TOP_100},
    "longrope, factor": {"rope_scaling": {**LONG_100, "factor": 3.0}},
    "longrope, attention_factor": {"rope_scaling": {**LONG_100, "attention_factor": 1.2}},
    "proportional": {"rope_scaling": {"type": "proportional", "factor": 2.0}, "partial_rotary_factor": 0.25},
    "a part": {"partial_rotary_factor": 0.5},
    "a part, in the dict": {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "an odd part": {"partial_rotary_factor": 0.29},
    "the whole, scaled": {"partial_rotary_factor": 1.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
}
OF_ALL = ("yarn, original at the top", "longrope, original at the top", "a part", "an odd part")
OTHERS: dict[str, dict[str, Any]] = {
    "a part, longrope": {"rope_scaling": HALVES, "partial_rotary_factor": 0.5, **TOP_100},
    "by type, yarn": by_type(**YARN_32, truncate=False),
    "by type, yarn, original at the top": {**by_type(**YARN), **TOP_32},
    "by type, dynamic, a part": {**by_type(rope_type="dynamic", factor=3.0), "partial_rotary_factor": 1.0},
    "by type, longrope": by_type(**LONG_100),
    "two bases": {"rope_theta": 500.0, "rope_local_base_freq": 77.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
}
CASES = [
    *(("llama", name) for name in SPELLINGS),
    *((family, name) for family in FAMILIES if family not in ("llama", "phi3") for name in OF_ALL),
    *(("phi3", name) for name in (*OF_ALL[1:], "a part, in the dict", "a part, longrope")),
    *((family, name) for family in ("gemma3_text", "olmo3") for name in OTHERS if name.startswith(("by type", "two"))),
]


@cache
def base(directory: Path, family: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of that family, and its config without rope."""
    shape = {"num_hidden_layers": 2, "max_position_embeddings": 128, "head_dim": 32, **FAMILIES[family]}
    make_checkpoint(directory / family, seed=3, model_type=family, **shape)
    config = read_config(directory / family)
    return directory / family, {name: value for name, value in config.items() if name not in WRITTEN}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ropes")


def our_logits(path: Path, tokens: list[int], *, is_native: bool = False) -> torch.Tensor:
    opened = open_checkpoint(str(path))
    if isinstance(opened.config, AdaptedConfig):
        forward = TorchForward(load_adapted(opened, DType.FLOAT32, "cpu"), TorchBackend(opened.config.attention))
        return Bench(opened.config, torch.float32, forward).run([Row(0, tokens)])[0]
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN if is_native else LENGTH, SLOT_LEN)
    if is_native:
        return Bench(model.config, model.dtype, CpuDecoder(model, SLOT_LEN)).run([Row(0, tokens)])[0]
    return Bench(model.config, model.dtype, TorchForward(model, TorchBackend(model.config.attention))).run(
        [Row(0, tokens)]
    )[0]


@torch.inference_mode()
def their_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(("family", "spelling"), CASES)
def test_logits_are_those_of_transformers(directory: Path, family: str, spelling: str) -> None:
    path, config = base(directory, family)
    write_config(path, config, {**SPELLINGS, **OTHERS}[spelling])
    (tokens,) = random_prompts(4, [LENGTH])
    torch.testing.assert_close(our_logits(path, tokens), their_logits(path, tokens), rtol=1e-3, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize(("family", "spelling"), [("llama", OF_ALL[0]), ("llama", "a part"), ("phi3", "an odd part")])
def test_native_code_rotates_likewise(directory: Path, family: str, spelling: str) -> None:
    path, config = base(directory, family)
    write_config(path, config, SPELLINGS[spelling])
    (tokens,) = random_prompts(4, [LENGTH])
    ours = our_logits(path, tokens, is_native=True)
    torch.testing.assert_close(ours, their_logits(path, tokens), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "linear", "factor": 2.0}, "partial_rotary_factor does not work with rope type linear"),
        ({**YARN_32}, "partial_rotary_factor does not work with rope type yarn"),
        ({**HALVES, **TOP_100}, "partial_rotary_factor does not work with rope type longrope"),
    ],
)
def test_a_scaled_rope_over_a_part_fails_there_and_is_refused(
    directory: Path, family: str, rope: dict[str, Any], said: str
) -> None:
    path, config = base(directory, family)
    write_config(path, config, rope_scaling=rope, partial_rotary_factor=0.5)
    assert said in refusal(path, open_checkpoint)
    with pytest.raises(RuntimeError):
        their_logits(path, [1, 2, 3])


@pytest.mark.parametrize("length", [32, 100])
def test_the_decoders_in_transformers_code_end_where_longrope_does(tmp_path: Path, length: int) -> None:
    make_checkpoint(tmp_path, model_type="apertus", hidden_size=128, max_position_embeddings=128)
    config = {name: value for name, value in read_config(tmp_path).items() if name not in WRITTEN}
    write_config(tmp_path, config, rope_scaling=LISTS, original_max_position_embeddings=length)
    assert json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"] == 128
    assert open_checkpoint(str(tmp_path)).config.max_position_embeddings == length
