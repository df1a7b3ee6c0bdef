"""Strict loading of a checkpoint into a model, tensor by tensor.

A model says in two tables what cannot be seen from its parameters: `fused` (which checkpoint tensors are stacked into
one parameter, in order) and `ignored_tensors` (what a checkpoint may hold although the model has no use for it).
"""

import logging
import time
from dataclasses import dataclass

import torch

from chairlift.config import DType
from chairlift.errors import CheckpointError
from chairlift.models.checkpoint import Checkpoint, WeightReader
from chairlift.models.llama import Llama

logger = logging.getLogger(__name__)

TORCH_DTYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16}


def load_model(checkpoint: Checkpoint, dtype: DType, device: str, max_seq_len: int) -> Llama:
    """The model with its weights on the device. CheckpointError names a missing, leftover or misshapen tensor."""
    start = time.perf_counter()
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    model = model.to(TORCH_DTYPES[dtype]).to_empty(device=device).requires_grad_(False)
    load_weights(model, WeightReader(checkpoint.weight_files))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.finalize(max_seq_len)
    seconds = time.perf_counter() - start
    logger.info("loaded %s: %.1f MB of %s weights in %.2f s", checkpoint.directory, num_bytes / 1e6, dtype, seconds)
    return model


def load_weights(model: Llama, reader: WeightReader) -> None:
    """Fills every parameter from the reader. CheckpointError if names or shapes do not match exactly."""
    targets = {name: _parts(name, parameter, model.fused) for name, parameter in model.named_parameters()}
    wanted = {part.name for parts in targets.values() for part in parts}
    missing = sorted(wanted - reader.names)
    leftover = sorted(reader.names - wanted - model.ignored_tensors(reader.names))
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    if leftover:
        raise CheckpointError(f"the checkpoint has tensors that this model has no place for: {_listed(leftover)}")
    for parts in targets.values():
        for part in parts:
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
