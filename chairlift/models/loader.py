"""Strict loading of a checkpoint into a model, tensor by tensor. Knows no model family.

A model says in two tables what cannot be seen from its parameters: `FUSED` (which checkpoint tensors are stacked into
one parameter, in order) and `ignored_tensors` (what a checkpoint may hold although the model has no use for it).
"""

import logging
import time

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
    with WeightReader(checkpoint.weight_files) as reader:
        load_weights(model, reader)
    model.set_max_seq_len(max_seq_len)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    seconds = time.perf_counter() - start
    logger.info("loaded %s: %.1f MB of %s weights in %.2f s", checkpoint.directory, num_bytes / 1e6, dtype, seconds)
    return model


def load_weights(model: Llama, reader: WeightReader) -> None:
    """Fills every parameter from the reader. CheckpointError if names or shapes do not match exactly."""
    targets = dict(model.named_parameters())
    wanted = {name: _sources(name, model.FUSED) for name in targets}
    all_wanted = {source for sources in wanted.values() for source in sources}
    missing = sorted(all_wanted - reader.names)
    leftover = sorted(reader.names - all_wanted - model.ignored_tensors(reader.names))
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_listed(missing)}")
    if leftover:
        raise CheckpointError(f"the checkpoint has tensors that this model has no place for: {_listed(leftover)}")
    for name, parameter in targets.items():
        _fill(parameter, wanted[name], reader)


def _sources(name: str, fused: dict[str, tuple[str, ...]]) -> list[str]:
    """`...self_attn.qkv_proj.weight` -> q_proj, k_proj and v_proj; other names stand for themselves."""
    for target, parts in fused.items():
        if f".{target}." in name:
            return [name.replace(f".{target}.", f".{part}.") for part in parts]
    return [name]


def _fill(parameter: torch.Tensor, sources: list[str], reader: WeightReader) -> None:
    row = 0
    for source in sources:
        try:
            tensor = reader.read(source)
        except Exception as error:  # a file that ends early shows only when its bytes are touched
            raise CheckpointError(f"tensor {source} cannot be read: {error}") from error
        if tensor.shape[1:] != parameter.shape[1:] or row + tensor.shape[0] > parameter.shape[0]:
            raise CheckpointError(_misshapen(source, tensor, parameter, sources))
        parameter[row : row + tensor.shape[0]].copy_(tensor)
        row += tensor.shape[0]
    if row != parameter.shape[0]:
        raise CheckpointError(f"{_listed(sources)} have {row} rows, and the model needs {parameter.shape[0]}")


def _misshapen(source: str, tensor: torch.Tensor, parameter: torch.Tensor, sources: list[str]) -> str:
    part = " as a part of" if len(sources) > 1 else ""
    return f"tensor {source} has shape {list(tensor.shape)}; the model needs{part} {list(parameter.shape)}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
