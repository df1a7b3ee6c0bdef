"""Strict loading of a checkpoint into a model, tensor by tensor, file by file.

Weights go straight to their places on the model's device, so that the host never holds more than one tensor of them.
Three tables say where a checkpoint's tensors differ from the wiring's: `_NORM_NAMES`, `_stacked` (which of them are
stacked into one parameter, in order) and `_ignored` (what it may hold although the model has no use for it).
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from chairlift.config import DType
from chairlift.errors import CheckpointError, ConfigurationError
from chairlift.models.adapter import ATTENTION, AdaptedConfig, AdaptedDecoder
from chairlift.models.checkpoint import Checkpoint, WeightReader
from chairlift.models.config import ModelConfig, ModelShape, Norms
from chairlift.models.decoder import Decoder

logger = logging.getLogger(__name__)

_NORM_NAMES = {
    Norms.PRE: {"pre_attention_norm": "input_layernorm", "pre_mlp_norm": "post_attention_layernorm"},
    Norms.POST: {"post_attention_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"},
    Norms.PRE_AND_POST: {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    },
}
"""A layer's norms, and the checkpoint's names for them."""

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def load_model(
    checkpoint: Checkpoint, dtype: DType, device: str, max_seq_len: int, num_positions: int | None = None
) -> Decoder:
    """A family's model with its weights on the device. CheckpointError names a missing, leftover or misshapen tensor.

    `num_positions` that slots have memory for; None: `max_seq_len`.
    """
    start = time.perf_counter()
    model = _empty_model(checkpoint.config, dtype, device)
    _load_weights(model, WeightReader(checkpoint.weight_files))
    model.finalize(max_seq_len, num_positions)
    _log("loaded %s: %.1f MB of %s weights in %.2f s", checkpoint, model, dtype, start)
    return model


def make_dummy_model(
    checkpoint: Checkpoint,
    dtype: DType,
    device: str,
    seed: int,
    max_seq_len: int,
    num_positions: int | None = None,
) -> Decoder:
    """The model with random weights that depend on the seed and the kind of device; only the configuration is read.

    Matrices are normal with deviation 1 / sqrt(inputs), so that products keep the scale of what goes in (LeCun et al.,
    "Efficient BackProp", 1998); norms one; biases zero.
    """
    start = time.perf_counter()
    model = _empty_model(checkpoint.config, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith(".bias") or model.config.has_offset_norms else 1.0)
    model.finalize(max_seq_len, num_positions)
    _log("made up weights for %s: %.1f MB in %s in %.2f s", checkpoint, model, dtype, start)
    return model


def load_adapted(checkpoint: Checkpoint, dtype: DType, device: str) -> AdaptedDecoder:
    """A decoder that is in no family, in transformers' code. It is in the host's memory before it is on the device.

    CheckpointError as for `load_model`.
    """
    start = time.perf_counter()
    config = checkpoint.config
    assert isinstance(config, AdaptedConfig), "families have a wiring of their own"
    logger.info("%s", config.describe())
    logger.warning(
        "%s runs in transformers' own code over the cache's slots, which is the slower way: a decode step of a small"
        " model took up to 1.3 times as long as a family's in torch, and up to 3 times as long as in native code",
        config.architecture,
    )
    source, report = _load_in_transformers(checkpoint, config, dtype)
    _refuse_differences(report["missing_keys"], report["unexpected_keys"])
    with _room_for(source, dtype, device):
        model = AdaptedDecoder(source.to(device).eval().requires_grad_(False))
    model.check_positions()
    _log("loaded %s: %.1f MB of %s weights in %.2f s", checkpoint, model, dtype, start)
    return model


def _load_in_transformers(checkpoint: Checkpoint, config: AdaptedConfig, dtype: DType) -> tuple[Any, dict[str, Any]]:
    """The model, and what its tensors and the checkpoint's do not have in common."""
    _ = checkpoint.weight_files  # refuses an index that names files outside
    bars: Any = transformers_logging
    has_bar = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            config=config.source,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # the files may hold anything; whatever transformers makes of it is about them
        raise CheckpointError(f"{checkpoint.directory} cannot be loaded: {' '.join(str(error).split())}") from error
    finally:
        if has_bar:
            bars.enable_progress_bar()
    model, report = loaded
    return model, report


