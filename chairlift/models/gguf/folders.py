"""GGUF files that are beside each other, of which one is the model."""

import functools
import logging
from collections.abc import Iterable
from pathlib import Path

from chairlift.errors import CheckpointError
from chairlift.models.gguf.header import open_gguf, parts_of

logger = logging.getLogger(__name__)

_PROJECTOR = "clip"  # the architecture of files that turn images or sound into inputs of a model (mmproj)


def choose_model(files: Iterable[Path], place: str) -> Path | None:
    """Returns the only model among files; None if there are none. Parts of a split file are one file, the first.

    Projectors (mmproj) are left out where there are several, and the log says so. CheckpointError if several models are
    left; it names the `place` where they are.
    """
    firsts = sorted({parts_of(path)[0] for path in files})
    if len(firsts) > 1:
        projectors = [path for path in firsts if open_gguf(path).metadata.get("general.architecture") == _PROJECTOR]
        for path in projectors:
            _tell_of_projector(path)
        firsts = [path for path in firsts if path not in projectors]
    if len(firsts) > 1:
        names = ", ".join(path.name for path in firsts[:3])
        raise CheckpointError(f"{place} has {len(firsts)} GGUF files ({names}...); name the one to use")
    return firsts[0] if firsts else None


@functools.cache  # weights and tokenizer both look for the model
def _tell_of_projector(path: Path) -> None:
    """Logs that a file is left out, once for each."""
    logger.info("%s is left out: it makes inputs of images or sound, which are not served", path)
