"""Translates a GGUF file into Hugging Face's words: its metadata into a config, its tensors into weights.

The names are llama.cpp's (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). What its converter changes in
weights is undone: the other order of rows of queries and keys, and the 1 added to norms.
"""

import logging
import re
from functools import partial
from typing import Any

import numpy as np
import torch

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.blocks import Part
from chairlift.models.config import ModelConfig
from chairlift.models.families import FAMILIES
from chairlift.models.gguf.architectures import ARCHITECTURES, Architecture
from chairlift.models.gguf.blocks import PLAIN, READABLE, Unpacker, format_of, read_tensor
from chairlift.models.gguf.fields import Config, Fields
from chairlift.models.gguf.header import GGUFFile, TensorInfo
from chairlift.models.gguf.kinds import Kind
from chairlift.models.gguf.labels import LABELS_FIELD, LABELS_HEAD, label_tokens
from chairlift.models.gguf.stacked import is_stack, unstack
from chairlift.models.grouped import GroupedWeight
from chairlift.models.rearranged import split_halves
from chairlift.models.stored import StoredTensor, fill

logger = logging.getLogger(__name__)

_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}
"""Sizes that every file has, and their names in a config."""

_BY_LAYER = ("key_value_heads_by_layer", "inner_features_by_layer")  # no fields of a config, but a help to find some

_OF_A_LAYER = re.compile(r"blk\.([0-9]{1,6})\.")
_NORM_OF_RECURRENCE = "linear_attn.norm.weight"  # which multiplies by its weight where others add 1
_KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")  # read with the config

# Ends of turns and of texts, which llama.cpp also recognizes where a file names only one end.
_END_TOKENS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("<|end_of_role|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<|eom|>", "<end_of_utterance>"),
    *("<|return|>", "<|call|>"),
    *("<turn|>", "<|tool_response>"),  # of Gemma 4, which waits for responses after its calls
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek's spelling
}
_HARMONY = {"<|return|>", "<|call|>", "<|end|>"}  # where these three are, the last ends a message within an answer
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_MATRICES = (2, 3)  # dimensions of one, and of several in a stack
_FOUND_WHOLE = (3, 4)  # types of tokens that are found whole in a text: special ones, and those that users see as well


def describe_gguf(file: GGUFFile) -> Config:
    """The file's metadata as a config.json would have them. CheckpointError for what is not supported or at odds."""
    name, architecture = _architecture_of(file)
    for tensor, info in file.tensors.items():
        if info.kind not in READABLE or (info.kind not in PLAIN and len(info.shape) != 2 + is_stack(tensor)):
            readable = ", ".join(kind.name for kind in READABLE)
            raise CheckpointError(f"tensor {named(tensor)} is {info.kind.name}, and only {readable} can be read")
    fields = Fields(file, name)
    config = {
        "architectures": [architecture.family if isinstance(architecture.family, str) else architecture.family(fields)],
        "dtype": _dtype(file),
        "vocab_size": _vocabulary_size(file, fields),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": fields.has_tensor("attn_q.bias"),
        "mlp_bias": fields.has_tensor("ffn_up.bias"),
        **_sizes(file, fields, architecture),
    }
    rope = config["rope_parameters"] = _rope(file, fields, config)
    if original := rope.get("original_max_position_embeddings"):
        config["original_max_position_embeddings"] = original  # without it, a class's default would replace rope's
    config |= {theirs: fields.number(ours) for ours, theirs in architecture.numbers.items() if fields.has(ours)}
    if "sliding_window" in config:
        config["sliding_window"] = int(config["sliding_window"])
    config = architecture.extend(config, fields)
    for name in _BY_LAYER:
        del config[name]
    if label_tokens(file) is not None:
        fields.any(LABELS_FIELD, None)
    fields.refuse_leftover()
    return config


