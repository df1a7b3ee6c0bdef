"""Says how the architectures with mixtures of experts differ from a plain decoder, in a table."""

from dataclasses import replace
from operator import attrgetter

from chairlift.models.blocks import Activation, AlternatingExperts, QKNorm, StackedExperts, TensorNames
from chairlift.models.family import ATTENTION_BIAS, MULTIPLIERS, Family
from chairlift.models.latents import (
    read_deepseek_v2_layers,
    read_deepseek_v3_layers,
    read_glm4_moe_lite_layers,
    read_youtu_layers,
)
from chairlift.models.mixers import read_gated_delta_net, read_gated_short_conv
from chairlift.models.mixtures import (
    read_ernie4_5_moe,
    read_glm4_moe,
    read_gpt_oss,
    read_granite_moe,
    read_lfm2_moe,
    read_mixtral,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_5_moe,
    read_qwen3_moe,
)
from chairlift.models.towers import NOT_TEXT, without_sections

_ROUTER = (("experts.router", "mlp.gate"), ("experts.", "mlp.experts."))
_SHARED = (("shared_mlp.output_gate", "mlp.shared_expert_gate"), ("shared_mlp.", "mlp.shared_expert."))
_OF_MIXTRAL = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
_STACKED = StackedExperts("mlp.experts.", "gate_up_proj", "down_proj")
_OF_DEEPSEEK = TensorNames(
    (
        ("experts.choice_bias", "mlp.gate.e_score_correction_bias"),
        *_ROUTER,
        ("shared_mlp.", "mlp.shared_experts."),
    )
)
_LATENT = replace(_OF_DEEPSEEK, rotates_neighbours=True)
GRANITE_SPELLINGS = (("experts.router", "block_sparse_moe.router.layer"), ("experts.", "block_sparse_moe."))
GRANITE_STACKED = StackedExperts("block_sparse_moe.", "input_linear.weight", "output_linear.weight")

