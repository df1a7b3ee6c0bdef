"""Says how large the measurements are: as a GPU is used, or so small that a CPU runs them in a test."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comparison.ceiling import ModelShape, Workload
from shapes import SHAPES
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


GREEDY, TEMPERATURE, TOP_P, PENALTY = "greedy", "temperature", "top-p", "top-p, one row with a penalty"
SAMPLINGS: Mapping[str, Mapping[str, float]] = {
    GREEDY: {"temperature": 0.0},
    TEMPERATURE: {"temperature": 1.0},
    TOP_P: {"temperature": 1.0, "top_p": 0.9},
    PENALTY: {"temperature": 1.0, "top_p": 0.9},
}
"""Fields of `SamplingParams`. The last also gives the first row a `repetition_penalty`."""


@dataclass(frozen=True, slots=True)
class Decode:
    """Steady decoding of so many rows that hold so many tokens each, on average.

    `target`: the floor's share of a step's time. `spread`: the shortest row holds so many tokens less, the longest so
    many more, and the others are spread evenly between them.
    """

    num_rows: int
    context: int
    target: float | None = None
    spread: int = 0
    sampling: str = GREEDY

    @property
    def lengths(self) -> list[int]:
        """The tokens of each row."""
        last = max(1, self.num_rows - 1)
        shortest = self.context - self.spread
        return [shortest + 2 * self.spread * row // last for row in range(self.num_rows)]

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return self.context + self.spread


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests over HTTP: first as many as the server takes from so many clients, then a share of that as a Poisson
    process."""

    num_clients: int
    num_requests: int  # of each test
    prompt_tokens: str  # as `chairlift bench` reads them
    longest_prompt: int
    output_tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Scale:
    """The shapes (as fields of a Hugging Face config), and what is done with them."""

    large: Mapping[str, Any]
    small: Mapping[str, Any]
    large_decodes: tuple[Decode, ...]
    small_decodes: tuple[Decode, ...]
    plain_decodes: tuple[Decode, ...]  # of the large shape, also with fewer steps a launch and without graphs
    quick_decodes: tuple[Decode, ...]  # of the large shape, sampled rows
    sampled_decodes: tuple[Decode, ...]  # of the large shape, with other sampling beside greedy rows
    uneven_decodes: tuple[Decode, ...]  # of the large shape: rows of one length, and as many tokens in rows of many
    grouped_decodes: tuple[Decode, ...]  # of the large shape, its weights in groups of 4 bits
    float8_decodes: tuple[Decode, ...]  # of the large shape and of the mixture, their weights in float8
    recurrent: Mapping[str, Any]
    recurrent_decodes: tuple[Decode, ...]
    mixture: Mapping[str, Any]
    mixture_decodes: tuple[Decode, ...]
    prompt_lengths: tuple[int, ...]  # of single prompts, whose first token is waited for
    busy: Decode  # rows beside which a prompt arrives
    traffic: Traffic
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
_QWEN3_5_0_8B = {**SHAPES["qwen3.5-0.8b"], "vocab_size": 248320, "tie_word_embeddings": True}
_MIXTURE_7B = {  # as large as OLMoE, of which a token takes 1.3 B
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "vocab_size": 50304,
}
_TINY_MIXTURE = {
    **_TINY,
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_TINY_RECURRENT = {
    **_TINY,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "tie_word_embeddings": True,
}

SCALES = {
    "full": Scale(
        large=_LLAMA_8B,
        small={**SHAPES["1b"], "tie_word_embeddings": True},
        large_decodes=(Decode(1, 128, 0.85), Decode(32, 1024, 0.78), Decode(256, 1024, 0.69)),
        small_decodes=(Decode(1, 128, 0.70), Decode(1, 128, sampling=TOP_P), Decode(32, 1024)),
        plain_decodes=(Decode(1, 128), Decode(32, 1024)),
        quick_decodes=tuple(Decode(rows, 128, sampling=each) for rows in (1, 256) for each in (GREEDY, TOP_P)),
        sampled_decodes=tuple(Decode(rows, 128, sampling=each) for rows in (1, 32, 256) for each in SAMPLINGS),
        uneven_decodes=(Decode(32, 1056), Decode(32, 1056, spread=992)),
        grouped_decodes=(Decode(1, 128), Decode(16, 128)),
        float8_decodes=(Decode(1, 128), Decode(32, 128)),
        recurrent=_QWEN3_5_0_8B,
        recurrent_decodes=(Decode(1, 128), Decode(32, 128)),
        mixture=_MIXTURE_7B,
        mixture_decodes=(Decode(1, 128), Decode(32, 128)),
        prompt_lengths=(16, 128, 1024),
        busy=Decode(32, 256),
        traffic=Traffic(256, 512, "uniform:64,512", 512, 128, 0.7),
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
        quick_decodes=(Decode(2, 8, sampling=TOP_P),),
        sampled_decodes=tuple(Decode(2, 8, sampling=each) for each in SAMPLINGS),
        uneven_decodes=(Decode(3, 12), Decode(3, 12, spread=8)),
        grouped_decodes=(Decode(1, 8),),
        float8_decodes=(Decode(1, 8), Decode(2, 8)),
        recurrent=_TINY_RECURRENT,
        recurrent_decodes=(Decode(1, 8), Decode(2, 8)),
        mixture=_TINY_MIXTURE,
        mixture_decodes=(Decode(1, 8), Decode(2, 8)),
        prompt_lengths=(4, 16),
        busy=Decode(2, 8),
        traffic=Traffic(3, 6, "uniform:4,16", 16, 8, 0.7),
        num_decoded=16,
        prefill=Workload(2, 32, 1),
        contests=(Workload(2, 8, 8),),
        num_profiled=2,
        cube=64,
        read_bytes=1 << 20,
    ),
}


def hugging_face_config(fields: Mapping[str, Any], num_positions: int, dtype: str) -> PreTrainedConfig:
    """The config of a model that reads that many tokens: a Llama unless `model_type` says otherwise."""
    given = {"model_type": "llama", "tie_word_embeddings": False, **fields}
    config: PreTrainedConfig = AutoConfig.for_model(**given, max_position_embeddings=num_positions)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[given["model_type"]]]
    config.dtype = dtype
    return config


def write_config(fields: Mapping[str, Any], num_positions: int, dtype: str, directory: Path, **more: Any) -> Path:
    """A directory with a config.json and nothing else: a model with `load_format="dummy"`. `more`: further fields."""
    directory.mkdir(parents=True, exist_ok=True)
    config = hugging_face_config(fields, num_positions, dtype).to_dict() | more
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def model_shape(fields: Mapping[str, Any], dtype: str) -> ModelShape:
    """For counting bytes and FLOPs."""
    return ModelShape.of(fields, _BYTES[dtype], _BYTES[dtype])
