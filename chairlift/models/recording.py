"""Describes a decoder in transformers' code: runs it once without weights, and records what it asks of attention.

What the cache or a backend does not support is refused here, in a sentence that says what it is.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from chairlift.errors import CheckpointError, named
from chairlift.models.adapter import ATTENTION, AdaptedDecoder
from chairlift.models.blocks import AttentionBlock
from chairlift.models.claims import has_own_head
from chairlift.models.config import LAYER_TYPES, AdaptedConfig
from chairlift.models.fields import read_dtype, read_window, refuse_unreadable
from chairlift.models.rope import check_rope_numbers
from chairlift.models.stored import SafetensorsWeights

logger = logging.getLogger(__name__)

_NUM_RECORDED_TOKENS = 3
_TAKEN_FOR_GRANTED = ("position_ids", "use_cache", "dropout", "output_attentions")  # options of no consequence here


@dataclass(frozen=True, slots=True)
class _AttentionCall:
    """Records what one layer asked of attention."""

    layer_idx: int
    window: int | None
    heads: dict[str, Any]  # fields of `AttentionBlock`


@dataclass(slots=True)
class _Recorder:
    """An attention that computes nothing, and adds each call to `calls` or raises if it is not supported."""

    calls: list[_AttentionCall] = field(default_factory=list)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        if others.pop("s_aux", None) is not None:
            raise CheckpointError("its attention has sinks, which are not supported")
        has_mask = mask is not None or attention_mask is not None
        if has_mask or others.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
            raise CheckpointError("its attention is not causal, or has a mask of its own, which is not supported")
        if unknown := [name for name, given in others.items() if given is not None and name not in _TAKEN_FOR_GRANTED]:
            raise CheckpointError(f"its attention takes {unknown[0]}, which is not supported")
        if value.shape[:-1] != key.shape[:-1] or key.shape[-1] != query.shape[-1]:
            raise CheckpointError("its keys differ from its queries in size, or from its values in number")
        heads = {
            "num_heads": query.shape[1],
            "num_kv_heads": key.shape[1],
            "head_dim": max(query.shape[-1], value.shape[-1]),
            "scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
            "softcap": softcap,
        }
        layer_idx: Any = module.layer_idx
        self.calls.append(_AttentionCall(layer_idx, read_window(sliding_window), heads))
        return query.new_empty(*query.transpose(1, 2).shape[:-1], value.shape[-1]), None


def describe_decoder(
    architecture: str, raw: dict[str, Any], weights: SafetensorsWeights | None = None
) -> AdaptedConfig:
    """From a config.json. CheckpointError if it is not a decoder, or one that the cache and attention cannot serve.

    `weights`: its files; None: they are not known.
    """
    refuse_unreadable(raw)
    if quantization := raw.get("quantization_config") or raw.get("compression_config"):
        method = quantization.get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"its weights are quantized with {named(method)}, which cannot be read; choose a checkpoint in bfloat16,"
            " float16 or float32"
        )
    config = _read_config(architecture, raw)
    max_position_embeddings = _fix_rope(config)
    model = _make_model(config, architecture)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if weights is not None:
        num_parameters += _untie(model, config, weights)
        _check_shapes(model, weights, num_parameters)
    try:
        calls = _record(model, config)
        _check_windows(config, calls, max_position_embeddings)
    except CheckpointError as error:
        raise CheckpointError(f"{architecture} is not supported: {error}") from None
    return AdaptedConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        layers=tuple((AttentionBlock(window=call.window, **call.heads),) for call in calls),
        max_position_embeddings=max_position_embeddings,
        dtype=read_dtype(config),
        num_parameters=num_parameters,
        source=config,
    )


def _read_config(architecture: str, raw: dict[str, Any]) -> Any:
    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        code = "; code that comes with a checkpoint is not run" if raw.get("auto_map") else ""
        raise CheckpointError(f"{architecture} is not supported: transformers has no model type {kind!r}{code}")
    config = CONFIG_MAPPING[kind].from_dict(raw)
    config.pad_token_id = None  # or else some models look for padding in every step
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise CheckpointError(f"{architecture} is not supported: only decoders of text are")
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), ())
    if architecture not in [each.__name__ for each in (classes if isinstance(classes, tuple) else (classes,))]:
        raise CheckpointError(f"{architecture} is not supported: transformers has no decoder of that name")
    if unknown := set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES:
        raise CheckpointError(f"{architecture}'s layers of type {min(unknown)} are not supported")
    return config


def _fix_rope(config: Any) -> int:
    """The positions up to which rope is the same for every sequence, beyond which the model is not run."""
    longest: int = config.max_position_embeddings
    if longest < 1:
        raise CheckpointError(f"max_position_embeddings must be at least 1, not {longest}")
    given = getattr(config, "rope_parameters", None) or {}
    if given:
        config.standardize_rope_params()  # as a model's construction does
    for rope in [each for each in given.values() if isinstance(each, dict)] or [given]:
        check_rope_numbers(rope)
        if rope.get("rope_type") == "dynamic":
            rope["rope_type"] = "default"  # which it equals up to that length
        elif rope.get("rope_type") == "longrope":
            longest = min(longest, int(rope["original_max_position_embeddings"]))
    return longest


def _make_model(config: Any, architecture: str) -> Any:
    """The model without weights."""
    make: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            return make(config, attn_implementation=ATTENTION).eval()
    except KeyError as error:
        if error.args == (ATTENTION,):  # it looked for a class of its own by that name
            reason = _ALIBI if _has_alibi(config) else _OWN_ATTENTION
            raise CheckpointError(f"{architecture} is not supported: {reason}") from error
        raise _cannot_build(architecture, error) from error
    except Exception as error:  # whatever its code raises with numbers that do not fit each other
        raise _cannot_build(architecture, error) from error


def _cannot_build(architecture: str, error: Exception) -> CheckpointError:
    reason = " ".join(str(error).split())
    return CheckpointError(f"{architecture} cannot be built from it by transformers ({type(error).__name__}: {reason})")


def _check_shapes(model: Any, weights: SafetensorsWeights, num_parameters: int) -> None:
    """CheckpointError if a tensor of a parameter's name has another number of elements, or all have less than half.

    transformers compares all shapes, but only once it has allocated what the config claims. It may rename and transpose
    tensors while it reads them.
    """
    for name, parameter in model.named_parameters():
        stored = weights.tensors.get(name)
        if stored is not None and math.prod(stored.shape) != parameter.numel():
            found, needed = list(stored.shape), list(parameter.shape)
            raise CheckpointError(f"tensor {named(name)} has shape {found}; the model needs {needed}")
    num_stored = sum(math.prod(stored.shape) for stored in weights.tensors.values())
    if num_parameters > 2 * num_stored:  # not merely more: then the loader names a tensor that is missing
        raise CheckpointError(f"it describes {num_parameters} parameters, and the weights have {num_stored}")


def _untie(model: Any, config: Any, weights: SafetensorsWeights) -> int:
    """Unties a head that differs from the embedding in the files; returns the number of its parameters."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    own = [head for head, embedding in tied.items() if has_own_head(weights, embedding, head)]
    if own:
        config.tie_word_embeddings = False
    return sum(model.get_parameter(name).numel() for name in own)


