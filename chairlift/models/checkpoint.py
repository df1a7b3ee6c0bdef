"""A Hugging Face checkpoint on disk: where it lies and which tensors it holds. Knows no model."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from chairlift.errors import CheckpointError
from chairlift.models.config import ModelConfig, read_model_config

BUNDLED = "bundled"
_BUNDLED_DIRECTORY = Path(__file__).parent / "bundled"
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the configuration in it. Weights are not read before `WeightReader` does."""

    directory: Path
    config: ModelConfig

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files, single or sharded. CheckpointError if one is missing."""
        index = self.directory / _INDEX_FILE
        files = _indexed_files(index) if index.is_file() else [self.directory / _SINGLE_FILE]
        for path in files:
            if not path.is_file():
                raise CheckpointError(f"{self.directory} lacks {path.name} (weights must be safetensors)")
        return files

    @property
    def num_parameters(self) -> int:
        """From the files' sizes, so a little too many: close enough to tell whether a cache fits beside them."""
        return sum(path.stat().st_size for path in self.weight_files) // self.config.dtype.num_bytes


def open_checkpoint(model: str) -> Checkpoint:
    """Finds a checkpoint by directory or hub id ("bundled": the one in the package) and reads its configuration."""
    directory = find_directory(model)
    return Checkpoint(directory, read_model_config(directory))


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return sorted(index.parent / name for name in names)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error}") from error


def find_directory(model: str) -> Path:
    """The directory of a model or tokenizer; a hub id is downloaded, or found in the local cache when offline."""
    if model == BUNDLED:
        return _BUNDLED_DIRECTORY
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"{model!r} is no directory, and no hub id of the form owner/name")
    try:
        return Path(snapshot_download(model, allow_patterns=_WANTED_FILES))
    except Exception as error:  # the hub's client raises its own, requests' and OS errors; each means the same here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{model!r} is no directory, and fetching it from the hub failed: {reason}") from error


class WeightReader:
    """Opens all weight files of a checkpoint and reads single tensors, without loading the rest. A context manager."""

    def __init__(self, files: list[Path]) -> None:
        self._handles: list[Any] = []
        self._home: dict[str, Any] = {}  # tensor name -> handle of its file
        for path in files:
            try:
                handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
            self._handles.append(handle)
            names: list[str] = list(handle.keys())  # type: ignore[no-untyped-call]
            self._home.update(dict.fromkeys(names, handle))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._home.clear()
        self._handles.clear()

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU. KeyError if there is none of that name."""
        tensor: torch.Tensor = self._home[name].get_tensor(name)
        return tensor
