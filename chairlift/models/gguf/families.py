"""Translates a GGUF file into Hugging Face's words: its metadata into a config, its tensors into weights.

The names are llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). What its converter changes in
weights is undone: the other order of rows of queries and keys, and the 1 added to norms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.config import LAYER_TYPES, ModelConfig
from chairlift.models.families import FAMILIES
from chairlift.models.gguf.blocks import PLAIN, READABLE, Kind, format_of, read_tensor
from chairlift.models.gguf.header import GGUFFile
from chairlift.models.grouped import GroupedWeight
from chairlift.models.stored import StoredTensor, fill

_MAX_SIZE = 2**24  # limit of every size of a model
_FULL, _SLIDING = sorted(LAYER_TYPES)

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Sizes that every file has, and their names in a config."""

_HARMLESS = {"rope.scaling.finetuned", "attention.causal", "tensor_data_layout"}

_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # read with the config

# Ends of turns and of texts, which llama.cpp also recognizes where a file names only one end.
_END_TOKENS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|end_of_role|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<|eom|>", "<end_of_utterance>"),
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's spelling
}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_CONTROL = 3  # the type of a special token


class _Fields:
    """A file's metadata, and which of it was read: a number that was not read must not matter."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._prefix = f"{architecture}."
        self._left = {name: value for name, value in file.metadata.items() if name.startswith(self._prefix)}

    def size(self, name: str, default: int | None = None) -> int:
        """A size or count. CheckpointError if it is none, or missing without a default."""
        value = self.any(name, default)
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise CheckpointError(f"{self._prefix}{name} must be a number from 1 to {_MAX_SIZE}, not {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Above 0. CheckpointError as above."""
        value = self.any(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(f"{self._prefix}{name} must be a positive number, not {shown(value)}")
        return float(value)

    def has(self, name: str) -> bool:
        """Returns true if it is present, and not zero."""
        return _is_set(self._left.get(f"{self._prefix}{name}"))

    def text(self, name: str, default: str) -> str:
        value = self.any(name, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._prefix}{name} must be a text, not {shown(value)}")
        return value

    def refuse_leftover(self) -> None:
        """CheckpointError for a number that is set but was never read."""
        for name, value in self._left.items():
            if name.removeprefix(self._prefix) not in _HARMLESS and _is_set(value):
                raise CheckpointError(f"its {named(name)} ({shown(value)}) is not supported")

    def any(self, name: str, default: Any) -> Any:
        value = self._left.pop(f"{self._prefix}{name}", default)
        if value is None:
            raise CheckpointError(f"it lacks {self._prefix}{name}")
        return value


_Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Says how the files of an architecture differ."""

    family: str | Callable[[_Fields], str]
    is_interleaved: bool = False  # rows of queries and keys that rotate together are neighbours, not half a head apart
    numbers: dict[str, str] = field(default_factory=dict)  # metadata that may be there, and their names in a config
    extend: Callable[[_Config, _Fields], _Config] = lambda config, _: config


def _extend_gemma3(config: _Config, fields: _Fields) -> _Config:
    config = _extend_gemma(config, fields, period=6, large=62)
    near = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    return {**config, "rope_parameters": {_FULL: config["rope_parameters"], _SLIDING: near}}


def _extend_gemma(config: _Config, fields: _Fields, period: int, large: int) -> _Config:
    """`large`: the number of layers of models whose scores are scaled differently; llama.cpp tests it, too."""
    pattern, num_layers = fields.any("attention.sliding_window_pattern", period), config["num_hidden_layers"]
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    if not isinstance(pattern, list | np.ndarray) or len(pattern) != num_layers:
        raise CheckpointError(f"its sliding_window_pattern does not cover {num_layers} layers")
    width = config["hidden_size"] // config["num_attention_heads"]
    return {
        **config,
        "query_pre_attn_scalar": width if num_layers == large else config["head_dim"],
        "layer_types": [_SLIDING if has_window else _FULL for has_window in pattern],
    }


_WINDOW = {"attention.sliding_window": "sliding_window"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOGITS_CAP = {"final_logit_softcapping": "final_logit_softcapping"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", **_LOGITS_CAP}
_ARCHITECTURES = {
    "llama": _Architecture(
        lambda fields: f"{'Mistral' if fields.has('attention.sliding_window') else 'Llama'}ForCausalLM",
        is_interleaved=True,
        numbers=_WINDOW,
    ),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "smollm3": _Architecture("SmolLM3ForCausalLM", is_interleaved=True),
    "granite": _Architecture("GraniteForCausalLM", is_interleaved=True, numbers=_GRANITE),
    "phi3": _Architecture("Phi3ForCausalLM", numbers=_WINDOW),
    "olmo2": _Architecture("Olmo2ForCausalLM"),
    "gemma2": _Architecture(
        "Gemma2ForCausalLM", numbers={**_WINDOW, **_CAPS}, extend=partial(_extend_gemma, period=2, large=46)
    ),
    "gemma3": _Architecture("Gemma3ForCausalLM", numbers={**_WINDOW, **_LOGITS_CAP}, extend=_extend_gemma3),
}
"""By `general.architecture`."""


def describe_gguf(file: GGUFFile) -> _Config:
    """The file's metadata as a config.json would have them. CheckpointError for what is not supported or at odds."""
    name, architecture = _architecture_of(file)
    for tensor, info in file.tensors.items():
        if info.kind not in READABLE or (info.kind not in PLAIN and len(info.shape) != 2):
            readable = ", ".join(kind.name for kind in READABLE)
            raise CheckpointError(f"tensor {named(tensor)} is {info.kind.name}, and only {readable} can be read")
    fields = _Fields(file, name)
    config = {
        "architectures": [architecture.family if isinstance(architecture.family, str) else architecture.family(fields)],
        "dtype": _dtype(file),
        "vocab_size": _vocabulary_size(file, fields),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **_sizes(file, fields),
    }
    rope = config["rope_parameters"] = _rope(file, fields, config)
    if original := rope.get("original_max_position_embeddings"):
        config["original_max_position_embeddings"] = original  # without it, a class's default would replace rope's
    config |= {theirs: fields.number(ours) for ours, theirs in architecture.numbers.items() if fields.has(ours)}
    if "sliding_window" in config:
        config["sliding_window"] = int(config["sliding_window"])
    config = architecture.extend(config, fields)
    fields.refuse_leftover()
    return config


def end_tokens(file: GGUFFile) -> list[int]:
    """Token ids at which an answer ends: those that the metadata name, and special tokens known to be ends."""
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in file.metadata.items()}
    named = [given.get(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    tokens, kinds = given.get("tokens"), given.get("token_type")
    pairs = zip(tokens, kinds, strict=False) if isinstance(tokens, list) and isinstance(kinds, np.ndarray) else ()
    known = [index for index, (token, kind) in enumerate(pairs) if kind == _CONTROL and token in _END_TOKENS]
    return sorted({*known, *(token for token in named if type(token) is int)})


def sampling_of(file: GGUFFile) -> dict[str, Any]:
    """Returns how the file's makers sample, in the words of a generation_config.json."""
    given = {theirs: file.metadata.get(f"general.sampling.{ours}") for ours, theirs in _SAMPLING.items()}
    # They are stored in 32 bits: 0.6 would be 0.6000000238.
    return {name: round(value, 6) for name, value in given.items() if isinstance(value, int | float)}


def _architecture_of(file: GGUFFile) -> tuple[str, _Architecture]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise CheckpointError(f"architecture {shown(name)} is not supported, only {', '.join(sorted(_ARCHITECTURES))}")
    return name, _ARCHITECTURES[name]


def _dtype(file: GGUFFile) -> str:
    """Returns what a model computes in: the format of its matrices, or bfloat16 beside weights in groups."""
    kinds = {info.kind for info in file.tensors.values() if len(info.shape) == 2}
    if kinds - PLAIN.keys() or Kind.BF16 in kinds:
        return "bfloat16"
    return "float16" if Kind.F16 in kinds else "float32"


def _vocabulary_size(file: GGUFFile, fields: _Fields) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("it lacks tensor token_embd.weight")
    size, tokens = file.tensors["token_embd.weight"].shape[0], file.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    if {num_tokens, fields.size("vocab_size", size)} != {size}:
        raise CheckpointError(f"its embedding has {size} rows, and its metadata say otherwise: {num_tokens} tokens")
    return size


def _sizes(file: GGUFFile, fields: _Fields) -> _Config:
    sizes: _Config = {theirs: fields.size(ours) for ours, theirs in _FIELDS.items()}
    num_heads = sizes["num_attention_heads"]
    head_dim = fields.size("attention.key_length", max(1, sizes["hidden_size"] // num_heads))
    if fields.size("attention.value_length", head_dim) != head_dim:
        raise CheckpointError("its values have heads of another size than its keys, which is not supported")
    if head_dim % 2:
        raise CheckpointError(f"its heads have {head_dim} elements, which is no even number")
    num_found = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if sizes["num_hidden_layers"] != num_found:
        raise CheckpointError(f"it has {num_found} layers, and its metadata say {sizes['num_hidden_layers']}")
    return {
        **sizes,
        "num_key_value_heads": fields.size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
    }


def _rope(file: GGUFFile, fields: _Fields, config: _Config) -> _Config:
    """`rope_parameters`, with the factors in tensors."""
    head_dim, num_rotated = config["head_dim"], fields.size("rope.dimension_count", config["head_dim"])
    is_partly_rotated = FAMILIES[config["architectures"][0]].is_partly_rotated
    if num_rotated > head_dim or num_rotated % 2 or (num_rotated < head_dim and not is_partly_rotated):
        raise CheckpointError(f"rope over {num_rotated} of {head_dim} elements of a head is not supported")
    rope: _Config = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10_000.0)}
    if num_rotated < head_dim:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    kind, factor = fields.text("rope.scaling.type", "none"), fields.number("rope.scaling.factor", 1.0)
    original = fields.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    attention_factor = fields.number("rope.scaling.attn_factor", 1.0)
    factors = [_factors(file, name, num_rotated // 2) for name in _ROPE_TENSORS if name in file.tensors]
    if factors:
        # A single set of factors, as for Llama 3, is a longrope with the same factors for short and long sequences.
        if len(factors) == 1:
            original = config["max_position_embeddings"]
        rope |= {"rope_type": "longrope", "short_factor": factors[0], "long_factor": factors[-1]}
        return rope | {"original_max_position_embeddings": original, "attention_factor": attention_factor}
    if kind == "longrope" or attention_factor != 1.0:
        raise CheckpointError(f"rope scaling {shown(kind)} needs factors, and the file has none")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = original
    return rope if kind == "none" else rope | {"rope_type": kind, "factor": factor}


def _factors(file: GGUFFile, name: str, size: int) -> list[float]:
    info = file.tensors[name]
    if info.kind is not Kind.F32 or info.shape != (size,):
        raise CheckpointError(f"tensor {name} must be {size} numbers in F32")
    read = read_tensor(info)
    assert isinstance(read, torch.Tensor)
    if not bool(((read > 0) & read.isfinite()).all()):
        raise CheckpointError(f"tensor {name} must be positive numbers")
    return [float(factor) for factor in read]


class GGUFWeights:
    """A `WeightReader` over a GGUF file."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        """`config`: built from the result of `describe_gguf`."""
        self._architecture = _architecture_of(file)[1]
        self._config = config
        parts = [part for weight in config.weights() for part in weight.parts]
        self._names = {part.gguf: part.name for part in parts}
        self._rotated = {part.name: part.rotated_head_dim for part in parts if part.rotated_head_dim is not None}
        self._infos = {self._name_of(name): info for name, info in file.tensors.items() if name not in _ROPE_TENSORS}
        self.tensors = {name: StoredTensor(info.shape, format_of(info.kind)) for name, info in self._infos.items()}

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        tensor = read_tensor(self._infos[name])
        head_dim = self._rotated.get(name.rpartition(".")[0])
        if self._architecture.is_interleaved and head_dim is not None:
            split = partial(_split_halves, head_dim=head_dim)
            return tensor.map_rows(split) if isinstance(tensor, GroupedWeight) else split(tensor)
        if self._config.has_offset_norms and name.endswith("norm.weight"):
            assert isinstance(tensor, torch.Tensor), "vectors are plain"
            return tensor.float() - 1  # stored as what they multiply by
        return tensor

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        fill(name, place, self.read(name))

    def _name_of(self, name: str) -> str:
        """`blk.7.attn_q.weight` -> `model.layers.7.self_attn.q_proj.weight`; what is not known stays as it is."""
        part, _, suffix = name.rpartition(".")
        return f"{self._names[part]}.{suffix}" if part in self._names else name


def _split_halves(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """In each head first the rows that were even, then those that were odd."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _is_set(value: object) -> bool:
    return bool(value.any() if isinstance(value, np.ndarray) else value)
