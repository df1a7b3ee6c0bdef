"""Compares a model's parameters with the tensors of a checkpoint, by names and shapes, and reads tensors by name."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from chairlift.errors import CheckpointError, named
from chairlift.models.blocks import EMBEDDING, Weight
from chairlift.models.config import ModelConfig
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedWeight
from chairlift.models.stored import WeightReader


def match_tensors(model: Decoder, reader: WeightReader) -> dict[str, list[str]]:
    """The model's parameters -> the tensors that are stacked in each, in order.

    CheckpointError if names or shapes are not exactly those of the reader.
    """
    weights, names = {weight.module: weight for weight in model.config.weights()}, model.config.names
    parts = {}
    for name, parameter in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        whole = weights.get(name)  # a block's own parameter has no leaf
        parts[name] = _parts_of(whole or weights[module], "" if whole else f".{leaf}", tuple(parameter.shape))
    if model.config.is_tied and names.embedding not in reader.tensors and names.head_weight in reader.tensors:
        parts[EMBEDDING] = {names.head_weight: parts[EMBEDDING][names.embedding]}  # either of the two may be stored
    needed = {name: shape for shapes in parts.values() for name, shape in shapes.items()}
    leftover = reader.tensors.keys() - needed.keys() - _ignored(model.config, reader.tensors)
    leftover = {name for name in leftover if not _is_zero_bias(reader, name)}
    refuse_differences(needed.keys() - reader.tensors.keys(), leftover)
    for name, shape in needed.items():
        if (found := reader.tensors[name].shape) != shape:
            raise CheckpointError(f"tensor {name} has shape {list(found)}; the model needs {list(shape)}")
    return {name: list(shapes) for name, shapes in parts.items()}


def _ignored(config: ModelConfig, names: Iterable[str]) -> set[str]:
    """Tensors that a checkpoint may hold without need.

    They are a tied head's copy, rotary tables of older formats, and what the family skips.
    """
    tied = {config.names.head_weight} if config.is_tied else set()
    needless = {name for name in names if name.endswith(".rotary_emb.inv_freq") or config.names.is_skipped(name)}
    return tied | needless


def _is_zero_bias(reader: WeightReader, name: str) -> bool:
    """Returns true for a bias of zeros beside a matrix in groups: GPTQ's tools write these for products without one.

    CheckpointError if it is not all zeros.
    """
    matrix = reader.tensors.get(f"{name.removesuffix('.bias')}.weight")
    if not name.endswith(".bias") or matrix is None or matrix.groups is None:
        return False
    bias = read_tensor(reader, name)
    if not isinstance(bias, torch.Tensor) or bool(bias.any()):
        raise CheckpointError(f"tensor {named(name)} is not zero, and this model has no such bias")
    return True


def refuse_differences(missing: Iterable[str], leftover: Iterable[str]) -> None:
    """Raises a CheckpointError that names tensors which only one side has."""
    if missing:
        raise CheckpointError(f"the checkpoint lacks {listed(sorted(missing))}")
    if leftover:
        raise CheckpointError(
            f"the checkpoint has tensors that this model has no place for: {listed(sorted(leftover))}"
        )


def _parts_of(weight: Weight, suffix: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that are stacked in a parameter, with their shapes."""
    if len(weight.parts) == 1:
        return {f"{weight.parts[0].name}{suffix}": shape}
    equal = shape[0] // len(weight.parts)
    return {f"{part.name}{suffix}": (part.length or equal, *shape[1:]) for part in weight.parts}


@contextmanager
def naming_tensor(name: str) -> Iterator[None]:
    """Turns any error into a CheckpointError about that tensor: a damaged file may show only when it is read."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"tensor {named(name)} cannot be read: {error}") from error


def read_tensor(reader: WeightReader, name: str) -> torch.Tensor | GroupedWeight:
    """Reads a tensor, on the CPU; in groups if it has them. CheckpointError if it cannot be read."""
    with naming_tensor(name):
        return reader.read(name)


def listed(names: list[str]) -> str:
    """Writes the first names, and how many more there are."""
    first = ", ".join(named(name) for name in names[:3])
    return first if len(names) <= 3 else f"{first} and {len(names) - 3} more"
