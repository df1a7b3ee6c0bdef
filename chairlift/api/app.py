"""The application: its middlewares and its routes, and its shutdown."""

from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus

from aiohttp import web

from chairlift.api import ServerConfig
from chairlift.api.errors import ENDPOINTS, KNOWN_CONVENTIONS, Handler, error_middleware
from chairlift.api.http.access import Cors
from chairlift.api.http.connections import meet_expectation
from chairlift.api.http.event_stream import PULSE, Pulse
from chairlift.api.http.unread import UNREAD, UnreadReplies
from chairlift.api.pages import PAGE_PATHS, WATCH_PATH, SnapshotFeed, add_page_routes
from chairlift.api.protocols import CONVENTIONS, all_routes
from chairlift.api.service import Service, SharedState
from chairlift.api.telemetry.log import log_request
from chairlift.api.telemetry.observer import Observer
from chairlift.api.telemetry.traces import Tracing
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import EngineClosed

ROUTES = all_routes()

_OPEN_PATHS = PAGE_PATHS | {route.path for route in ROUTES if route.is_open}
_TOLD_PATHS = {route.path for route in ROUTES} | {"/", WATCH_PATH}  # named in metrics and the log


class Api:
    """The HTTP server's application. One model, one engine."""

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServerConfig = ServerConfig(),  # noqa: B008 - frozen
        shared: SharedState | None = None,
    ) -> None:
        """`shared` None: it is the only server. `ConfigurationError` if keys or origins are wrong."""
        self._llm = llm
        self.service = Service(llm, config, shared or SharedState.alone(llm, config), _OPEN_PATHS)
        self.keys = self.service.keys
        self.cors = Cors(config.allowed_origin, config.allowed_host)
        self._unread = UnreadReplies(config.max_unread_bytes, lambda request: self.keys.client_of(request).name)
        self.pulse = Pulse()
        self.is_draining = False  # requests are refused
        self.num_active = 0  # requests between their headers and the last byte of their replies

    def make_app(self) -> web.Application:
        """The application, for a runner with `handler_cancellation=True`, which notices clients that leave."""
        middlewares = [error_middleware, self._unread.middleware, self.keys.middleware, self._count_active]
        app = web.Application(middlewares=middlewares)
        app[UNREAD], app[PULSE] = self._unread, self.pulse
        app[ENDPOINTS] = ", ".join(f"{route.method} {route.path}" for route in ROUTES)
        app[KNOWN_CONVENTIONS] = CONVENTIONS
        app.on_response_prepare.append(self.service.bodies.release)
        app.cleanup_ctx.append(self._close_threads)
        for route in ROUTES:
            methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
            for method in methods:
                # A model's name may hold slashes, as hub ids do.
                path = route.path.replace("{model}", "{model:.+}")
                handler: Handler = partial(route.handle, self.service)
                app.router.add_route(method, path, handler, expect_handler=meet_expectation)
        add_page_routes(app, SnapshotFeed(self._llm))
        if self.service.root_path:  # below it all is served; the page's own links are relative to a last slash
            app.router.add_get(self.service.root_path, _add_slash)
        tracing = Tracing(self.service.names[0])
        counts = self.service.counts
        Observer(_TOLD_PATHS, tracing.span, counts.note_response, [counts.note_request, log_request]).install(app)
        self.cors.install(app)
        return app

    def leave(self) -> None:
        """Lets /health say that the server is shutting down. Requests are still served."""
        self.service.is_leaving = True

    def drain(self) -> None:
        """Accepts no more requests, and drops those whose bodies are incomplete."""
        self.leave()
        self.is_draining = True
        self.service.bodies.close()

    @web.middleware
    async def _count_active(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts POST requests, and refuses them when the engine is dead or the server shuts down."""
        if request.method != "POST":
            return await handler(request)
        if self._llm.death is not None:
            raise EngineClosed(f"the engine died: {self._llm.death}")
        if self.is_draining:
            raise EngineClosed("the server is shutting down; try again later, or another server")
        self.num_active += 1
        try:
            return await handler(request)
        finally:
            self.num_active -= 1
            await self.service.bodies.release(request)

    async def _close_threads(self, _: web.Application) -> AsyncIterator[None]:
        yield
        self.service.close()


async def _add_slash(request: web.Request) -> web.Response:
    return web.Response(status=HTTPStatus.PERMANENT_REDIRECT, headers={"Location": f"{request.path}/"})
