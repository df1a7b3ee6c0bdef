"""Strict loading of a checkpoint into a model, tensor by tensor, file by file.

Weights go straight to their places on the model's device, so that the host never holds more than one tensor of them.
A model says in three tables what cannot be seen from its parameters: `renamed` (what a checkpoint calls its modules),
`fused` (which checkpoint tensors are stacked into one parameter, in order) and `ignored_tensors` (what a checkpoint may
hold although the model has no use for it).
"""

import logging
import time

import torch

from chairlift.config import DType
from chairlift.errors import CheckpointError, ConfigurationError
from chairlift.models.checkpoint import Checkpoint, WeightReader
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder

logger = logging.getLogger(__name__)

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def load_model(
    checkpoint: Checkpoint, dtype: DType, device: str, max_seq_len: int, num_positions: int | None = None
) -> Decoder:
    """The model with its weights on the device. CheckpointError names a missing, leftover or misshapen tensor.

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
            parameter.fill_(0.0 if name.endswith(".bias") or checkpoint.config.has_offset_norms else 1.0)
    model.finalize(max_seq_len, num_positions)
    _log("made up weights for %s: %.1f MB in %s in %.2f s", checkpoint, model, dtype, start)
    return model


def _empty_model(config: ModelConfig, dtype: DType, device: str) -> Decoder:
    logger.info("%s", config.describe())
    with torch.device("meta"):
        model = Decoder(config)
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * dtype.num_bytes
    try:
        return model.to(TORCH_DTYPES[dtype]).to_empty(device=device).requires_grad_(False)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{device} ran out of memory for {num_bytes / 1e9:.1f} GB of weights; end what else uses it, or choose a"
            " smaller model or another dtype"
        ) from error


def _log(message: str, checkpoint: Checkpoint, model: Decoder, dtype: DType, start: float) -> None:
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    logger.info(message, checkpoint.directory, num_bytes / 1e6, dtype, time.perf_counter() - start)


def _load_weights(model: Decoder, reader: WeightReader) -> None:
    """Fills every parameter from the reader. CheckpointError if names or shapes do not match exactly."""
    places: dict[str, torch.Tensor] = {}  # by tensor of the checkpoint: a parameter, or some rows of a fused one
    for name, parameter in model.named_parameters():
        places |= _places_in(_renamed(name, model.renamed), parameter, model.fused)
    missing = sorted(places.keys() - reader.names)
    leftover = sorted(reader.names - places.keys() - model.ignored_tensors(reader.names))
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    if leftover:
        raise CheckpointError(f"the checkpoint has tensors that this model has no place for: {_listed(leftover)}")
    for name in sorted(places, key=reader.file_of):
        _fill(places[name], name, reader)


def _renamed(name: str, modules: dict[str, str]) -> str:
    """The checkpoint's name for a parameter."""
    return ".".join(modules.get(part, part) for part in name.split("."))


def _places_in(name: str, parameter: torch.Tensor, fused: dict[str, dict[str, int]]) -> dict[str, torch.Tensor]:
    """`...self_attn.qkv_proj.weight` -> q_proj, k_proj and v_proj; other names stand for themselves."""
    for target, rows in fused.items():
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
