"""Checkpoints of known shapes with random weights, and a tokenizer with which they can be talked to.

Speed can then be measured where nothing can be downloaded.
"""

import argparse
import itertools
import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from chairlift.loadtest.workload import WORDS
from chairlift.models import open_checkpoint
from chairlift.models.gguf.families import describe_gguf

SHAPES: dict[str, dict[str, Any]] = {
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "granite-3.2-2b": {
        "model_type": "granite",
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 49155,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 8.0,
    },
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "vocab_size": 248320,
    },
    "lfm2.5-1.2b": {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "block_dim": 2048,  # as published configs say for those that ask, vLLM among them
        "conv_dim": 2048,
        "vocab_size": 65536,
    },
}
"""Fields of a config.json, of a Llama with tied embeddings unless they say otherwise. 1b is Llama 3.2's shape."""

MAX_POSITIONS = 2**14  # more than the longest of evaluation.py's loads needs
_BYTE_SPACE = "Ġ"  # a space in the alphabet of bytes
_WORD_LETTERS = 4  # enough for half a million words


def make_checkpoint(shape: str, directory: Path, dtype: str = "bfloat16") -> Path:
    """Writes a random checkpoint of that shape, unless it is there already; returns its directory."""
    if (directory / "model.safetensors").is_file():
        return directory
    torch.manual_seed(0)
    end = 2  # OpenVINO GenAI does not run without one
    fields = {"model_type": "llama", "eos_token_id": end, "tie_word_embeddings": True, **SHAPES[shape]}
    config = AutoConfig.for_model(**fields, max_position_embeddings=MAX_POSITIONS)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    _byte_tokenizer(config.vocab_size).save_pretrained(directory)
    return directory


def write_numbers(gguf: str, directory: Path) -> Path:
    """Writes the numbers that a GGUF file's integers stand for, as a checkpoint in float32; returns its directory."""
    checkpoint = open_checkpoint(gguf)
    assert checkpoint.gguf is not None, "a checkpoint needs no rewriting"
    weights = checkpoint.open_weights()
    tensors = {name: weights.read(name) for name in weights.tensors}
    exact = {name: each if isinstance(each, torch.Tensor) else each.dequantize() for name, each in tensors.items()}
    directory.mkdir(exist_ok=True)
    save_file(exact, directory / "model.safetensors", metadata={"format": "pt"})
    described = describe_gguf(checkpoint.gguf)
    getattr(transformers, described["architectures"][0]).config_class(**described).save_pretrained(directory)
    return directory


def _byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Makes texts of bytes, and of all other tokens words, so that clients see each token of an answer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=_WORD_LETTERS))
    others = itertools.islice(words, max(0, vocab_size - len(alphabet)))
    spelled = [*alphabet, *(f"{_BYTE_SPACE}{word}" for word in others)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(spelled)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


UNKNOWN = "<unk>"
ROLES = ("system", "user", "assistant")
END_OF_MESSAGE = "<|end|>"
MESSAGE_TOKENS = 2  # what the template adds to each message
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPACE = "▁"


def make_servable(weights: Path, directory: Path, max_positions: int) -> Path:
    """Writes a checkpoint with the weights of another, by links, for so many positions; returns its directory."""
    directory.mkdir(parents=True)
    for file in weights.glob("model*"):
        (directory / file.name).symlink_to(file.resolve())
    config = json.loads((weights / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max_positions
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    word_tokenizer(config["vocab_size"]).save_pretrained(directory)
    return directory


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """The load test's words first, then as many more as it takes; the marks of messages are the last ids.

    The marks are no special tokens: an answer that holds one is repeated with it.
    """
    marks = [*(f"<|{role}|>" for role in ROLES), END_OF_MESSAGE]
    num_more = vocab_size - len(WORDS) - len(marks) - 1
    if num_more < 0:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for the {len(WORDS)} words of the load test")
    words = [*WORDS, *(f"word{number}" for number in range(num_more))]
    vocab = {UNKNOWN: 0} | {_SPACE + word: position for position, word in enumerate(words, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE)
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE)
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token=UNKNOWN, chat_template=CHAT_TEMPLATE
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.shape, arguments.directory))
