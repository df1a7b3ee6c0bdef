"""Endpoints as values: what the application serves, what needs no key, and what its description says."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

from chairlift.api.http.access import Client
from chairlift.api.jobs import Job, JobMaker
from chairlift.api.service import Service
from chairlift.api.wire.body import ModelBody
from chairlift.api.wire.errors import ErrorBody

_Body = TypeVar("_Body", bound=ModelBody)

Handle = Callable[[Service, web.Request], Awaitable[web.StreamResponse]]
"""Serves a request."""


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint."""

    method: str
    path: str
    name: str  # in the description for programs
    summary: str
    handle: Handle
    reply: type[BaseModel] | None = None  # None: not JSON of a fixed shape
    body: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None  # of a streamed reply
    error: type[BaseModel] = ErrorBody
    is_open: bool = False  # needs no key: load balancers ask for it, or it reveals no secret
    key_header: str | None = None  # which may hold the key, too


def generating(body_type: type[_Body], read: Callable[[JobMaker, _Body, Client], Job]) -> Handle:
    """Handles an endpoint that generates. `read` makes a job of a body, in a worker's thread."""

    async def handle(service: Service, request: web.Request) -> web.StreamResponse:
        return await service.generate(request, body_type, read)

    return handle


def at_once(body_type: type[_Body], make_reply: Callable[[JobMaker, _Body], BaseModel]) -> Handle:
    """Handles an endpoint that answers without the engine. `make_reply` is called in a worker's thread."""

    async def handle(service: Service, request: web.Request) -> web.StreamResponse:
        return await service.answer_at_once(request, body_type, make_reply)

    return handle
