"""Finds the text model in the config of a model that reads images or hears as well.

Its text part is a decoder of a family. Of text alone, a token's places in an image (mRoPE) are all its position, so
that rope is the plain one.
"""

from dataclasses import dataclass
from typing import Any

from chairlift.errors import CheckpointError, shown

TOWERS = {  # by architecture: transformers' class of the config
    "Gemma3ForConditionalGeneration": "Gemma3Config",
    "Gemma3nForConditionalGeneration": "Gemma3nConfig",
    "Gemma4ForConditionalGeneration": "Gemma4Config",
    "Gemma4UnifiedForConditionalGeneration": "Gemma4UnifiedConfig",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2_5_VLConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3VLMoeConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5Config",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeConfig",
}
_TEXT_MODELS = {  # by model type of the text part: the architecture of the same decoder by itself
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    "qwen3_vl_moe_text": "Qwen3MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
_WRITTEN_IN_CODE = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}
"""By model type of the text part: what the same decoder has as a field of its config."""

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
NOT_TEXT = tuple(
    f"{prefix}{part}"
    for prefix in ("", "model.")
    for part in (
        *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "audio_tower."),
        *("vision_embedder.", "embed_vision.", "embed_audio.", "mtp."),
    )
)
"""Beginnings of the tensors that text does without: what reads images and sound, and layers that guess."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """The text part of a config: the architecture of its decoder, and that decoder's own config."""

    architecture: str
    raw: dict[str, Any]


def find_text_model(architecture: str, raw: dict[str, Any]) -> TextModel:
    """From the config.json of an architecture in `TOWERS`. CheckpointError if its text part is of another kind."""
    import transformers  # slow

    config: Any = getattr(transformers, TOWERS[architecture]).from_dict(raw)
    text = config.get_text_config()
    if text.model_type not in _TEXT_MODELS:
        raise CheckpointError(
            f"a text model of type {shown(text.model_type)} is not supported, only {', '.join(sorted(_TEXT_MODELS))}"
        )
    described: dict[str, Any] = text.to_dict() | {"tie_word_embeddings": config.tie_word_embeddings}
    described |= _WRITTEN_IN_CODE.get(text.model_type, {})
    described["rope_parameters"] = without_sections(described["rope_parameters"])
    described["dtype"] = getattr(text, "dtype", None) or getattr(config, "dtype", None)
    return TextModel(_TEXT_MODELS[text.model_type], described)


def without_sections(rope: dict[str, Any]) -> dict[str, Any]:
    """Leaves out how the pairs of a head are divided among the places of a token in an image."""
    return {name: value for name, value in rope.items() if name not in _OF_IMAGES}
