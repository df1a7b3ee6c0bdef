"""The user's cache directory, for what is made once and kept: compiled kernels.

No other user may be able to write to it: libraries in it are executed.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "CHAIRLIFT_CACHE_DIR"

_ROOT = 0


class CacheUnusable(Exception):
    """Nothing can be kept there. The message begins with the directory, and says what to do."""


def cache_directory() -> Path:
    """$CHAIRLIFT_CACHE_DIR, or `chairlift` in the user's cache directory. RuntimeError if there is no home."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"


def is_own(info: os.stat_result) -> bool:
    """True for what belongs to this user, or to root, who can change everything anyway."""
    return info.st_uid in (os.geteuid(), _ROOT)


@contextlib.contextmanager
def own_directory(path: Path) -> Iterator[int]:
    """A descriptor of the directory, if no other user can write to it. FileNotFoundError if there is none."""
    refusal = f"{path}: %s; delete it, or name another in ${CACHE_VARIABLE}"
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise CacheUnusable(refusal % reason) from error
    try:
        info = os.fstat(directory)
        if not is_own(info):
            raise CacheUnusable(refusal % "it belongs to another user")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise CacheUnusable(refusal % "other users can write to it, and may have")
        if info.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and info.st_uid == os.geteuid():
            os.fchmod(directory, stat.S_IRWXU)
        yield directory
    finally:
        os.close(directory)
