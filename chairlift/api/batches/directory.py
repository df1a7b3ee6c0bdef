"""The directory of files and batches. Each owner has folders of its own; what a server or worker changes in them the
others see, and a killed one leaves nothing half written.

    OWNER/files/ID.json, ID.data    a file, and its content
    OWNER/batches/ID.json           a batch; beside it ID.cancel, if its client cancelled it
"""

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from filelock import FileLock, Timeout
from pydantic import BaseModel

from chairlift.api.batches.shapes import OVER, Batch, FileObject
from chairlift.api.settings import ServerConfig
from chairlift.errors import ConfigurationError

_NO_OWNER = "everyone"  # the folder of clients without keys
_ID = re.compile(r"(file-|batch_)[0-9a-z-]{1,48}")
_ABANDONED_S = 24 * 3600.0  # after which an upload that never ended is removed
_BATCH_LIFE_S = 60 * 86400  # after which a batch that is over is forgotten
_Record = TypeVar("_Record", bound=BaseModel)


class UnknownId(LookupError):
    """No such file or batch of this owner."""


class DirectoryFull(Exception):
    """The files take all bytes that they may."""


@contextlib.contextmanager
def claim_directory(config: ServerConfig) -> Iterator[ServerConfig]:
    """Makes the directory of batches for a server and all its workers, a temporary one if none is configured.

    Yields the configuration that names it. `ConfigurationError` if it cannot be used, or another server uses it.
    """
    if not config.max_batch_bytes:
        yield config.model_copy(update={"batch_dir": None})
    elif config.batch_dir is None:
        with tempfile.TemporaryDirectory(prefix="chairlift-batches-", ignore_cleanup_errors=True) as path:
            yield config.model_copy(update={"batch_dir": Path(path)})
    else:
        try:
            config.batch_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            with FileLock(config.batch_dir / "server.lock").acquire(blocking=False):
                yield config
        except Timeout as error:
            raise ConfigurationError(f"batch_dir {config.batch_dir} is in use by another server") from error
        except OSError as error:
            raise ConfigurationError(f"batch_dir {config.batch_dir} cannot be used: {error.strerror}") from error


