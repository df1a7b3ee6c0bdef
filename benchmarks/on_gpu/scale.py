"""How large the measurements are: as a GPU is used, or so small that a CPU runs them in a test."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.ceiling import ModelShape, Workload
from shapes import SHAPES
from transformers import LlamaConfig

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Decode:
    """Steady decoding of so many rows that hold so many tokens each; `target`: the floor's share of a step's time."""

    num_rows: int
    context: int
    target: float | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """The shapes (as fields of a Hugging Face config), and what is done with them."""

    large: Mapping[str, Any]
    small: Mapping[str, Any]
    large_decodes: tuple[Decode, ...]
    small_decodes: tuple[Decode, ...]
    plain_decodes: tuple[Decode, ...]  # of the large shape, also with fewer steps a launch and without graphs
    num_decoded: int  # tokens of each row while the clock runs
    prefill: Workload
    contests: tuple[Workload, ...]  # beside transformers
    num_profiled: int  # launches
    cube: int  # size of the product of matrices that is the ceiling
    read_bytes: int  # size of what is read for the other ceiling


_LLAMA_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
_TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "vocab_size": 320,
}

SCALES = {
    "full": Scale(
        large=_LLAMA_8B,
        small={**SHAPES["1b"], "tie_word_embeddings": True},
        large_decodes=(Decode(1, 128, 0.85), Decode(32, 1024, 0.75), Decode(256, 1024, 0.65)),
        small_decodes=(Decode(1, 128, 0.70),),
        plain_decodes=(Decode(1, 128), Decode(32, 1024)),
        num_decoded=128,
        prefill=Workload(16, 1024, 1),  # and so slots that 80 GB have room for
        contests=(Workload(1, 128, 128), Workload(32, 1024, 64)),
        num_profiled=8,
        cube=8192,
        read_bytes=4 << 30,
    ),
    "tiny": Scale(
        large=_TINY,
        small={**_TINY, "tie_word_embeddings": True},
        large_decodes=(Decode(1, 8, 0.85), Decode(4, 16, 0.75)),
        small_decodes=(Decode(1, 8, 0.70),),
        plain_decodes=(Decode(1, 8),),
        num_decoded=16,
        prefill=Workload(2, 32, 1),
        contests=(Workload(2, 8, 8),),
        num_profiled=2,
        cube=64,
        read_bytes=1 << 20,
    ),
}


def hugging_face_config(fields: Mapping[str, Any], num_positions: int, dtype: str) -> LlamaConfig:
    """The config of a Llama that reads that many tokens."""
    config = LlamaConfig(**{"tie_word_embeddings": False, **fields}, max_position_embeddings=num_positions)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = dtype
    return config


def write_config(fields: Mapping[str, Any], num_positions: int, dtype: str, directory: Path) -> Path:
    """A directory with a config.json and nothing else: a model with `load_format="dummy"`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = hugging_face_config(fields, num_positions, dtype)
    (directory / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    return directory


def model_shape(fields: Mapping[str, Any], dtype: str) -> ModelShape:
    """For counting bytes and FLOPs."""
    return ModelShape.of(fields, _BYTES[dtype], _BYTES[dtype])
