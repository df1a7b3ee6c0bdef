"""Models of Hugging Face's hub: how they are named, and their files, downloaded or found in the local cache."""

import functools
import glob
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from chairlift.errors import CheckpointError
from chairlift.models.gguf import choose_model, is_gguf_name, parts_of

_NAME = re.compile(r"(?P<repository>[^/:]+/[^/:]+)(:(?P<type>[\w.-]+)|/(?P<file>.+\.gguf))?", re.IGNORECASE)
_CHECKPOINT = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A checkpoint of the hub, or a GGUF file in a repository there."""

    repository: str  # owner/name
    files: tuple[str, ...] = ()  # patterns of the GGUF file's path and of its parts'; none: a checkpoint

    def fetch(self) -> Path:
        """Returns the directory of the checkpoint, or the GGUF file. CheckpointError if not exactly one fits.

        The hub's client raises errors of its own where nothing can be downloaded and the cache has nothing.
        """
        snapshot = _download(self.repository, self.files or _CHECKPOINT)
        if not self.files:
            return snapshot
        paths = [path for path in snapshot.rglob("*") if is_gguf_name(path) and self._has(path.relative_to(snapshot))]
        file = choose_model(paths, self.repository)
        if file is None:
            raise CheckpointError(f"the hub's repository {self.repository} has no such GGUF file")
        return file

    def _has(self, path: Path) -> bool:
        return any(fnmatchcase(path.as_posix(), pattern) for pattern in self.files)


def parse_hub_model(text: str) -> HubModel | None:
    """Reads `owner/name`, `owner/name/file.gguf`, or `owner/name:Q4_K_M` for a file by its type; None for others."""
    match = _NAME.fullmatch(text)
    if match is None or is_gguf_name(Path(match["repository"])):
        return None
    if match["file"]:
        files = tuple(glob.escape(path.as_posix()) for path in parts_of(Path(match["file"])))
        return HubModel(match["repository"], files)
    return HubModel(match["repository"], _patterns(match["type"]) if match["type"] else ())


def _patterns(kind: str) -> tuple[str, ...]:
    """Returns patterns of files with a type of weights at the end of their names, in capitals or not."""
    spelled = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in kind)
    names = (f"{spelled}.gguf", f"{spelled}-[0-9]*-of-[0-9]*.gguf")
    return (*names, *(f"*[-._/]{name}" for name in names))


@functools.cache  # one look-up per process, so that weights and tokenizer are of one revision
def _download(repository: str, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import

    return Path(snapshot_download(repository, allow_patterns=list(patterns)))
