"""The endpoints of files and batches."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import TypeVar
from uuid import uuid4

from aiohttp import web

from chairlift.api.batches.directory import BatchDirectory, DirectoryFull, UnknownId
from chairlift.api.batches.shapes import (
    Batch,
    BatchBody,
    BatchList,
    DeletedFile,
    FileList,
    FileObject,
    ListPage,
    RequestCounts,
)
from chairlift.api.batches.uploads import read_upload
from chairlift.api.endpoints import json_reply
from chairlift.api.routes import Handle, Route
from chairlift.api.service import Service
from chairlift.errors import InvalidRequest

_MAX_LISTED = 100
_DEFAULT_LISTED = 20
_OFF = "this server keeps no files and batches; it was started with --max-batch-bytes 0"
_Page = TypeVar("_Page", bound=ListPage)


def _with_directory(
    handle: Callable[[Service, BatchDirectory, str, web.Request], Awaitable[web.StreamResponse]],
) -> Handle:
    """Handles an endpoint with the directory and the client's name in it; 404 for what is not there."""

    @wraps(handle)
    async def handle_with_directory(service: Service, request: web.Request) -> web.StreamResponse:
        if service.batches is None:
            raise web.HTTPNotFound(text=_OFF)
        owner = service.keys.client_of(request).owner
        try:
            return await handle(service, service.batches, owner, request)
        except UnknownId as error:
            raise web.HTTPNotFound(text=f"there is no {error.args[0]!r} here, or no longer") from None
        except DirectoryFull as error:
            raise web.HTTPInsufficientStorage(text=str(error)) from None

    return handle_with_directory


@_with_directory
async def _upload(service: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    return json_reply(await read_upload(request, directory, owner, service.client_timeout))


@_with_directory
async def _list_files(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    files, purpose = await asyncio.to_thread(directory.files, owner), request.query.get("purpose")
    return json_reply(_page_of(FileList, request, [each for each in files if purpose in (None, each.purpose)], 10_000))


@_with_directory
async def _find_file(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    return json_reply(await asyncio.to_thread(directory.file, owner, request.match_info["id"]))


@_with_directory
async def _content(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.StreamResponse:
    record = await asyncio.to_thread(directory.file, owner, request.match_info["id"])
    headers = {"Content-Type": "application/octet-stream", "X-Content-Type-Options": "nosniff"}
    return web.FileResponse(directory.content_path(owner, record.id), headers=headers)


@_with_directory
async def _delete_file(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    file_id = request.match_info["id"]
    await asyncio.to_thread(directory.delete_file, owner, file_id)
    return json_reply(DeletedFile(id=file_id))


@_with_directory
async def _create(service: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    body = await service.read_body(request, BatchBody)

    def create() -> Batch:
        try:
            file = directory.file(owner, body.input_file_id)
        except UnknownId:
            raise InvalidRequest(f"input_file_id: there is no file {body.input_file_id!r}", "input_file_id") from None
        if file.purpose != "batch":
            raise InvalidRequest("input_file_id: a batch needs a file with the purpose 'batch'", "input_file_id")
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + body.window_s,
            request_counts=RequestCounts(),
            metadata=body.metadata,
        )
        directory.keep_batch(owner, batch)
        return batch

    return json_reply(await asyncio.to_thread(create))


@_with_directory
async def _list_batches(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    batches = await asyncio.to_thread(directory.batches, owner)
    return json_reply(_page_of(BatchList, request, batches, _MAX_LISTED))


@_with_directory
async def _find_batch(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    return json_reply(await asyncio.to_thread(directory.batch, owner, request.match_info["id"]))


@_with_directory
async def _cancel(_: Service, directory: BatchDirectory, owner: str, request: web.Request) -> web.Response:
    return json_reply(await asyncio.to_thread(directory.ask_to_cancel, owner, request.match_info["id"]))


def _page_of(kind: type[_Page], request: web.Request, items: Sequence[FileObject | Batch], most: int) -> _Page:
    """Makes the part of a list that the query asks for."""
    order, after = request.query.get("order", "desc"), request.query.get("after")
    limit = request.query.get("limit", str(_DEFAULT_LISTED if most == _MAX_LISTED else most))
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit) <= most):
        raise InvalidRequest(f"limit: 1 to {most}, not {limit}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order: asc or desc, not {order}", "order")
    ordered = list(items) if order == "desc" else list(reversed(items))
    ids = [item.id for item in ordered]
    if after is not None and after not in ids:
        raise InvalidRequest(f"after: there is no {after!r} in this list", "after")
    begin = 0 if after is None else ids.index(after) + 1
    return kind.of(ordered[begin : begin + int(limit)], has_more=begin + int(limit) < len(ordered))


_FILE, _BATCH = "/v1/files/{id}", "/v1/batches/{id}"
ROUTES = (
    Route(
        "POST",
        "/v1/files",
        "upload_file",
        "Keep a file of requests, sent as a form",
        _upload,
        FileObject,
    ),
    Route("GET", "/v1/files", "files", "The client's files", _list_files, FileList),
    Route("GET", _FILE, "file", "A file, without its content", _find_file, FileObject),
    Route("GET", f"{_FILE}/content", "file_content", "The content of a file", _content),
    Route("DELETE", _FILE, "delete_file", "Forget a file", _delete_file, DeletedFile),
    Route(
        "POST", "/v1/batches", "create_batch", "Answer each line of a file, at idle priority", _create, Batch, BatchBody
    ),
    Route("GET", "/v1/batches", "batches", "The client's batches", _list_batches, BatchList),
    Route("GET", _BATCH, "batch", "A batch, and how far it has come", _find_batch, Batch),
    Route("POST", f"{_BATCH}/cancel", "cancel_batch", "Make no more requests of a batch", _cancel, Batch),
)
