"""Reads uploads, which are forms: their files go to disk as they arrive, so a large one takes no memory."""

import asyncio
import re
import time
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from aiohttp import BodyPartReader, web

from chairlift.api.batches.directory import BatchDirectory
from chairlift.api.batches.shapes import FileObject
from chairlift.errors import InvalidRequest

_PURPOSE = "batch"
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_ROOM_EVERY_BYTES = 2**20  # that are written between two looks at the room
_LIFE_S = 30 * 86400  # of a file whose client does not say how long it is wanted
_SHORTEST_S, _LONGEST_S = 3600, 30 * 86400
_SECONDS = re.compile(r"[0-9]{1,9}")


async def read_upload(request: web.Request, directory: BatchDirectory, owner: str, timeout_s: float) -> FileObject:
    """Keeps the file of a form with the fields `file`, `purpose` and perhaps `expires_after`.

    InvalidRequest for a wrong form, `DirectoryFull` if there is no room. `timeout_s`: how long nothing may come.
    """
    if request.content_type != "multipart/form-data":
        raise web.HTTPUnsupportedMediaType(text="a file must be sent as Content-Type: multipart/form-data")
    await asyncio.to_thread(directory.check_room, owner, request.content_length or 0)
    upload = await asyncio.to_thread(directory.begin_upload, owner)
    try:
        name, fields = await _read_form(request, directory, owner, upload, timeout_s)
        record = _record(name, fields, upload.stat().st_size)
        await asyncio.to_thread(directory.add_file, owner, upload, record)
        return record
    finally:
        upload.unlink(missing_ok=True)


async def _read_form(
    request: web.Request, directory: BatchDirectory, owner: str, upload: Path, timeout_s: float
) -> tuple[str, dict[str, str]]:
    """Returns the name of the file, whose content is then in `upload`, and the other fields."""
    name: str | None = None
    fields: dict[str, str] = {}
    try:
        form = await request.multipart()
        while (part := await asyncio.wait_for(form.next(), timeout_s)) is not None:
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise InvalidRequest("the form has a part that is no field", "file")
            if len(fields) == _MAX_FIELDS:
                raise InvalidRequest(f"the form has more than {_MAX_FIELDS} fields")
            if part.name != "file":
                fields[part.name] = (await _read_field(part, timeout_s)).decode("utf-8", "replace")
            elif name is not None:
                raise InvalidRequest("file: one file at a time", "file")
            else:
                name = Path(part.filename or "requests.jsonl").name[:255]
                with upload.open("wb") as file:
                    await _store(part, file, directory, owner, timeout_s)
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"nothing of the file came for {timeout_s:g} s") from None
    except (ValueError, AssertionError) as error:  # of aiohttp, for a form that is cut or has no boundary
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(f"the form cannot be read: {error}", "file") from error
    if name is None:
        raise InvalidRequest("file: the form has none", "file")
    return name, fields


async def _read_field(part: BodyPartReader, timeout_s: float) -> bytes:
    value = b""
    while chunk := await asyncio.wait_for(part.read_chunk(), timeout_s):
        value += chunk
        if len(value) > _MAX_FIELD_BYTES:
            raise InvalidRequest(f"{part.name}: longer than {_MAX_FIELD_BYTES} bytes", part.name)
    return value


async def _store(part: BodyPartReader, file: BinaryIO, directory: BatchDirectory, owner: str, timeout_s: float) -> None:
    num_unchecked = 0
    while chunk := await asyncio.wait_for(part.read_chunk(2**16), timeout_s):
        await asyncio.to_thread(file.write, chunk)
        num_unchecked += len(chunk)
        if num_unchecked >= _ROOM_EVERY_BYTES:
            num_unchecked = 0
            await asyncio.to_thread(directory.check_room, owner)


def _record(name: str, fields: dict[str, str], num_bytes: int) -> FileObject:
    purpose = fields.get("purpose")
    if purpose != _PURPOSE:
        raise InvalidRequest(f"purpose: only {_PURPOSE!r} is served here, not {purpose!r}", "purpose")
    life_s = _LIFE_S
    if (seconds := fields.get("expires_after[seconds]")) is not None:
        if _SECONDS.fullmatch(seconds) is None or not _SHORTEST_S <= int(seconds) <= _LONGEST_S:
            raise InvalidRequest(
                f"expires_after: seconds must be {_SHORTEST_S} to {_LONGEST_S}, not {seconds}", "expires_after"
            )
        life_s = int(seconds)
    now = int(time.time())
    return FileObject(
        id=f"file-{uuid4().hex}",
        bytes=num_bytes,
        created_at=now,
        expires_at=now + life_s,
        filename=name,
        purpose="batch",
    )
