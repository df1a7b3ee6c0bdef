"""Decoders that are in no family: transformers' own modelling code, over the cache's slots.

transformers lets a model's attention be any function of a layer's queries, keys and values. `_attend` is that function:
it appends to the slots and attends in place, through `attend`, which is passed down as an argument of the forward pass.
At start the model is run once without weights and with `_record` as that function, to see what its layers need of
attention; what a backend does not support is refused there.

Importing this takes two seconds, so it is done only for a model that needs it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast

from chairlift.errors import CheckpointError, named
from chairlift.models.attention import Attend
from chairlift.models.config import LAYER_TYPES, AdaptedConfig, LayerConfig
from chairlift.models.families import read_dtype, refuse_unreadable
from chairlift.models.rope import check_rope_numbers

ATTENTION, _RECORD = "chairlift", "chairlift_record"  # names of attention functions
_NUM_RECORDED_TOKENS = 3


@dataclass(frozen=True, slots=True)
class _Call:
    """What one layer asked of attention."""

    layer_idx: int
    window: int | None
    heads: dict[str, Any]  # fields of `AdaptedConfig`


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **options: Any
) -> tuple[torch.Tensor, None]:
    """`[1, H, T, D]` each -> `[1, T, Hq, D]`; the backend was built for the scale, the window and the cap."""
    attend: Attend = options["attend"]
    query, key, value = (x[0].to(value.dtype).transpose(0, 1).contiguous() for x in (query, key, value))
    return attend(module.layer_idx, query, key, value).unsqueeze(0), None  # type: ignore[arg-type]


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    attend: list[_Call],
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As `_attend`, in a model without weights: adds the call to `attend`, or raises if it is not supported."""
    if others.pop("s_aux", None) is not None:
        raise CheckpointError("its attention has sinks, which are not supported")
    if mask is not None or others.pop("is_causal", None) is False or not getattr(module, "is_causal", True):
        raise CheckpointError("its attention is not causal, or has a mask of its own, which is not supported")
    for name in ("position_ids", "use_cache", "dropout", "output_attentions"):
        others.pop(name, None)
    if unknown := [name for name, given in others.items() if given is not None]:
        raise CheckpointError(f"its attention takes {unknown[0]}, which is not supported")
    if value.shape != key.shape or key.shape[-1] != query.shape[-1]:
        raise CheckpointError("its queries, keys and values differ in size, which the cache does not support")
    heads = {
        "num_heads": query.shape[1],
        "num_kv_heads": key.shape[1],
        "head_dim": query.shape[-1],
        "attention_scale": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "attention_softcap": softcap,
    }
    layer_idx: Any = module.layer_idx
    attend.append(_Call(layer_idx, sliding_window, heads))
    return query.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
AttentionInterface.register(_RECORD, _record)


def describe_decoder(architecture: str, raw: dict[str, Any]) -> AdaptedConfig:
    """From a config.json. CheckpointError if it is not a decoder, or one that the cache and attention cannot serve."""
    refuse_unreadable(raw)
    if quantization := raw.get("quantization_config") or raw.get("compression_config"):
        method = quantization.get("quant_method", "an unnamed method")
        raise CheckpointError(
            f"its weights are quantized with {named(method)}, which cannot be read; choose a checkpoint in bfloat16,"
            " float16 or float32"
        )
    config = _read_config(architecture, raw)
    max_position_embeddings = _fix_rope(config)
    calls, num_parameters = _record_calls(config, architecture)
    if [call.layer_idx for call in calls] != list(range(config.num_hidden_layers)):
        raise CheckpointError(
            f"{architecture} is not supported: {len(calls)} of its {config.num_hidden_layers} layers keep keys and"
            " values of their own; recurrent, linear and shared attention have no place in the cache"
        )
    if any(call.heads != calls[0].heads for call in calls):
        raise CheckpointError(f"{architecture}'s layers differ in their heads or scales, which is not supported")
    _check_windows(config, calls)
    return AdaptedConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        layers=tuple(LayerConfig(None, call.window) for call in calls),
        max_position_embeddings=max_position_embeddings,
        dtype=read_dtype(config),
        num_parameters=num_parameters,
        source=config,
        **calls[0].heads,
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


def _record_calls(config: Any, architecture: str) -> tuple[list[_Call], int]:
    """What a model's layers need of attention, recorded without weights; and its number of parameters."""
    calls: list[_Call] = []
    make: Any = AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"), torch.inference_mode():
            model = make(config, attn_implementation=_RECORD).eval()
            num_parameters = sum(parameter.numel() for parameter in model.parameters())
            if model._can_set_experts_implementation():
                model.set_experts_implementation("batched_mm")  # the others need values to route tokens
            parts = AdaptedDecoder(model)
            places = torch.arange(_NUM_RECORDED_TOKENS)
            parts.logits(parts(places, places, calls))
    except CheckpointError as error:
        raise CheckpointError(f"{architecture} is not supported: {error}") from None
    except Exception as error:  # whatever transformers' code raises with an attention that it was not written for
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise CheckpointError(
            f"{architecture} is not supported: its attention cannot be handed to the cache ({reason})"
        ) from error
    return calls, num_parameters


def _check_windows(config: Any, calls: list[_Call]) -> None:
    """CheckpointError if the config has windows that attention is not told about, since masks are not made here."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        is_untold = has_window and all(call.window is None for call in calls)
    else:
        pairs = zip(kinds, calls, strict=True)
        is_untold = any(kind == "sliding_attention" and call.window is None for kind, call in pairs)
    if is_untold:
        raise CheckpointError("its sliding window is in its masks only, which is not supported")


def _fix_rope(config: Any) -> int:
    """The positions up to which rope is the same for every sequence, beyond which the model is not run."""
    longest: int = config.max_position_embeddings
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


@dataclass
class _Output(MoeModelOutputWithPast):
    """A model's output, with a field that other bodies return."""

    cross_attentions: None = None


class _Given(nn.Module):
    """Stands in for a model's body while its head computes logits: its output is what it is given."""

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class AdaptedDecoder(nn.Module):
    """As `Decoder`: token ids in, hidden states out; logits only where asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.body = model.base_model
        setattr(model, model.base_model_prefix, _Given())
        self.head = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = next(self.body.parameters()).device

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend | list[_Call]) -> torch.Tensor:
        """int64 `[T]`, int64 `[T]` -> final hidden states `[T, hidden]`."""
        output = self.body(
            input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attend=attend
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` -> float32 `[N, vocab]`."""
        logits: torch.Tensor = self.head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def check_positions(self) -> None:
        """CheckpointError if the code counts positions itself, because those of a ragged batch are given."""
        twice = torch.ones(2, dtype=torch.int64, device=self.device)
        first, second = self(twice, twice, lambda _, query, key, value: query)  # noqa: ARG005
        if not torch.allclose(first, second, rtol=1e-2, atol=1e-2):
            raise CheckpointError("the model computes positions itself, so those of a batch cannot be given to it")
