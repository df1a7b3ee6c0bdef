"""Says how the files of each architecture differ, by llama.cpp's names, in a table."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from chairlift.errors import CheckpointError
from chairlift.models.config import LAYER_TYPES
from chairlift.models.gguf.fields import Config, Fields
from chairlift.models.gguf.mixtures import (
    extend_glm4_moe,
    extend_gpt_oss,
    extend_granite_moe,
    extend_granite_moe_hybrid,
    extend_lfm2_moe,
    extend_llama,
    extend_olmoe,
    extend_qwen2_moe,
    extend_qwen3_moe,
    extend_qwen35_moe,
)
from chairlift.models.gguf.recurrent import (
    extend_falcon_h1,
    extend_lfm2,
    extend_nemotron_h,
    extend_qwen35,
)

_FULL, _SLIDING = sorted(LAYER_TYPES)
_EPSILON = "attention.layer_norm_rms_epsilon"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Says how the files of an architecture differ."""

    family: str | Callable[[Fields], str]
    is_interleaved: bool = False  # rows of queries and keys that rotate together are neighbours, not half a head apart
    epsilons: tuple[str, ...] = (_EPSILON,)  # of norms: one of them at least, and the first counts
    numbers: dict[str, str] = field(default_factory=dict)  # metadata that may be there, and their names in a config
    extend: Callable[[Config, Fields], Config] = lambda config, _: config
    spellings: dict[str, str] = field(default_factory=dict)  # last parts of tensors' names: usual, and its own


def _family_of_llama(fields: Fields) -> str:
    if fields.has("expert_count"):
        return "MixtralForCausalLM"
    return "MistralForCausalLM" if fields.has("attention.sliding_window") else "LlamaForCausalLM"


def _extend_gemma3(config: Config, fields: Fields) -> Config:
    config = _extend_gemma(config, fields, period=6, large=62)
    near = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10_000.0)}
    return {**config, "rope_parameters": {_FULL: config["rope_parameters"], _SLIDING: near}}


def _extend_gemma(config: Config, fields: Fields, period: int, large: int) -> Config:
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
ARCHITECTURES = {
    "llama": Architecture(_family_of_llama, is_interleaved=True, numbers=_WINDOW, extend=extend_llama),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", is_interleaved=True),
    "granite": Architecture("GraniteForCausalLM", is_interleaved=True, numbers=_GRANITE),
    "phi3": Architecture("Phi3ForCausalLM", numbers=_WINDOW),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM", numbers={**_WINDOW, **_CAPS}, extend=partial(_extend_gemma, period=2, large=46)
    ),
    "qwen35": Architecture("Qwen3_5ForCausalLM", extend=extend_qwen35, spellings={"ffn_norm": "post_attention_norm"}),
    "lfm2": Architecture("Lfm2ForCausalLM", extend=extend_lfm2, spellings={"output_norm": "token_embd_norm"}),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        epsilons=(_EPSILON, "attention.layer_norm_epsilon"),
        extend=extend_nemotron_h,
        spellings={"ffn_norm": "attn_norm"},
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM", is_interleaved=True, numbers=_GRANITE, extend=extend_granite_moe_hybrid
    ),
    "falcon-h1": Architecture("FalconH1ForCausalLM", extend=extend_falcon_h1),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", extend=extend_qwen2_moe),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", extend=extend_qwen3_moe),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM", extend=extend_qwen35_moe, spellings={"ffn_norm": "post_attention_norm"}
    ),
    "olmoe": Architecture("OlmoeForCausalLM", extend=extend_olmoe),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", is_interleaved=True, numbers=_GRANITE, extend=extend_granite_moe
    ),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", extend=extend_lfm2_moe, spellings={"output_norm": "token_embd_norm"}),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", numbers=_WINDOW, extend=extend_gpt_oss, spellings={"ffn_norm": "post_attention_norm"}
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM", extend=extend_glm4_moe, spellings={"ffn_norm": "post_attention_norm"}
    ),
    "gemma3": Architecture("Gemma3ForCausalLM", numbers={**_WINDOW, **_LOGITS_CAP}, extend=_extend_gemma3),
}
"""By `general.architecture`."""
