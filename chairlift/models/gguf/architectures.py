"""Says how the files of each architecture differ, by llama.cpp's names, in a table."""

from collections.abc import Callable
from dataclasses import dataclass, field

from chairlift.models.gguf.fields import Config, Fields
from chairlift.models.gguf.gemmas import extend_gemma2, extend_gemma3, extend_gemma3n, extend_gemma4
from chairlift.models.gguf.mixtures import (
    SIGMOID,
    extend_deepseek2,
    extend_ernie4_5_moe,
    extend_glm4_moe,
    extend_gpt_oss,
    extend_granite_moe,
    extend_granite_moe_hybrid,
    extend_lfm2_moe,
    extend_llama,
    extend_olmoe,
    extend_qwen2_moe,
    extend_qwen3_moe,
    extend_qwen3_next_moe,
    extend_qwen35_moe,
)
from chairlift.models.gguf.recurrent import (
    extend_falcon_h1,
    extend_lfm2,
    extend_nemotron_h,
    extend_qwen35,
)

_EPSILON = "attention.layer_norm_rms_epsilon"
_GROWTH = "attention.temperature_scale"

Extend = Callable[[Config, Fields], Config]
"""Adds what an architecture has beside the fields of all."""


def _as_it_is(config: Config, fields: Fields) -> Config:  # noqa: ARG001
    return config


@dataclass(frozen=True, slots=True)
class Architecture:
    """Says how the files of an architecture differ."""

    family: str | Callable[[Fields], str]
    is_interleaved: bool = False  # rows of queries and keys that rotate together are neighbours, not half a head apart
    epsilons: tuple[str, ...] = (_EPSILON,)  # of norms: one of them at least, and the first counts
    numbers: dict[str, str] = field(default_factory=dict)  # metadata that may be there, and their names in a config
    has_unlike_layers: bool = False  # counts by layer may be any
    has_latents: bool = False  # keys and values are made of latent vectors, and the elements that rotate are a head
    extend: Extend = _as_it_is
    spellings: dict[str, str] = field(default_factory=dict)  # last parts of tensors' names: usual, and its own


def _family_of_llama(fields: Fields) -> str:
    if fields.has("expert_count"):
        return "MixtralForCausalLM"
    return "MistralForCausalLM" if fields.has("attention.sliding_window") else "LlamaForCausalLM"


def _family_of_mistral3(fields: Fields) -> str:
    return "Ministral3ForCausalLM" if fields.has(_GROWTH) else "MistralForCausalLM"


def _family_of_deepseek2(fields: Fields) -> str:
    """DeepSeek-V2's router scores experts together, V3's and GLM-4.7-Flash's each by itself; a Youtu has no experts."""
    if not fields.has("expert_count"):
        return "YoutuForCausalLM"
    return f"DeepseekV{3 if fields.peek('expert_gating_func') == SIGMOID else 2}ForCausalLM"


def _extend_mistral3(config: Config, fields: Fields) -> Config:
    """Adds to the rope how queries grow, and what else its yarn has: a file leaves out an mscale of 1."""
    names = {
        _GROWTH: "llama_4_scaling_beta",
        "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    read = {theirs: fields.number(ours) for ours, theirs in names.items() if fields.has(ours)}
    if "mscale_all_dim" in read:
        read["mscale"] = 1.0
    return {**config, "rope_parameters": {**config["rope_parameters"], **read}}


def _without_images(extend: Extend) -> Extend:
    """Leaves out what a file says of images only, which for text changes nothing."""

    def extend_text(config: Config, fields: Fields) -> Config:
        for name in ("rope.dimension_sections", "n_deepstack_layers"):
            fields.any(name, 0)
        return extend(config, fields)

    return extend_text


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
    "qwen2vl": Architecture("Qwen2ForCausalLM", extend=_without_images(_as_it_is)),
    "qwen3vl": Architecture("Qwen3ForCausalLM", extend=_without_images(_as_it_is)),
    "qwen3vlmoe": Architecture("Qwen3MoeForCausalLM", extend=_without_images(extend_qwen3_moe)),
    "mistral3": Architecture(_family_of_mistral3, is_interleaved=True, numbers=_WINDOW, extend=_extend_mistral3),
    "smollm3": Architecture("SmolLM3ForCausalLM", is_interleaved=True),
    "granite": Architecture("GraniteForCausalLM", is_interleaved=True, numbers=_GRANITE),
    "phi3": Architecture("Phi3ForCausalLM", numbers=_WINDOW),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "gemma2": Architecture("Gemma2ForCausalLM", numbers={**_WINDOW, **_CAPS}, extend=extend_gemma2),
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
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM", extend=extend_qwen3_next_moe, spellings={"ffn_norm": "post_attention_norm"}
    ),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", extend=extend_ernie4_5_moe),  # rows as in safetensors
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
    "deepseek2": Architecture(_family_of_deepseek2, extend=extend_deepseek2, has_latents=True),  # as in safetensors
    "gemma3": Architecture("Gemma3ForCausalLM", numbers={**_WINDOW, **_LOGITS_CAP}, extend=extend_gemma3),
    "gemma3n": Architecture(
        "Gemma3nForCausalLM", numbers={**_WINDOW, **_LOGITS_CAP}, extend=extend_gemma3n, has_unlike_layers=True
    ),
    "gemma4": Architecture(
        "Gemma4ForCausalLM", numbers={**_WINDOW, **_LOGITS_CAP}, extend=extend_gemma4, has_unlike_layers=True
    ),
}
"""By `general.architecture`."""