def count_parameters(config: ModelShape) -> int:
    """Weights, biases and norms of a model of that description; a tied head counts once. Allocates nothing."""
    if isinstance(config, AdaptedConfig):
        return config.num_parameters
    assert isinstance(config, ModelConfig)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Decoder(config).parameters())


def _empty_model(config: ModelShape, dtype: DType, device: str) -> Decoder:
    assert isinstance(config, ModelConfig), "other decoders are loaded by load_adapted"
    logger.info("%s", config.describe())
    with torch.device("meta"):
        model = Decoder(config)
    with _room_for(model, dtype, device):
        return model.to(TORCH_DTYPES[dtype]).to_empty(device=device).requires_grad_(False)


@contextmanager
def _room_for(model: nn.Module, dtype: DType, device: str) -> Iterator[None]:
    """ConfigurationError if the device has no room for the model that is brought to it."""
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.num_bytes
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{device} ran out of memory for {num_bytes / 1e9:.1f} GB of weights; end what else uses it, or choose a"
            " smaller model or another dtype"
        ) from error


def _log(message: str, checkpoint: Checkpoint, model: Decoder | AdaptedDecoder, dtype: DType, start: float) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    logger.info(message, checkpoint.directory, num_bytes / 1e6, dtype, time.perf_counter() - start)


def _load_weights(model: Decoder, reader: WeightReader) -> None:
    """Fills every parameter from the reader. CheckpointError if names or shapes do not match exactly."""
    stacked = _stacked(model.config)
    places: dict[str, torch.Tensor] = {}  # by tensor of the checkpoint: a parameter, or some rows of a fused one
    for name, parameter in model.named_parameters():
        places |= _places_in(_renamed(name, _NORM_NAMES[model.config.norms]), parameter, stacked)
    _refuse_differences(
        places.keys() - reader.names, reader.names - places.keys() - _ignored(model.config, reader.names)
    )
    for name in sorted(places, key=reader.file_of):
        _fill(places[name], name, reader)


def _stacked(config: ModelConfig) -> dict[str, dict[str, int]]:
    """The wiring's modules -> the checkpoint's that are stacked in it, in order, and the rows of each."""
    if config.has_fused_tensors:
        return {}
    kv_rows = config.num_kv_heads * config.head_dim
    return {
        "qkv_proj": {"q_proj": config.num_heads * config.head_dim, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }


def _ignored(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Tensors that a checkpoint may hold in vain: a tied head's copy, and rotary tables of older formats."""
    tied = {"lm_head.weight"} if config.is_tied else set()
    return tied | {name for name in names if name.endswith(".rotary_emb.inv_freq")}


def _refuse_differences(missing: Iterable[str], leftover: Iterable[str]) -> None:
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(sorted(missing))}")
    if leftover:
        raise CheckpointError(
            f"the checkpoint has tensors that this model has no place for: {_listed(sorted(leftover))}"
        )


def _renamed(name: str, modules: dict[str, str]) -> str:
    """The checkpoint's name for a parameter."""
    return ".".join(modules.get(part, part) for part in name.split("."))


def _places_in(name: str, parameter: torch.Tensor, stacked: dict[str, dict[str, int]]) -> dict[str, torch.Tensor]:
    """`...self_attn.qkv_proj.weight` -> q_proj, k_proj and v_proj; other names stand for themselves."""
    for target, rows in stacked.items():
        if f".{target}." in name:
            names = [name.replace(f".{target}.", f".{part}.") for part in rows]
            return dict(zip(names, torch.split(parameter, list(rows.values())), strict=True))
    return {name: parameter}


def _fill(place: torch.Tensor, name: str, reader: WeightReader) -> None:
    try:
        tensor = reader.read(name)
    except Exception as error:  # a file that ends early shows only when its bytes are touched
        raise CheckpointError(f"tensor {name} cannot be read: {error}") from error
    if tensor.shape != place.shape:
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}; the model needs {list(place.shape)}")
    place.copy_(tensor)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
