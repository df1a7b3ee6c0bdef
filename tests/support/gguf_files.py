"""GGUF files that tests write with the package gguf, as llama.cpp's converter writes them from a checkpoint.

The package names the tensors. The rest of the converter is told again here: which keys it writes for an architecture,
that it reorders rows of queries and keys of some, and adds 1 to Gemma's norms.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
)
from tokenizers import Tokenizer as BackendTokenizer

from tests.support import gguf_gemmas, gguf_latents, gguf_mixtures, gguf_recurrent

Kind = GGMLQuantizationType
Array = npt.NDArray[np.float32]

_ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "smollm3": MODEL_ARCH.SMOLLM3,
    "granite": MODEL_ARCH.GRANITE,
    "phi3": MODEL_ARCH.PHI3,
    "olmo2": MODEL_ARCH.OLMO2,
    "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3,
    "qwen2_5_vl_text": MODEL_ARCH.QWEN2VL,
    "qwen3_vl_text": MODEL_ARCH.QWEN3VL,
    "ministral3": MODEL_ARCH.MISTRAL3,
}
_KNOWN = {
    **_ARCHITECTURES,
    **gguf_mixtures.ARCHITECTURES,
    **gguf_recurrent.ARCHITECTURES,
    **gguf_gemmas.ARCHITECTURES,
    **gguf_latents.ARCHITECTURES,
}
_REORDERED = (MODEL_ARCH.LLAMA, MODEL_ARCH.MISTRAL3, MODEL_ARCH.SMOLLM3, MODEL_ARCH.GRANITE, MODEL_ARCH.GRANITE_MOE)
_NO_PRODUCTS = ("ssm_a", "ssm_d", "ssm_norm", "conv1d", "shortconv.conv")  # which the converter keeps in F32
_GEMMA = (MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)


def new_writer(path: Path, architecture: str, **options: Any) -> GGUFWriter:
    """A writer that says nothing to the console."""
    return GGUFWriter(path, architecture, **options)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(
    model: Any,
    path: Path,
    kind: Kind | dict[str, Kind] = Kind.F32,
    tokenizer: Callable[[GGUFWriter], object] | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """transformers' model as a file. `tokenizer` writes one; None: names of tokens alone.

    `kind`: the type of its matrices, or types by what is in their names, of which the first counts.
    """
    config = model.config
    architecture = _KNOWN[config.model_type]
    is_recurrent = config.model_type in gguf_recurrent.ARCHITECTURES
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = new_writer(path, MODEL_ARCH_NAMES[architecture], split_max_tensors=split_max_tensors)
    _add_sizes_of(writer, config, architecture)
    if gguf_mixtures.num_experts_of(config):
        gguf_mixtures.add_experts(writer, config, architecture)
    (tokenizer or (lambda each: each.add_token_list([f"t{i}" for i in range(config.vocab_size)])))(writer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or gguf_gemmas.is_gathered(name):
            continue
        data = weight.float().numpy()
        if renamed := list(_renamed(name, data, model)):
            for own_name, part in renamed:
                stored = _kind_of(own_name, kind) if _is_matrix(own_name, part) else Kind.F32
                writer.add_tensor(own_name, _encoded(part, stored), raw_dtype=stored)
            continue
        pairs = [(name, _converted(name, data, config, architecture))] if not is_recurrent else None
        for named, part in pairs or gguf_recurrent.converted(name, data, config, architecture):
            written = names.get_name(named, try_suffixes=(".weight", ".bias"))
            assert written is not None, named
            is_product = part.ndim == 2 and not any(each in written for each in _NO_PRODUCTS)
            stored = _kind_of(name, kind) if is_product else Kind.F32
            writer.add_tensor(written, _encoded(part, stored), raw_dtype=stored)
    finish(writer)
    return path


def _add_sizes_of(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    if config.model_type in gguf_gemmas.ARCHITECTURES:
        gguf_gemmas.add_sizes(writer, config, architecture)
    elif config.model_type in gguf_recurrent.ARCHITECTURES:
        gguf_recurrent.add_sizes(writer, config, architecture)
    elif config.model_type in gguf_latents.ARCHITECTURES:
        gguf_latents.add_sizes(writer, config)
    else:
        _add_sizes(writer, config, architecture)
        _add_family(writer, config, architecture)
        for name, factors in _rope_factors(config).items():
            writer.add_tensor(name, np.array(factors, dtype=np.float32))


def _renamed(name: str, data: Array, model: Any) -> Iterator[tuple[str, Array]]:
    """Yields what files have instead of a tensor, by their own names; nothing if it is the same."""
    yield from gguf_mixtures.converted(name, data, model.config)
    yield from gguf_gemmas.converted(name, data, model)
    yield from gguf_latents.converted(name, data, model.config)


def _encoded(data: Array, kind: Kind) -> npt.NDArray[Any]:
    """In blocks of that type; zeros for the types that the package can only read.

    If all are zeros anyway, one block is made and repeated: the package takes 20 s to make 300 MB of MXFP4.
    """
    num_elements, num_bytes = GGML_QUANT_SIZES[kind]
    num_blocks = data.shape[-1] // num_elements
    try:
        if num_elements > 1 and not data.any():
            return np.tile(gguf.quantize(np.zeros(num_elements, np.float32), kind), (*data.shape[:-1], num_blocks))
        return gguf.quantize(data, kind)
    except NotImplementedError:
        return np.zeros((*data.shape[:-1], num_blocks * num_bytes), dtype=np.uint8)


def _is_matrix(name: str, part: Array) -> bool:
    """True for the matrices of experts and of a shared one, but for a router."""
    return part.ndim > 1 and name.endswith("weight") and "gate_inp" not in name


def _kind_of(name: str, kind: Kind | dict[str, Kind]) -> Kind:
    return next(each for part, each in kind.items() if part in name) if isinstance(kind, dict) else kind


def _add_sizes(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if architecture in _REORDERED:
        writer.add_vocab_size(config.vocab_size)
    if architecture not in _GEMMA:
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))


def _add_family(writer: GGUFWriter, config: Any, architecture: MODEL_ARCH) -> None:
    rope = config.rope_parameters
    if architecture is MODEL_ARCH.GEMMA3:
        rope = rope["full_attention"]
    if architecture is not MODEL_ARCH.GEMMA2:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    _add_tower(writer, rope, architecture)
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    if (window := getattr(config, "sliding_window", None)) is not None:
        writer.add_sliding_window(window)
    if architecture is MODEL_ARCH.GEMMA2:
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in (MODEL_ARCH.GRANITE, MODEL_ARCH.GRANITE_MOE):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _add_tower(writer: GGUFWriter, rope: dict[str, Any], architecture: MODEL_ARCH) -> None:
    """Writes what the text part of a model has that reads images as well."""
    if architecture in (MODEL_ARCH.QWEN2VL, MODEL_ARCH.QWEN3VL):
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if architecture is MODEL_ARCH.QWEN3VL:
        writer.add_num_deepstack_layers(1)
    if architecture is MODEL_ARCH.MISTRAL3:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _rope_factors(config: Any) -> dict[str, list[float]]:
    rope = config.rope_parameters
    if rope.get("rope_type") == "longrope":
        return {"rope_factors_long.weight": rope["long_factor"], "rope_factors_short.weight": rope["short_factor"]}
    if rope.get("rope_type") != "llama3":
        return {}
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, config.head_dim, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (index / config.head_dim)
        smooth = min(1.0, max(0.0, (original / length - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def _converted(name: str, weight: Array, config: Any, architecture: MODEL_ARCH) -> Array:
    if architecture in _GEMMA and name.endswith("norm.weight"):
        return weight + 1
    if architecture not in _REORDERED:
        return weight
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if num_heads is not None:
        halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, *weight.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight


def add_names_and(change: Callable[[GGUFWriter], object], size: int = 320) -> Callable[[GGUFWriter], None]:
    """Writes names of tokens alone, and then what else is to be in the file."""

    def add(writer: GGUFWriter) -> None:
        writer.add_token_list([f"t{i}" for i in range(size)])
        change(writer)

    return add


def add_byte_level_tokenizer(
    writer: GGUFWriter, backend: BackendTokenizer, rule: str, size: int | None = None, **flags: bool
) -> None:
    """A byte-level BPE, padded to `size`. `flags`: `add_bos_token` and others that are written as they are."""
    model = json.loads(backend.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    _add_tokens(writer, backend, size, flags)


def add_sentence_piece_tokenizer(
    writer: GGUFWriter, backend: BackendTokenizer, scores: Sequence[float], **flags: bool
) -> None:
    """As SentencePiece's BPE: no merges, but scores that say which comes first."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(scores)
    _add_tokens(writer, backend, None, flags)


def _add_tokens(writer: GGUFWriter, backend: BackendTokenizer, size: int | None, flags: dict[str, bool]) -> None:
    names = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    added = {
        index: TokenType.CONTROL if token.special else TokenType.USER_DEFINED
        for index, token in backend.get_added_tokens_decoder().items()
    }
    count = size or len(names)
    writer.add_token_list([names.get(index, f"[PAD{index}]") for index in range(count)])
    kinds = [TokenType.NORMAL if index in names else TokenType.UNUSED for index in range(count)]
    writer.add_token_types([added.get(index, kind) for index, kind in enumerate(kinds)])
    for name, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{name}", value)
