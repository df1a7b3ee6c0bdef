"""The directory that holds caches: whose it is, its secret, and what is in it.

    DIR/secret          32 random bytes, from which all keys follow
    DIR/lock            held by who evicts
    DIR/<identity>/     a cache: what was computed by the same model in the same way
        cache.json      what its identity is made of, to be read by people
        ...             its files, see `folder.py`

All of it can be read by its owner only. Nothing in it is encrypted.
"""

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from secrets import token_bytes, token_hex

from chairlift.disk.entry import SCRATCH
from chairlift.errors import ConfigurationError

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
FACTS_FILE = "cache.json"
IDENTITY_BYTES = 16

_SECRET_FILE, _LOCK_FILE = "secret", "lock"


def identity_of(facts: Mapping[str, str]) -> str:
    """Returns the name of the cache with these facts: 32 hexadecimal digits."""
    text = json.dumps(dict(facts), sort_keys=True)
    return blake2b(text.encode(), digest_size=IDENTITY_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of a cache."""

    path: Path
    num_bytes: int
    used_ns: int  # when it was last used, in nanoseconds since the epoch


@dataclass(frozen=True, slots=True)
class CacheSummary:
    """A cache in a directory, as `chairlift cache` lists it."""

    identity: str
    facts: Mapping[str, str] = field(default_factory=dict)  # empty if nobody can read them any more
    num_files: int = 0
    num_bytes: int = 0
    used_at: float = 0.0  # seconds since the epoch; 0 if it is empty


class PrefixRoot:
    """A directory of caches. It may be used by several processes at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> bytes:
        """Makes the directory if there is none, and returns its secret.

        ConfigurationError if others may write to it; OSError if it cannot be made or read.
        """
        self.path.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        self.check_owner()
        secret = self._read_secret()
        if len(secret) == SECRET_BYTES:
            return secret
        if secret:  # the machine lost power, or somebody changed it: all files are of no use then
            logger.warning("%s is damaged, so everything saved before is lost", self.path / _SECRET_FILE)
            (self.path / _SECRET_FILE).unlink(missing_ok=True)
        self._make_secret()
        return self._read_secret()

    @property
    def has_secret(self) -> bool:
        """False if the directory is gone, or was emptied."""
        return (self.path / _SECRET_FILE).is_file()

    def check_owner(self) -> None:
        """ConfigurationError if the directory is another user's, or others may write to it. OSError if it is gone."""
        info = self.path.stat()
        if info.st_uid != os.geteuid():
            raise ConfigurationError(f"prefix_cache_dir: {self.path} belongs to another user; name one of your own")
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"prefix_cache_dir: other users can write to {self.path}, and could change what is computed;"
                f" chmod 700 it, or name another"
            )

    def folder_of(self, facts: Mapping[str, str]) -> Path:
        """Returns the directory of the cache with these facts, which is made if there is none. OSError if it fails."""
        path = self.path / identity_of(facts)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        if not (path / FACTS_FILE).exists():
            aside = path / f"{FACTS_FILE}.{token_hex(4)}{SCRATCH}"
            aside.write_text(json.dumps(dict(facts), indent=2, sort_keys=True) + "\n", encoding="utf-8")
            aside.chmod(stat.S_IRUSR | stat.S_IWUSR)
            aside.replace(path / FACTS_FILE)
        return path

    def folders(self) -> Iterator[Path]:
        """Iterates over the directories of all caches. OSError if the directory cannot be read."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                if _is_identity(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield Path(entry.path)

    def summarize(self) -> list[CacheSummary]:
        """Summarizes all caches, the one used last first. OSError if the directory cannot be read."""
        found = []
        for path in self.folders():
            files = list(files_of(path))
            used_ns = max((each.used_ns for each in files), default=0)
            num_bytes = sum(each.num_bytes for each in files)
            found.append(CacheSummary(path.name, _read_facts(path), len(files), num_bytes, used_ns / 1e9))
        return sorted(found, key=lambda each: -each.used_at)

    def remove(self, identity: str) -> None:
        """Removes a cache with all its files. OSError if that fails."""
        path = self.path / identity
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries]
        for name in names:
            (path / name).unlink(missing_ok=True)
        path.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Holds the lock of those who evict, if nobody else does; false otherwise. OSError if there can be no lock."""
        import fcntl  # where there is none, nothing can be locked: an ImportError then

        descriptor = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)

    def _read_secret(self) -> bytes:
        """Returns nothing if there is none."""
        try:
            return (self.path / _SECRET_FILE).read_bytes()[: SECRET_BYTES + 1]
        except FileNotFoundError:
            return b""

    def _make_secret(self) -> None:
        """Makes the file, unless another process does so first."""
        aside = self.path / f"{_SECRET_FILE}.{token_hex(4)}{SCRATCH}"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(token_bytes(SECRET_BYTES))
                file.flush()
                os.fsync(descriptor)  # without it, everything else is lost
            with contextlib.suppress(FileExistsError):
                os.link(aside, self.path / _SECRET_FILE)
        finally:
            aside.unlink(missing_ok=True)


def files_of(folder: Path) -> Iterator[CacheFile]:
    """Iterates over the files of a cache, those included that are being written. OSError if it cannot be read."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == FACTS_FILE:
                continue
            with contextlib.suppress(FileNotFoundError):  # another process has removed it just now
                info = entry.stat(follow_symlinks=False)
                yield CacheFile(Path(entry.path), info.st_size, info.st_mtime_ns)


def _is_identity(name: str) -> bool:
    return len(name) == 2 * IDENTITY_BYTES and set(name) <= set("0123456789abcdef")


def _read_facts(folder: Path) -> dict[str, str]:
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}
