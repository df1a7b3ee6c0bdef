"""The page that shows a chat and the batch: `/` and its files, and `/watch`, which streams the state of the batch as
server-sent events.

An event is a `chairlift.engine.journal.Snapshot` without the fields that have their default value. All watchers share
one snapshot, which is read only while someone watches, and serialized once. A watcher has no queue: when it has
written one snapshot it takes the newest, so a slow watcher misses some and costs nothing else. Nothing is sent while
nothing changes. A stream ends when the engine is gone; the next request gets the reason.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter

from chairlift.api.http.event_stream import EventStream
from chairlift.engine.journal import Snapshot, SnapshotSource

WATCH_PATH = "/watch"
MAX_WATCHERS = 64
SNAPSHOT_INTERVAL_S = 0.1

_FOLDER = Path(__file__).parent / "page_files"
_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.is_file()
}

PAGE_PATHS = frozenset(_FILES)
"""Paths that a browser fetches before the user can enter a key."""

# Nothing may turn text into markup or scripts: the page makes its elements one by one, also those of Markdown.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_PAGE_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # cached, but always revalidated: another version may be served from here tomorrow
}

_SNAPSHOTS = TypeAdapter(Snapshot)


def add_page_routes(app: web.Application, feed: "SnapshotFeed") -> None:
    """Serves the page, its files and its feed. The browser loads from this server only, and runs no inline script."""

    def serving(file: Path) -> Handler:
        async def serve(_: web.Request) -> web.FileResponse:
            return web.FileResponse(file, headers=_PAGE_HEADERS)

        return serve

    async def watch(request: web.Request) -> web.StreamResponse:
        """Sends snapshots until the watcher leaves or the engine is gone. An error before the first one is raised."""
        stream = EventStream(request)
        with suppress(ConnectionError):  # the watcher left
            async with stream, aclosing(feed.events()) as events:
                async for event in events:
                    await stream.send(event)
            await stream.close()
        return stream.response

    for path, file in _FILES.items():
        app.router.add_get(path, serving(file))
    app.router.add_get(WATCH_PATH, watch, allow_head=False)


class SnapshotFeed:
    """Snapshots of one engine for any number of watchers up to a limit. Used from one event loop."""

    def __init__(
        self, source: SnapshotSource, max_watchers: int = MAX_WATCHERS, interval_s: float = SNAPSHOT_INTERVAL_S
    ) -> None:
        self._source = source
        self._max_watchers = max_watchers
        self._interval_s = interval_s
        self._look: asyncio.Task[str] | None = None  # the newest one, which all watchers wait for
        self._due = 0.0  # when the next one may be read, in the loop's time
        self._snapshot: Snapshot | None = None
        self._event: str | None = None  # that snapshot, serialized
        self.num_watchers = 0

    async def events(self) -> AsyncGenerator[str]:
        """For one watcher: the newest snapshot as an event, now and after each change, until the engine is gone.

        Raises `HTTPServiceUnavailable` if too many watch already, or the engine's error if there is no snapshot.
        """
        if self.num_watchers >= self._max_watchers:
            message = f"{self.num_watchers} pages watch this server already, the limit; close one, or try again later"
            raise web.HTTPServiceUnavailable(text=message)
        self.num_watchers += 1
        sent: str | None = None
        try:
            newest = self._event or await self._next_look()
            while True:
                yield newest
                sent = newest
                while newest is sent:
                    newest = await self._next_look()
        except Exception:
            self._event = None  # so that later watchers get the error, too
            if sent is None:
                raise
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._look is not None:
                self._look.cancel()
                self._look = self._snapshot = self._event = None

    async def _next_look(self) -> str:
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._read_look(), name="chairlift-watch")
            self._look.add_done_callback(lambda look: look.cancelled() or look.exception())  # watchers may have left
        return await asyncio.shield(self._look)

    async def _read_look(self) -> str:
        """The newest snapshot as an event; the same object as long as nothing changes."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        snapshot = await self._source.read_snapshot()
        self._due = loop.time() + self._interval_s
        if self._event is None or snapshot != self._snapshot:
            self._snapshot = snapshot
            self._event = f"data: {_SNAPSHOTS.dump_json(snapshot, exclude_defaults=True).decode()}\n\n"
        return self._event
