"""The page that shows a chat and the batch: `/` and its files, and `/watch`, the batch as it is, as server-sent events.

An event is a `chairlift.engine.stats.Snapshot` without the fields that have their default value. All watchers wait for
the same look at the engine, and nobody looks while nobody waits; each snapshot is serialized once. A watcher has no
queue of its own: it takes the newest snapshot when it has written the one before, so a slow one misses some and costs
nothing else. Nothing is sent while nothing changes. A stream that ends means that the engine is gone; who asks again
is told why.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import TypeAdapter

from chairlift.api.replies import EventStream
from chairlift.engine.stats import Snapshot, SnapshotSource

WATCH_PATH = "/watch"
MAX_WATCHERS = 64
SNAPSHOT_INTERVAL_S = 0.1

_FOLDER = Path(__file__).parent / "page_files"
_FILES = {"/" if path.name == "index.html" else f"/page/{path.name}": path for path in sorted(_FOLDER.iterdir())}

PAGE_PATHS = frozenset(_FILES)
"""What a browser fetches before anybody could have given it a key."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # kept, but asked for again: another version may be served from here tomorrow
}

_SNAPSHOTS = TypeAdapter(Snapshot)


def add_page_routes(app: web.Application, feed: "SnapshotFeed") -> None:
    """Serves the page, its files and its feed. The browser loads from this server only, and runs no inline script."""

    def serving(file: Path) -> Handler:
        async def serve(_: web.Request) -> web.FileResponse:
            return web.FileResponse(file, headers=_HEADERS)

        return serve

    async def watch(request: web.Request) -> web.StreamResponse:
        """Sends snapshots until the watcher leaves or the engine is gone. What fails before the first is raised."""
        stream = EventStream(request)
        with suppress(ConnectionError):  # the watcher left; nobody is there to be told
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
        self._due = 0.0  # the next look, in the loop's time
        self._snapshot: Snapshot | None = None
        self._event: str | None = None  # of that snapshot
        self.num_watchers = 0

    async def events(self) -> AsyncGenerator[str]:
        """For one watcher: the newest snapshot as an event, now and after each change, until the engine is gone.

        Raises `HTTPServiceUnavailable` if too many watch already, or what the engine says if there is no snapshot.
        """
        if self.num_watchers >= self._max_watchers:
            message = (
                f"{self.num_watchers} pages watch this server already, and no more may; close one, or try again later"
            )
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
            self._event = None  # who comes later is told, too
            if sent is None:
                raise
        finally:
            self.num_watchers -= 1
            if not self.num_watchers and self._look is not None:
                self._look.cancel()
                self._look = self._snapshot = self._event = None

    async def _next_look(self) -> str:
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._take_look(), name="chairlift-watch")
            self._look.add_done_callback(lambda look: look.cancelled() or look.exception())  # who waited may have left
        return await asyncio.shield(self._look)

    async def _take_look(self) -> str:
        """The same object as long as nothing changes."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        snapshot = await self._source.take_snapshot()
        self._due = loop.time() + self._interval_s
        if self._event is None or snapshot != self._snapshot:
            self._snapshot = snapshot
            self._event = f"data: {_SNAPSHOTS.dump_json(snapshot, exclude_defaults=True).decode()}\n\n"
        return self._event
