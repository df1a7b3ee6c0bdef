"""The user's cache directory, for what is made once and kept: compiled kernels, a converted model.

No other user may be able to write to it: libraries in it are executed.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "CHAIRLIFT_CACHE_DIR"

_DIGESTS = "sha256.json"  # of every other file in a kept folder, by name
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


def kept_folder(name: str, write: Callable[[Path], None]) -> Path:
    """A folder of the cache, which `write` fills with files when it is not there yet, or no longer whole.

    It gets its name when all of it is on the disk. Where several processes want it at once, one writes and the others
    wait. CacheUnusable if it cannot be kept; what `write` raises passes, unless it is an OSError.
    """
    if os.name == "nt":
        raise CacheUnusable("any directory on Windows, where this cannot see who may write to it")
    try:
        directory = cache_directory()
    except RuntimeError as error:
        raise CacheUnusable(f"the home directory, which is not known; set ${CACHE_VARIABLE}") from error
    folder = directory / name
    try:
        directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        with own_directory(directory):
            if not _is_whole(folder):
                with _locked(directory / f"{name}.lock"):
                    if not _is_whole(folder):  # another process may have written it meanwhile
                        _write_anew(folder, write)
    except OSError as error:
        raise CacheUnusable(f"{directory}: {error}; free space there, or set ${CACHE_VARIABLE}") from error
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl  # not on Windows

    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, stat.S_IRUSR | stat.S_IWUSR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system frees it if this process dies
        yield
    finally:
        os.close(lock)


def _is_whole(folder: Path) -> bool:
    try:
        digests = json.loads((folder / _DIGESTS).read_text(encoding="utf-8"))
        return all(digest_of(folder / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _write_anew(folder: Path, write: Callable[[Path], None]) -> None:
    if folder.exists():
        logger.warning("%s is damaged: it is written again", folder)
    partial = folder.with_name(f"{folder.name}.partial")
    for left_over in (folder, partial):  # the latter by a process that was killed
        if left_over.exists():
            shutil.rmtree(left_over)
    partial.mkdir(mode=stat.S_IRWXU)
    try:
        write(partial)
        digests = {path.name: digest_of(path) for path in sorted(partial.iterdir())}
        (partial / _DIGESTS).write_text(json.dumps(digests, indent=2), encoding="utf-8")
        for path in (*partial.iterdir(), partial):
            _sync(path)
        partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Has it on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