MIXTURE_FAMILIES = {
    "MixtralForCausalLM": Family(
        "MixtralConfig",
        has_windows=True,
        mixtures=read_mixtral,
        names=TensorNames(
            (("experts.router", "block_sparse_moe.gate"), ("experts.", "block_sparse_moe.experts.")), _OF_MIXTRAL
        ),
    ),
    "OlmoeForCausalLM": Family(
        "OlmoeConfig",
        {**ATTENTION_BIAS, "qk_norm": QKNorm.ALL_HEADS},
        mixtures=read_olmoe,
        names=TensorNames(_ROUTER),
    ),
    "Qwen2MoeForCausalLM": Family(
        "Qwen2MoeConfig",
        {"has_qkv_bias": attrgetter("qkv_bias")},
        has_windows=True,
        mixtures=read_qwen2_moe,
        names=TensorNames((*_ROUTER, *_SHARED)),
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3MoeConfig",
        {**ATTENTION_BIAS, "qk_norm": QKNorm.HEAD},
        has_windows=True,
        mixtures=read_qwen3_moe,
        names=TensorNames(_ROUTER, stacked=_STACKED),  # they are stacked where the model reads images as well
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "Qwen3_5MoeTextConfig",
        {**ATTENTION_BIAS, "qk_norm": QKNorm.HEAD, "has_output_gate": True},
        {"intermediate_size": attrgetter("moe_intermediate_size")},  # it has no dense layers
        {"has_offset_norms": True},
        is_partly_rotated=True,
        ropes=lambda config: [without_sections(config.rope_parameters)] * config.num_hidden_layers,
        mixers={"linear_attention": read_gated_delta_net},
        mixtures=read_qwen3_5_moe,
        names=TensorNames((*_ROUTER, *_SHARED), stacked=_STACKED, skipped=NOT_TEXT),
    ),
    "Qwen3NextForCausalLM": Family(
        "Qwen3NextConfig",
        {**ATTENTION_BIAS, "qk_norm": QKNorm.HEAD, "has_output_gate": True},
        model={"has_offset_norms": True},
        is_partly_rotated=True,
        mixers={"linear_attention": read_gated_delta_net},
        mixtures=read_qwen2_moe,
        names=TensorNames((*_ROUTER, *_SHARED), stacked=_STACKED, skipped=NOT_TEXT),
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "Ernie4_5_MoeConfig",
        {"has_qkv_bias": attrgetter("use_bias"), "has_output_bias": attrgetter("use_bias")},
        {"has_bias": attrgetter("use_bias")},
        mixtures=read_ernie4_5_moe,
        names=TensorNames(
            (
                ("experts.choice_bias", "mlp.moe_statics.e_score_correction_bias"),
                *_ROUTER,
                ("shared_mlp.", "mlp.shared_experts."),
            ),
            rotates_neighbours=True,
            skipped=("model.mtp_",),
        ),
    ),
    "GptOssForCausalLM": Family(
        "GptOssConfig",
        {**ATTENTION_BIAS, "has_sinks": True},
        {"activation": Activation.SILU},  # it has no dense layers
        has_windows=True,
        mixtures=read_gpt_oss,
        names=TensorNames(
            (("experts.router", "mlp.router"), ("experts.", "mlp.experts.")), stacked=AlternatingExperts("mlp.experts.")
        ),
    ),
    "GraniteMoeForCausalLM": Family(
        "GraniteMoeConfig",
        {**ATTENTION_BIAS, "scale": attrgetter("attention_multiplier")},
        model=MULTIPLIERS,
        mixtures=read_granite_moe,
        names=TensorNames(GRANITE_SPELLINGS, stacked=GRANITE_STACKED),
    ),
    "Lfm2MoeForCausalLM": Family(
        "Lfm2MoeConfig",
        {"qk_norm": QKNorm.HEAD},
        {"activation": Activation.SILU},
        {"rms_norm_eps": attrgetter("norm_eps")},
        mixers={"conv": read_gated_short_conv},
        mixtures=read_lfm2_moe,
        names=TensorNames(
            (
                ("norm", "embedding_norm"),
                ("input_layernorm", "operator_norm"),
                ("post_attention_layernorm", "ffn_norm"),
                ("self_attn.o_proj", "self_attn.out_proj"),
                ("self_attn.q_norm", "self_attn.q_layernorm"),
                ("self_attn.k_norm", "self_attn.k_layernorm"),
                ("mlp.", "feed_forward."),
                ("experts.router", "feed_forward.gate"),
                ("experts.choice_bias", "feed_forward.expert_bias"),
                ("experts.", "feed_forward.experts."),
            ),
            _OF_MIXTRAL,
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        "Glm4MoeConfig",
        {
            "has_qkv_bias": attrgetter("attention_bias"),
            "qk_norm": lambda config: QKNorm.HEAD if config.use_qk_norm else QKNorm.NONE,
        },
        is_partly_rotated=True,
        mixtures=read_glm4_moe,
        names=_OF_DEEPSEEK,
    ),
    "DeepseekV2ForCausalLM": Family("DeepseekV2Config", layers=read_deepseek_v2_layers, names=_LATENT),
    "DeepseekV3ForCausalLM": Family("DeepseekV3Config", layers=read_deepseek_v3_layers, names=_LATENT),
    "Glm4MoeLiteForCausalLM": Family("Glm4MoeLiteConfig", layers=read_glm4_moe_lite_layers, names=_LATENT),
    "YoutuForCausalLM": Family("YoutuConfig", layers=read_youtu_layers, names=_LATENT),  # without experts
    "Dots1ForCausalLM": Family(
        "Dots1Config",
        {**ATTENTION_BIAS, "qk_norm": QKNorm.HEAD},
        has_windows=True,
        mixtures=read_glm4_moe,
        names=_OF_DEEPSEEK,
    ),
}
"""By architecture, as `config.json` names it."""
