"""Tests that a stored head counts if it differs from the embedding to which the config ties it, wherever it comes from.

transformers, which leaves such a head untied, is the judge.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from chairlift.config import DType
from chairlift.errors import CheckpointError
from chairlift.models import TorchForward, load_adapted, make_dummy_model, open_checkpoint
from chairlift.models.attention.torch_sdpa import TorchBackend
from chairlift.models.config import AdaptedConfig, ModelConfig
from chairlift.models.cpu import CpuDecoder
from chairlift.models.loader import count_parameters, load_model
from tests.models.support import edit, load, read_config, refusal, write_config
from tests.support.checkpoints import make_checkpoint, random_prompts
from tests.support.forward_bench import SLOT_LEN, Bench, Row
from tests.support.gguf_files import Kind, write_model
from tests.support.kernels import needs_kernels

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "head_dim": 32, "tie_word_embeddings": True}
(TOKENS,) = random_prompts(3, [40])
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma2": {},
    "granite": {},
    "phi3": {"pad_token_id": 0, "hidden_size": 128},
}


def embedding(directory: Path) -> torch.Tensor:
    return load_file(directory / "model.safetensors")[EMBEDDING]


def merged(directory: Path, model_type: str = "llama", **shape: Any) -> Path:
    """A checkpoint with a tied config and a head of its own."""
    make_checkpoint(directory, seed=3, model_type=model_type, **{**SHAPE, **shape})
    edit(directory, {HEAD: embedding(directory).flip(0).contiguous()})
    assert read_config(directory).get("tie_word_embeddings", True)
    return directory


@torch.inference_mode()
def their_logits(directory: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
    logits: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return logits


def our_logits(path: Path) -> torch.Tensor:
    opened = open_checkpoint(str(path))
    model: Any
    if isinstance(opened.config, AdaptedConfig):
        model = load_adapted(opened, DType.FLOAT32, "cpu")
    else:
        model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    return run(opened.config, TorchForward(model, TorchBackend(opened.config.attention)))


def run(config: Any, forward: Any) -> torch.Tensor:
    return Bench(config, torch.float32, forward).run([Row(0, TOKENS)])[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_is_used(tmp_path: Path, family: str) -> None:
    merged(tmp_path, family, **FAMILIES[family])
    torch.testing.assert_close(our_logits(tmp_path), their_logits(tmp_path), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["cohere", "nemotron"])
def test_decoders_in_transformers_code_use_it(tmp_path: Path, family: str) -> None:
    merged(tmp_path, family, pad_token_id=0)
    torch.testing.assert_close(our_logits(tmp_path), their_logits(tmp_path), rtol=1e-3, atol=1e-4)


@needs_kernels
def test_native_code_uses_it(tmp_path: Path) -> None:
    opened = open_checkpoint(str(merged(tmp_path)))
    model = load_model(opened, DType.FLOAT32, "cpu", SLOT_LEN)
    theirs = their_logits(tmp_path)
    torch.testing.assert_close(run(opened.config, CpuDecoder(model, SLOT_LEN)), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_its_memory_is_counted(tmp_path: Path, family: str) -> None:
    directory = merged(tmp_path, family, pad_token_id=0)
    with_head = count_parameters(open_checkpoint(str(directory)).config)
    edit(directory, {HEAD: embedding(directory).clone()})
    assert with_head - count_parameters(open_checkpoint(str(directory)).config) == 320 * 64


def is_tied(path: Path, **options: bool) -> bool:
    config = open_checkpoint(str(path), **options).config
    assert isinstance(config, ModelConfig)
    return config.is_tied


def test_one_bit_or_another_format_is_a_difference(tmp_path: Path) -> None:
    merged(tmp_path)
    same = embedding(tmp_path)
    other = same.clone()
    other.view(torch.int32)[-1, -1] ^= 1
    found = []
    for head in (same.clone(), other, same.to(torch.float64), same[:-1].clone()):
        edit(tmp_path, {HEAD: head})
        found.append(is_tied(tmp_path))
    assert found == [True, False, False, False]
    assert refusal(tmp_path) == f"tensor {HEAD} has shape [319, 64]; the model needs [320, 64]"


def test_a_quantized_head_beside_an_embedding_is_used(tmp_path: Path) -> None:
    merged(tmp_path)
    packed = torch.full((320, 8), 0x76543210, dtype=torch.int32)
    scale, shape = torch.full((320, 2), 0.5), torch.tensor([320, 64])
    parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    edit(tmp_path, {HEAD: None, **{f"lm_head.{name}": part for name, part in parts.items()}})
    groups = {"a": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}}}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    write_config(tmp_path, read_config(tmp_path), quantization_config=how)
    assert not is_tied(tmp_path)
    head = load(tmp_path).lm_head.weight
    assert head[0, :8].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]


def test_a_gguf_file_with_both_uses_its_own_head(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, seed=3, **{**SHAPE, "tie_word_embeddings": False})
    path = write_model(reference, tmp_path / "model.gguf", Kind.F32)
    assert not is_tied(path)
    torch.testing.assert_close(our_logits(path), their_logits(tmp_path), rtol=1e-3, atol=1e-4)


def test_if_only_the_head_is_stored_it_is_the_embedding(tmp_path: Path) -> None:
    merged(tmp_path)
    edit(tmp_path, {HEAD: embedding(tmp_path).clone(), EMBEDDING: None})
    assert is_tied(tmp_path)
    torch.testing.assert_close(our_logits(tmp_path), their_logits(tmp_path), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_an_untied_config_without_a_head_is_refused(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, model_type=family, pad_token_id=0, tie_word_embeddings=False)
    edit(tmp_path, {HEAD: None})
    with pytest.raises(CheckpointError, match=f"the checkpoint lacks {HEAD}"):
        our_logits(tmp_path)


def test_random_weights_follow_the_config(tmp_path: Path) -> None:
    merged(tmp_path)
    assert is_tied(tmp_path, ignores_weights=True)
    opened = open_checkpoint(str(tmp_path), ignores_weights=True)
    model = make_dummy_model(opened, DType.FLOAT32, "cpu", 0, 32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
