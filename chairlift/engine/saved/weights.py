"""Digests of a checkpoint's weights, which tell two models apart wherever their files are.

Every byte counts: a model with one changed row gives other keys and values for prompts with that token. Reading all of
them takes about as long as loading the model, so a digest is remembered in the directory of prefixes, until the file's
size, time or place on its disk changes.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from chairlift.disk.entry import SCRATCH

logger = logging.getLogger(__name__)

_MEMORY_FILE = "weights.json"
_PIECE_BYTES = 32 * 2**20
_MAX_REMEMBERED = 1000


def digest_files(paths: Sequence[Path], memory: Path, num_threads: int) -> str:
    """Returns a digest of the contents of these files, in order. OSError if one cannot be read.

    `memory`: the directory in which digests are remembered.
    """
    known = _recall(memory)
    digests = {}
    for path in paths:
        info = path.stat()
        name = f"{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}:{info.st_ctime_ns}"
        digests[name] = known.get(name) or _digest(path, info.st_size, num_threads)
    if not digests.keys() <= known.keys():
        _remember(memory, known | digests)
    return sha256("".join(digests.values()).encode()).hexdigest()


def _digest(path: Path, size: int, num_threads: int) -> str:
    """Hashes pieces of a file in several threads, and then their digests."""

    def digest_piece(offset: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return sha256(b"".join(_read(file.fileno(), min(_PIECE_BYTES, size - offset)))).digest()

    with ThreadPoolExecutor(num_threads) as threads:
        return sha256(b"".join(threads.map(digest_piece, range(0, size, _PIECE_BYTES)))).hexdigest()


def _read(descriptor: int, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (piece := os.read(descriptor, num_bytes)):
        num_bytes -= len(piece)
        yield piece


def _recall(memory: Path) -> dict[str, str]:
    try:
        known = json.loads((memory / _MEMORY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: each for name, each in known.items() if isinstance(each, str)} if isinstance(known, dict) else {}


def _remember(memory: Path, known: dict[str, str]) -> None:
    """Keeps the newest digests. That the directory cannot be written to is said when prefixes are written."""
    newest = dict(list(known.items())[-_MAX_REMEMBERED:])
    aside = memory / f"{_MEMORY_FILE}.{token_hex(4)}{SCRATCH}"
    try:
        aside.write_text(json.dumps(newest), encoding="utf-8")
        aside.replace(memory / _MEMORY_FILE)
    except OSError as error:
        logger.debug("digests of weights are not remembered: %s", error)
