"""`chairlift models`: lists the models that are on this machine, their sizes, and whether each can be served.

It looks in packages, in Hugging Face's cache, and in a folder and those in it, down to a few levels. Only configs and
headers are read, not weights.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from chairlift.errors import CheckpointError, sized

_LEVELS = 3  # folders below each other
_HUB_PREFIX = "models--"
_HEADINGS = ("MODEL", "SIZE", "SERVED")


class ModelsConfig(BaseModel):
    """Settings of `chairlift models`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: Path = Field(Path(), description="folder to look in, beside packages and Hugging Face's cache")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    name: str  # as `chairlift serve` takes it
    num_bytes: int  # of its weights
    served: str  # "yes", in whose code, or why not


def run(config: ModelsConfig) -> int:
    """Prints the table; returns the exit code. CheckpointError if there is no such folder."""
    if not config.folder.is_dir():
        raise CheckpointError(f"{config.folder} is no folder")
    rows = [_HEADINGS]
    rows += [(found.name, sized(found.num_bytes), found.served) for found in find_models(config.folder, hub_cache())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, size, served in rows:
        sys.stdout.write(f"{name:<{widths[0]}}  {size:>{widths[1]}}  {served}\n")
    return 0


def hub_cache() -> Path:
    """Returns the folder of Hugging Face's cache, as its own variables name it."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def find_models(folder: Path, cache: Path) -> Iterator[LocalModel]:
    """Yields those of packages, then those of a cache of the hub, then those of a folder, each by their names."""
    from chairlift.models.checkpoint import BUNDLED, find_model
    from chairlift.models.smollm2 import SMOLLM2

    for name in (BUNDLED, SMOLLM2):
        try:
            yield _inspect(name, find_model(name))
        except CheckpointError:  # the package is not installed
            continue
    for repository in sorted(cache.glob(f"{_HUB_PREFIX}*")):
        if (snapshot := _snapshot_of(repository)) is not None:
            yield from _in_snapshot(repository.name.removeprefix(_HUB_PREFIX).replace("--", "/"), snapshot)
    for path in _places(folder, _LEVELS):
        yield _inspect(str(path), path)


def _snapshot_of(repository: Path) -> Path | None:
    """The snapshot that the main branch names, or else the newest; None if there is none."""
    main = repository / "refs" / "main"
    if main.is_file():
        named = repository / "snapshots" / main.read_text(encoding="utf-8").strip()
        if named.is_dir():
            return named
    snapshots = [path for path in repository.glob("snapshots/*") if path.is_dir()]
    return max(snapshots, key=lambda path: path.stat().st_mtime, default=None)


def _in_snapshot(name: str, snapshot: Path) -> Iterator[LocalModel]:
    """Yields the model of a repository, and its GGUF files, which are named by their paths."""
    files = list(_gguf_files(snapshot))
    if (snapshot / "config.json").is_file() and (any(snapshot.glob("*.safetensors")) or not files):
        yield _inspect(name, snapshot)
    for path in files:
        yield _inspect(str(path), path)


def _places(folder: Path, levels: int) -> Iterator[Path]:
    """Yields the GGUF files of a folder, and checkpoints that it is or has; of files in parts, the first."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        yield folder
    yield from _gguf_files(folder)
    if levels:
        try:
            folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
        except PermissionError:
            return
        for path in folders:
            yield from _places(path, levels - 1)


def _gguf_files(folder: Path) -> Iterator[Path]:
    from chairlift.models.gguf import is_gguf_name, parts_of

    try:
        files = sorted(path for path in folder.iterdir() if is_gguf_name(path) and path.is_file())
    except PermissionError:
        return
    yield from (path for path in files if parts_of(path)[0] == path)


def _inspect(name: str, path: Path) -> LocalModel:
    from chairlift.models.checkpoint import open_checkpoint
    from chairlift.models.config import AdaptedConfig
    from chairlift.models.gguf import is_gguf, parts_of

    files = parts_of(path) if is_gguf(path) else list(path.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files if file.exists())
    try:
        checkpoint = open_checkpoint(str(path))
        if checkpoint.gguf is None:
            checkpoint.weight_files  # noqa: B018 - raises if one is missing
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{path / 'config.json'}: ").removeprefix(f"{path}: ")
        return LocalModel(name, num_bytes, f"no: {' '.join(reason.split())}")
    served = "yes, in transformers' code" if isinstance(checkpoint.config, AdaptedConfig) else "yes"
    return LocalModel(name, num_bytes, served)
