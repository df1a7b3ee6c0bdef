"""Holds what tests of checkpoints share: to write and to change them, to load them, and the message if that is
refused.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.config import DType
from chairlift.errors import CheckpointError
from chairlift.models import load_model, open_checkpoint
from chairlift.models.decoder import Decoder
from chairlift.models.grouped import GroupedWeight
from chairlift.models.layers import Linear, RowTable

MAX_SEQ_LEN = 32


def write_config(directory: Path, *described: Mapping[str, Any], **fields: Any) -> str:
    """A config.json of these fields, the later ones over the earlier."""
    config = {name: value for each in (*described, fields) for name, value in each.items()}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def edit(directory: Path, changes: Mapping[str, torch.Tensor | None]) -> None:
    """Tensors that are replaced or added; None: left out."""
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in {**load_file(path), **changes}.items() if tensor is not None}
    save_file(tensors, path, metadata={"format": "pt"})


def load(path: Path | str, dtype: DType = DType.FLOAT32, *, keeps_groups: bool = False) -> Decoder:
    return load_model(open_checkpoint(str(path)), dtype, "cpu", MAX_SEQ_LEN, keeps_groups=keeps_groups)


def linear(model: Any, name: str) -> Linear:
    """A product of one layer, as "1.mlp.down_proj"; also of a model in transformers' code."""
    product: Linear = model.get_submodule(f"model.layers.{name}")
    return product


def refusal(path: Path | str, read: Callable[[str], object] = load) -> str:
    """The message, one line, of the error that loading, or `read`, meets."""
    with pytest.raises(CheckpointError) as caught:
        read(str(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def groups_of(model: Decoder) -> list[GroupedWeight]:
    """Returns what its products and its embeddings keep in groups."""
    modules = (module for module in model.modules() if isinstance(module, Linear | RowTable))
    return [module.grouped for module in modules if module.grouped is not None]


def num_bytes(groups: list[GroupedWeight]) -> int:
    return sum(each.num_bytes for each in groups)