def _record(model: Any, config: Any) -> list[_AttentionCall]:
    """Finds what each layer needs of attention. CheckpointError, without the model's name, if it is not supported."""
    recorder = _Recorder()
    try:
        with torch.device("meta"), torch.inference_mode():
            if model._can_set_experts_implementation():
                model.set_experts_implementation("batched_mm")  # the others need values to route tokens
            decoder = AdaptedDecoder(model)
            places = torch.arange(_NUM_RECORDED_TOKENS)
            hidden = decoder.run(places, places, recorder)
            _check_calls(config, recorder.calls)
            decoder.logits(hidden)
    except CheckpointError:
        raise
    except Exception as error:  # whatever its code raises with an attention that it was not written for
        logger.debug("the run without weights failed", exc_info=True)
        raise CheckpointError(_reason(model, config, recorder.calls, error)) from error
    return recorder.calls


def _check_calls(config: Any, calls: list[_AttentionCall]) -> None:
    if not calls:
        raise CheckpointError(_ALIBI if _has_alibi(config) else _OWN_ATTENTION)
    if [call.layer_idx for call in calls] != list(range(config.num_hidden_layers)):
        raise CheckpointError(
            f"its {config.num_hidden_layers} layers attend {len(calls)} times, and each must attend once, to keys and"
            " values of its own, in order"
        )
    if any(call.heads != calls[0].heads for call in calls):
        raise CheckpointError("its layers differ in their heads or scales")


_OWN_ATTENTION = "its layers do not attend through transformers' interface, which alone leads to the cache"


_ALIBI = "its attention adds a bias for each distance (alibi), which is not supported"
_ALWAYS_ALIBI = ("bloom", "mpt")


def _has_alibi(config: Any) -> bool:
    return config.model_type in _ALWAYS_ALIBI or bool(getattr(config, "alibi", False))


def _reason(model: Any, config: Any, calls: list[_AttentionCall], error: Exception) -> str:
    """Says why its code failed over the cache's slots, as far as its config and the failure tell."""
    if _has_alibi(config):
        return _ALIBI
    if isinstance(error, NotImplementedError) and "meta" in str(error):
        return "its code depends on values while it routes tokens, so what it needs cannot be recorded"
    if isinstance(error, RuntimeError):
        return f"it cannot be run with these sizes ({' '.join(str(error).split())})"
    if calls or model._supports_attention_backend:
        return "its code needs more of a pass than what each token attends to"
    return _OWN_ATTENTION


def _check_windows(config: Any, calls: list[_AttentionCall], longest: int) -> None:
    """CheckpointError if the config has windows that attention is not told about, since masks are not made here.

    `longest`: positions of a sequence. A window that covers them hides nothing.
    """
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if isinstance(window, int) and window >= longest:
        return
    if kinds is None:
        has_window = window and getattr(config, "use_sliding_window", True)
        is_untold = has_window and all(call.window is None for call in calls)
    else:
        pairs = zip(kinds, calls, strict=True)
        is_untold = any(kind == "sliding_attention" and call.window is None for kind, call in pairs)
    if is_untold:
        raise CheckpointError("its sliding window is in its masks only")
