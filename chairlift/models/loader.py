"""Strict loading of a checkpoint into a model, tensor by tensor, file by file.

Weights go straight to their places on the model's device, so that the host never holds more than one tensor of them.
A model says in two tables what cannot be seen from its parameters: `fused` (which checkpoint tensors are stacked into
one parameter, in order) and `ignored_tensors` (what a checkpoint may hold although the model has no use for it).
"""

import logging
import time
from dataclasses import dataclass

import torch

from chairlift.config import DType
from chairlift.errors import CheckpointError, ConfigurationError
from chairlift.models.checkpoint import Checkpoint, WeightReader
from chairlift.models.config import ModelConfig
from chairlift.models.llama import Llama

logger = logging.getLogger(__name__)

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def load_model(checkpoint: Checkpoint, dtype: DType, device: str, max_seq_len: int) -> Llama:
    """The model with its weights on the device. CheckpointError names a missing, leftover or misshapen tensor."""
    start = time.perf_counter()
    model = _empty_model(checkpoint.config, dtype, device)
    load_weights(model, WeightReader(checkpoint.weight_files))
    model.finalize(max_seq_len)
    _log("loaded %s: %.1f MB of %s weights in %.2f s", checkpoint, model, dtype, start)
    return model


def make_dummy_model(checkpoint: Checkpoint, dtype: DType, device: str, max_seq_len: int, seed: int) -> Llama:
    """The model with random weights that depend on the seed and the kind of device; only the configuration is read."""
    start = time.perf_counter()
    model = _empty_model(checkpoint.config, dtype, device)
    fill_with_noise(model, seed)
    model.finalize(max_seq_len)
    _log("made up weights for %s: %.1f MB in %s in %.2f s", checkpoint, model, dtype, start)
    return model


def fill_with_noise(model: Llama, seed: int) -> None:
    """Matrices normal with deviation 1 / sqrt(inputs), so that products keep the scale of what goes in (LeCun et al.,
    "Efficient BackProp", 1998); norms one; biases zero."""
    generator = torch.Generator(model.model.embed_tokens.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        else:
            parameter.fill_(0.0 if name.endswith(".bias") else 1.0)


def _empty_model(config: ModelConfig, dtype: DType, device: str) -> Llama:
    with torch.device("meta"):
        model = Llama(config)
    try:
        return model.to(TORCH_DTYPES[dtype]).to_empty(device=device).requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{device} ran out of memory for {config.num_parameters * dtype.num_bytes / 1e9:.1f} GB of weights;"
            " end what else uses it, or choose a smaller model or another dtype"
        ) from error


def _log(message: str, checkpoint: Checkpoint, model: Llama, dtype: DType, start: float) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    logger.info(message, checkpoint.directory, num_bytes / 1e6, dtype, time.perf_counter() - start)


def load_weights(model: Llama, reader: WeightReader) -> None:
    """Fills every parameter from the reader. CheckpointError if names or shapes do not match exactly."""
    parts = [part for pair in model.named_parameters() for part in _parts(*pair, model.fused)]
    wanted = {part.name for part in parts}
    missing = sorted(wanted - reader.names)
    leftover = sorted(reader.names - wanted - model.ignored_tensors(reader.names))
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    if leftover:
        raise CheckpointError(f"the checkpoint has tensors that this model has no place for: {_listed(leftover)}")
    for part in sorted(parts, key=lambda part: reader.home(part.name)):
        _fill(part, reader)


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor of the checkpoint and its place: all of a parameter, or some rows of a fused one."""

    name: str
    place: torch.Tensor


def _parts(name: str, parameter: torch.Tensor, fused: dict[str, dict[str, int]]) -> list[_Part]:
    """`...self_attn.qkv_proj.weight` -> q_proj, k_proj and v_proj; other names stand for themselves."""
    for target, rows in fused.items():
        if f".{target}." in name:
            names = [name.replace(f".{target}.", f".{part}.") for part in rows]
            return [_Part(*pair) for pair in zip(names, torch.split(parameter, list(rows.values())), strict=True)]
    return [_Part(name, parameter)]


def _fill(part: _Part, reader: WeightReader) -> None:
    try:
        tensor = reader.read(part.name)
    except Exception as error:  # a file that ends early shows only when its bytes are touched
        raise CheckpointError(f"tensor {part.name} cannot be read: {error}") from error
    if tensor.shape != part.place.shape:
        raise CheckpointError(
            f"tensor {part.name} has shape {list(tensor.shape)}; the model needs {list(part.place.shape)}"
        )
    part.place.copy_(tensor)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
