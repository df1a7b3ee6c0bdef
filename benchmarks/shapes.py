"""Checkpoints of known shapes with random weights, so that speed can be measured where nothing can be downloaded."""

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
}
_MAX_POSITIONS = 4096


def make_checkpoint(shape: str, directory: Path, dtype: str = "bfloat16") -> Path:
    """Writes a random checkpoint of that shape, unless it is there already; returns its directory."""
    if (directory / "model.safetensors").is_file():
        return directory
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=_MAX_POSITIONS, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        LlamaForCausalLM(config).save_pretrained(directory)
    finally:
        torch.set_default_dtype(torch.float32)
    _byte_tokenizer().save_pretrained(directory)
    return directory


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens: enough for a model whose text nobody reads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.shape, arguments.directory))