class BatchDirectory:
    """Files and batches by owner. Its methods block; usable from any thread and process."""

    def __init__(self, path: Path, max_bytes: int, max_bytes_of_one: int | None = None) -> None:
        """`max_bytes`: of all files together; `max_bytes_of_one`: of one owner's."""
        self.path, self._max_bytes = path, max_bytes
        self._max_bytes_of_one = max_bytes if max_bytes_of_one is None else max_bytes_of_one

    def check_room(self, owner: str, num_new: int = 0) -> None:
        """`DirectoryFull` unless this owner may have so many more bytes."""
        own = _num_bytes(self._home(owner))
        if own + num_new > self._max_bytes_of_one or _num_bytes(self.path) + num_new > self._max_bytes:
            raise DirectoryFull(
                f"the files of batches would take more than {min(self._max_bytes, self._max_bytes_of_one)} bytes;"
                " delete some, or start the server with a larger --max-batch-bytes"
            )

    def begin_upload(self, owner: str) -> Path:
        """Returns an empty file to write an upload to."""
        folder = self._folder(owner, "files")
        path = folder / f"{uuid4().hex}.upload"
        path.touch(mode=0o600)
        return path

    def add_file(self, owner: str, upload: Path, record: FileObject) -> None:
        """Makes a written file one that can be found."""
        os.replace(upload, self.content_path(owner, record.id))
        self._write(self._folder(owner, "files"), record.id, record)

    def file(self, owner: str, file_id: str) -> FileObject:
        """`UnknownId` if there is none, or it has expired."""
        record = self._read(self._folder(owner, "files"), file_id, FileObject)
        if record.expires_at is not None and record.expires_at <= time.time():
            raise UnknownId(file_id)
        return record

    def files(self, owner: str) -> list[FileObject]:
        """The newest first."""
        now = time.time()
        records = self._read_all(self._folder(owner, "files"), FileObject)
        current = [record for record in records if record.expires_at is None or record.expires_at > now]
        return sorted(current, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete_file(self, owner: str, file_id: str) -> None:
        """`UnknownId` if there is none."""
        self.file(owner, file_id)
        (self._folder(owner, "files") / f"{file_id}.json").unlink(missing_ok=True)
        self.content_path(owner, file_id).unlink(missing_ok=True)

    def content_path(self, owner: str, file_id: str) -> Path:
        """The place of a file's content."""
        return self._folder(owner, "files") / f"{_checked(file_id)}.data"

    def keep_batch(self, owner: str, batch: Batch) -> None:
        """Writes a batch that is new, or has changed. Only who runs batches may change one."""
        self._write(self._folder(owner, "batches"), batch.id, batch)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """`UnknownId` if there is none."""
        return self._with_wish(owner, self._read(self._folder(owner, "batches"), batch_id, Batch))

    def batches(self, owner: str) -> list[Batch]:
        """The newest first."""
        records = [self._with_wish(owner, each) for each in self._read_all(self._folder(owner, "batches"), Batch)]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def ask_to_cancel(self, owner: str, batch_id: str) -> Batch:
        """Has a batch cancelled that is not over. Returns it as it is then. `UnknownId` if there is none."""
        self.batch(owner, batch_id)
        self._wish(owner, batch_id).touch(mode=0o600)
        return self.batch(owner, batch_id)

    def is_to_be_cancelled(self, owner: str, batch_id: str) -> bool:
        """Returns true if the client wants no more of it."""
        return self._wish(owner, batch_id).exists()

    def owners(self) -> list[str]:
        """All who have a folder here."""
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
        return ["" if name == _NO_OWNER else name for name in names]

    def unfinished(self, owner: str) -> list[Batch]:
        """The owner's batches that are not over, the oldest first."""
        return [batch for batch in reversed(self.batches(owner)) if batch.status not in OVER]

    def remove_expired(self) -> None:
        """Removes files whose time is over, uploads that never ended, and batches that were over long ago."""
        now = time.time()
        for owner in self.owners():
            folder = self._folder(owner, "files")
            for record in self._read_all(folder, FileObject):
                if record.expires_at is not None and record.expires_at <= now:
                    (folder / f"{record.id}.json").unlink(missing_ok=True)
                    (folder / f"{record.id}.data").unlink(missing_ok=True)
            for path in folder.glob("*.upload"):
                with contextlib.suppress(FileNotFoundError):
                    if now - path.stat().st_mtime > _ABANDONED_S:
                        path.unlink()
            for batch in self._read_all(self._folder(owner, "batches"), Batch):
                if batch.status in OVER and now - batch.created_at > _BATCH_LIFE_S:
                    (self._folder(owner, "batches") / f"{batch.id}.json").unlink(missing_ok=True)
                    self._wish(owner, batch.id).unlink(missing_ok=True)

    def _with_wish(self, owner: str, batch: Batch) -> Batch:
        if batch.status in OVER:
            return batch
        with contextlib.suppress(FileNotFoundError):
            asked_at = int(self._wish(owner, batch.id).stat().st_mtime)
            return batch.model_copy(update={"status": "cancelling", "cancelling_at": asked_at})
        return batch

    def _wish(self, owner: str, batch_id: str) -> Path:
        return self._folder(owner, "batches") / f"{_checked(batch_id)}.cancel"

    def _home(self, owner: str) -> Path:
        return self.path / (owner or _NO_OWNER)

    def _folder(self, owner: str, kind: str) -> Path:
        folder = self._home(owner) / kind
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def _write(self, folder: Path, name: str, record: BaseModel) -> None:
        aside = folder / f"{_checked(name)}.{uuid4().hex}.new"
        with open(os.open(aside, os.O_CREAT | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(record.model_dump_json())
        os.replace(aside, folder / f"{name}.json")

    def _read(self, folder: Path, name: str, kind: type[_Record]) -> _Record:
        try:
            return kind.model_validate_json((folder / f"{_checked(name)}.json").read_bytes())
        except FileNotFoundError:
            raise UnknownId(name) from None

    def _read_all(self, folder: Path, kind: type[_Record]) -> list[_Record]:
        records = []
        for path in folder.glob("*.json"):
            with contextlib.suppress(UnknownId):  # just deleted
                records.append(self._read(folder, path.stem, kind))
        return records


def _checked(name: str) -> str:
    """The id of a file or batch, which then names no other place. `UnknownId` for anything else."""
    if _ID.fullmatch(name) is None:
        raise UnknownId(name)
    return name


def _num_bytes(path: Path) -> int:
    total = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(path) as entries:  # others may delete
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += _num_bytes(Path(entry.path)) if entry.is_dir() else entry.stat().st_size
    return total
