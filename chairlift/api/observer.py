"""Sees every request come and every reply go, and tells the log, the metrics and the trace."""

import time

from aiohttp import web

from chairlift.api.errors import Handler
from chairlift.api.metrics import Metrics
from chairlift.api.observation import OBSERVATION, Observation
from chairlift.api.request_ids import mark_response, request_id_of
from chairlift.api.request_log import log_request
from chairlift.api.routes import ROUTES
from chairlift.api.tracing import Tracing
from chairlift.api.watch import WATCH_PATH

OTHER_PATH = "other"
"""What stands for paths that are none of the server's, and for the files of the page."""

_PATHS = {route.path for route in ROUTES} | {"/", WATCH_PATH}


class Observer:
    """Watches over one application's requests."""

    def __init__(self, metrics: Metrics, tracing: Tracing) -> None:
        self._metrics = metrics
        self._tracing = tracing

    def install(self, app: web.Application) -> None:
        """Before any other middleware, as it wants to see what they make of errors."""
        app.middlewares.insert(0, self._observe)
        app.on_response_prepare.append(mark_response)
        app.on_response_prepare.append(self._count)

    @web.middleware
    async def _observe(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        observation = Observation(request_id_of(request), _path_of(request), time.perf_counter())
        request[OBSERVATION] = observation
        with self._tracing.span(request, observation):
            try:
                response = await handler(request)
                observation.status = response.status
                return response
            finally:
                observation.end = time.perf_counter()
                self._metrics.note_request(observation)
                log_request(observation)

    async def _count(self, request: web.Request, response: web.StreamResponse) -> None:
        """A reply begins, which a stream does long before its handler returns."""
        self._metrics.note_response(_path_of(request), response.status)
        if OBSERVATION in request:
            request[OBSERVATION].status = response.status


def _path_of(request: web.Request) -> str:
    """The path of the route: clients cannot make up new ones."""
    resource = request.match_info.route.resource
    path = OTHER_PATH if resource is None else resource.canonical
    return path if path in _PATHS else OTHER_PATH