def end_tokens(file: GGUFFile) -> list[int]:
    """Token ids at which an answer ends: those that the metadata name, and special tokens known to be ends."""
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in file.metadata.items()}
    named = [given.get(name) for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    tokens, kinds = given.get("tokens"), given.get("token_type")
    numbers = kinds.tolist() if isinstance(kinds, np.ndarray) else []
    pairs = zip(tokens if isinstance(tokens, list) else [], numbers, strict=False)
    whole = {token: index for index, (token, kind) in enumerate(pairs) if kind in _FOUND_WHOLE}
    special = {token: index for token, index in whole.items() if token in _END_TOKENS}
    if special.keys() >= _HARMONY:
        del special["<|end|>"]
    known = special.values()
    return sorted({*known, *(token for token in named if type(token) is int)})


def sampling_of(file: GGUFFile) -> dict[str, Any]:
    """Returns how the file's makers sample, in the words of a generation_config.json."""
    given = {theirs: file.metadata.get(f"general.sampling.{ours}") for ours, theirs in _SAMPLING.items()}
    # They are stored in 32 bits: 0.6 would be 0.6000000238.
    return {name: round(value, 6) for name, value in given.items() if isinstance(value, int | float)}


def _architecture_of(file: GGUFFile) -> tuple[str, Architecture]:
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(f"architecture {shown(name)} is not supported, only {', '.join(sorted(ARCHITECTURES))}")
    return name, ARCHITECTURES[name]


def _dtype(file: GGUFFile) -> str:
    """Returns what a model computes in: the format of its matrices, or bfloat16 beside weights in groups."""
    kinds = {info.kind for info in file.tensors.values() if len(info.shape) in _MATRICES}
    if kinds - PLAIN.keys() or Kind.BF16 in kinds:
        return "bfloat16"
    return "float16" if Kind.F16 in kinds else "float32"


def _vocabulary_size(file: GGUFFile, fields: Fields) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("it lacks tensor token_embd.weight")
    size, tokens = file.tensors["token_embd.weight"].shape[0], file.metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    if {num_tokens, fields.size("vocab_size", size)} != {size}:
        raise CheckpointError(f"its embedding has {size} rows, and its metadata say otherwise: {num_tokens} tokens")
    return size


def _sizes(file: GGUFFile, fields: Fields, architecture: Architecture) -> Config:
    sizes: Config = {theirs: fields.size(ours) for ours, theirs in _FIELDS.items()}
    num_heads = sizes["num_attention_heads"]
    if architecture.has_latents:
        head_dim = fields.size("rope.dimension_count")
    else:
        head_dim = fields.size("attention.key_length", max(1, sizes["hidden_size"] // num_heads))
        if fields.size("attention.value_length", head_dim) != head_dim:
            raise CheckpointError("its values have heads of another size than its keys, which is not supported")
    if head_dim % 2:
        raise CheckpointError(f"its heads have {head_dim} elements, which is no even number")
    num_layers = sizes["num_hidden_layers"]
    num_found = len({name.split(".")[1] for name in file.tensors if name.startswith("blk.")})
    if num_layers != num_found:
        raise CheckpointError(f"it has {num_found} layers, and its metadata say {num_layers}")
    num_guessing = fields.any("nextn_predict_layers", 0)
    if type(num_guessing) is not int or not 0 <= num_guessing < num_layers:
        raise CheckpointError(f"of its {num_layers} layers {shown(num_guessing)} cannot guess further tokens")
    sizes["num_hidden_layers"] -= num_guessing
    epsilons, may_differ = architecture.epsilons, architecture.has_unlike_layers
    given = [fields.number(name) for name in epsilons if fields.has(name)]
    kv_heads = fields.counts("attention.head_count_kv", num_layers, num_heads, may_differ=may_differ)
    inner = fields.counts("feed_forward_length", num_layers, may_differ=may_differ)
    return {
        **sizes,
        "intermediate_size": max(inner),
        "num_key_value_heads": max(kv_heads),
        "key_value_heads_by_layer": kv_heads,
        "inner_features_by_layer": inner,
        "head_dim": head_dim,
        "rms_norm_eps": (given or [fields.number(epsilons[0])])[0],
    }


def _rope(file: GGUFFile, fields: Fields, config: Config) -> Config:
    """`rope_parameters`, with the factors in tensors."""
    head_dim, num_rotated = config["head_dim"], fields.size("rope.dimension_count", config["head_dim"])
    is_partly_rotated = FAMILIES[config["architectures"][0]].is_partly_rotated
    if num_rotated > head_dim or num_rotated % 2 or (num_rotated < head_dim and not is_partly_rotated):
        raise CheckpointError(f"rope over {num_rotated} of {head_dim} elements of a head is not supported")
    rope: Config = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10_000.0)}
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

    def __init__(self, file: GGUFFile, config: ModelConfig, unpacker: Unpacker | None = None) -> None:
        """`config`: built from the result of `describe_gguf`. `unpacker`: see `read_tensor`."""
        self._unpacker = unpacker
        self._architecture = _architecture_of(file)[1]
        self._config = config
        weights = config.weights()
        parts = [part for weight in weights for part in weight.parts]
        self._parameters = {part.name for weight in weights if weight.is_parameter for part in weight.parts}
        self._names = {self._spell(part.gguf): part.name for part in parts}
        self._parts = {part.name: part for part in parts}
        self._unread = tuple(
            f"blk.{index}.{part}."
            for index, block in config.attention_blocks.items()
            for part in (_KEYS_AND_VALUES if block.source is not None else ())
        )
        tensors = unstack({name: info for name, info in file.tensors.items() if not self._is_skipped(name)})
        self._infos = {self._name_of(name): info for name, info in tensors.items()}
        self.tensors = {name: self._stored(name, info) for name, info in self._infos.items()}
        if num_skipped := sum(self._is_skipped(name) and name not in _ROPE_TENSORS for name in file.tensors):
            logger.info("%d tensors are left out, since no text depends on them", num_skipped)

    def read(self, name: str) -> torch.Tensor | GroupedWeight:
        tensor, part = read_tensor(self._infos[name], self._unpacker), self._part_of(name)
        if part is not None and part.from_gguf is not None:
            return part.from_gguf(tensor.dequantize() if isinstance(tensor, GroupedWeight) else tensor)
        if part is not None and part.rotated_head_dim is not None and self._architecture.is_interleaved:
            split = partial(split_halves, head_dim=part.rotated_head_dim, num_still=part.num_still)
            return tensor.map_rows(split) if isinstance(tensor, GroupedWeight) else split(tensor)
        if self._config.has_offset_norms and name.endswith("norm.weight") and not name.endswith(_NORM_OF_RECURRENCE):
            assert isinstance(tensor, torch.Tensor), "vectors are plain"
            return tensor.float() - 1  # stored as what they multiply by
        return tensor

    def read_into(self, name: str, place: torch.Tensor) -> None:
        """See `WeightReader`."""
        fill(name, place, self.read(name))

    def _stored(self, name: str, info: TensorInfo) -> StoredTensor:
        """Describes what `read` returns."""
        part = self._part_of(name)
        if part is None or part.from_gguf is None:
            return StoredTensor(info.shape, format_of(info.kind))
        return StoredTensor(tuple(part.from_gguf(torch.empty(info.shape, device="meta")).shape))

    def _part_of(self, name: str) -> Part | None:
        return self._parts.get(name) or self._parts.get(name.rpartition(".")[0])

    def _name_of(self, name: str) -> str:
        """`blk.7.attn_q.weight` -> `model.layers.7.self_attn.q_proj.weight`; what is not known stays as it is."""
        if (whole := self._names.get(name)) is not None:  # a parameter, or a norm of a Falcon-H1, which lacks a suffix
            return whole if whole in self._parameters else f"{whole}.weight"
        part, _, suffix = name.rpartition(".")
        return f"{self._names[part]}.{suffix}" if part in self._names else name

    def _spell(self, name: str) -> str:
        """`blk.7.ffn_norm` or `output_norm`, as files of this architecture have it."""
        prefix, dot, last = name.rpartition(".")
        return f"{prefix}{dot}{self._architecture.spellings.get(last, last)}"

    def _is_skipped(self, name: str) -> bool:
        layer = _OF_A_LAYER.match(name)
        is_guessing = layer is not None and int(layer[1]) >= self._config.num_layers
        return name in (*_ROPE_TENSORS, LABELS_HEAD) or is_guessing or name.startswith(self._unread)
