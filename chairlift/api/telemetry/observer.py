"""Observes every request and every reply, for the metrics, the log and traces."""

import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager

from aiohttp import web

from chairlift.api.telemetry.observation import OBSERVATION, Observation
from chairlift.api.telemetry.request_ids import HEADERS_OF_IDS, request_id_of

OTHER_PATH = "other"
"""Stands for paths that are not the server's, and for the files of the page."""


class Observer:
    """Observes every request and every reply, for the metrics, the log and traces."""

    def __init__(
        self,
        paths: Collection[str],
        span: Callable[[web.Request, Observation], AbstractContextManager[None]],
        note_response: Callable[[str, int], None],
        note_end: Sequence[Callable[[Observation], None]],
    ) -> None:
        """`paths`: those with labels of their own; `span` surrounds a request; `note_response`: a path and a status."""
        self._paths = frozenset(paths)
        self._span = span
        self._note_response = note_response
        self._note_end = note_end

    def install(self, app: web.Application) -> None:
        """Must be the outermost middleware, to see what the others make of errors."""
        app.middlewares.insert(0, self._observe)
        app.on_response_prepare.append(self._begin_reply)

    @web.middleware
    async def _observe(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        observation = Observation(request_id_of(request), self._path_of(request), time.perf_counter())
        request[OBSERVATION] = observation
        with self._span(request, observation):
            try:
                response = await handler(request)
                observation.status = response.status
                return response
            finally:
                observation.end = time.perf_counter()
                for note in self._note_end:
                    note(observation)

    async def _begin_reply(self, request: web.Request, response: web.StreamResponse) -> None:
        """A signal handler, because streams begin before their handlers return, and some errors bypass middlewares."""
        for name in HEADERS_OF_IDS:
            response.headers[name] = request_id_of(request)
        self._note_response(self._path_of(request), response.status)
        if OBSERVATION in request:
            request[OBSERVATION].status = response.status

    def _path_of(self, request: web.Request) -> str:
        """The path of the route, so that clients cannot create labels."""
        resource = request.match_info.route.resource
        path = OTHER_PATH if resource is None else resource.canonical
        return path if path in self._paths else OTHER_PATH
