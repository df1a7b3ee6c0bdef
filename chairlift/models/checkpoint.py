"""A Hugging Face checkpoint on disk: where it is and which tensors it holds."""

import functools
import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open

from chairlift.errors import CheckpointError
from chairlift.models.adapter import describe_decoder
from chairlift.models.config import FAMILIES, ModelShape, describe_family
from chairlift.models.smollm2 import SMOLLM2, smollm2_directory

BUNDLED = "bundled"
_BUNDLED_DIRECTORY = Path(__file__).parent / "bundled"
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[^/\\\x00.][^/\\\x00]*\.safetensors")
_WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory and the configuration in it. Weights are not read before `WeightReader` does."""

    directory: Path
    config: ModelShape

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files, single or sharded. CheckpointError if one is missing."""
        index = self.directory / _INDEX_FILE
        files = _indexed_files(index) if index.is_file() else [self.directory / _SINGLE_FILE]
        for path in files:
            if not path.is_file():
                raise CheckpointError(f"{self.directory} lacks {path.name} (weights must be safetensors)")
        return files


def open_checkpoint(model: str) -> Checkpoint:
    """Finds a checkpoint, as `find_directory` does, and reads its configuration."""
    directory = find_directory(model)
    return Checkpoint(directory, read_model_config(directory))


def read_model_config(directory: Path) -> ModelShape:
    """Reads `config.json`: a `ModelConfig` of one of the families, or else what transformers' own code is run by.

    CheckpointError if there is none, or it asks for what is not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        architectures = raw.get("architectures")
        if not isinstance(architectures, list) or not architectures:
            raise CheckpointError("it names no architecture")
        known = [name for name in FAMILIES if name in architectures]
        return describe_family(known[0], raw) if known else describe_decoder(str(architectures[0]), raw)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # the file may hold anything; whatever transformers makes of it is about the file
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error}") from error
    for name in names:
        # A link may lead elsewhere, as in the hub's cache: its maker is the folder's, not this file's.
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(f"{index} names {name!r}; weights must be files beside it, ending in .safetensors")
    return [index.parent / name for name in names]


def find_directory(model: str) -> Path:
    """The directory of a model or tokenizer.

    A hub id is downloaded, or found in the local cache when offline; "bundled" is in this package, and "smollm2" is
    made of what the extra `[smollm2]` installs. CheckpointError if there is none.
    """
    if model == BUNDLED:
        return _BUNDLED_DIRECTORY
    if model == SMOLLM2:
        return smollm2_directory()
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if path.is_file() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"{model!r} is neither a directory nor a hub id of the form owner/name")
    try:
        return _download(model)
    except Exception as error:  # the hub's client raises its own, requests' and OS errors; each means the same here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{model!r} is not a directory, and fetching it from the hub failed: {reason}") from error


@functools.cache  # one look-up per process, so that weights and tokenizer are of one revision
def _download(hub_id: str) -> Path:
    return Path(snapshot_download(hub_id, allow_patterns=_WANTED_FILES))


class WeightReader:
    """Reads single tensors from the weight files of a checkpoint.

    A file is mapped anew for each tensor: an open mapping keeps every page that was read, so that a model would be in
    memory twice while it is loaded.
    """

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Path] = {}  # tensor name -> its file
        for path in files:
            try:
                with safe_open(path, framework="pt") as handle:
                    names: list[str] = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
            self._files.update(dict.fromkeys(names, path))

    @property
    def names(self) -> set[str]:
        return set(self._files)

    def file_of(self, name: str) -> Path:
        """The file that holds that tensor."""
        return self._files[name]

    def read(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU. KeyError if there is none of that name."""
        with safe_open(self._files[name], framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor
