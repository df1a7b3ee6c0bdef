"""`/watch`: the batch as it is, as server-sent events of `chairlift.engine.snapshot.Snapshot`.

One task looks at the engine, and only while somebody watches; each snapshot is serialized once, whoever watches. A
watcher has no queue of its own: it takes the newest snapshot when it has written the one before, so one that reads
slowly, or no more, misses some and costs nothing else.

Fields that have their default value are left out of an event. Nothing is sent while nothing changes, but for the
comments that keep a silent stream alive. A stream that ends means that the engine is gone; who asks again is told why.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import web
from pydantic import TypeAdapter

from chairlift.api.sse import EventStream
from chairlift.engine.snapshot import Snapshot, SnapshotSource

WATCH_PATH = "/watch"
MAX_WATCHERS = 64
SNAPSHOT_INTERVAL_S = 0.1

_SNAPSHOTS = TypeAdapter(Snapshot)


def add_watch_route(app: web.Application, feed: "SnapshotFeed", keep_alive_s: float) -> None:
    """Serves `/watch`."""

    async def watch(request: web.Request) -> web.StreamResponse:
        return await answer_watcher(feed, EventStream(request, keep_alive_s))

    app.router.add_get(WATCH_PATH, watch, allow_head=False)


async def answer_watcher(feed: "SnapshotFeed", stream: EventStream) -> web.StreamResponse:
    """Sends snapshots until the watcher leaves or the engine is gone. What fails before the first is raised."""
    with suppress(ConnectionError):  # the watcher left; nobody is there to be told
        async with stream, aclosing(feed.events()) as events:
            async for event in events:
                await stream.send(event)
        await stream.close()
    return stream.response


class SnapshotFeed:
    """Snapshots of one engine for any number of watchers up to a limit. Used from one event loop."""

    def __init__(
        self, source: SnapshotSource, max_watchers: int = MAX_WATCHERS, interval_s: float = SNAPSHOT_INTERVAL_S
    ) -> None:
        self._source = source
        self._max_watchers = max_watchers
        self._interval_s = interval_s
        self._broadcast: _Broadcast | None = None
        self._task: asyncio.Task[None] | None = None
        self.num_watchers = 0

    async def events(self) -> AsyncGenerator[str]:
        """For one watcher: the newest snapshot as an event, now and after each change, until the engine is gone.

        Raises `HTTPServiceUnavailable` if too many watch already, or what the engine says if there is no snapshot.
        """
        if self.num_watchers >= self._max_watchers:
            message = f"{self.num_watchers} watch this server already, and no more may; close one, or come back later"
            raise web.HTTPServiceUnavailable(text=message)
        self.num_watchers += 1
        try:
            async with aclosing(self._running_broadcast().events()) as events:
                async for event in events:
                    yield event
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._stop()

    def _running_broadcast(self) -> "_Broadcast":
        """The present one, or a new one if nobody watched or the engine was gone."""
        if self._broadcast is None or self._broadcast.is_over:
            self._broadcast = _Broadcast()
            look = _look(self._source, self._interval_s, self._broadcast)
            self._task = asyncio.create_task(look, name="chairlift-watch")
        return self._broadcast

    def _stop(self) -> None:
        assert self._task is not None, "somebody watched"
        self._task.cancel()
        self._broadcast = self._task = None


class _Broadcast:
    """The newest event, and its end: a mailbox of size one that all watchers share."""

    def __init__(self) -> None:
        self._event: str | None = None
        self._error: Exception | None = None
        self._has_changed = asyncio.Event()
        self.is_over = False

    def publish(self, event: str) -> None:
        self._event = event
        self._wake()

    def end(self, error: Exception) -> None:
        self._error = error
        self.is_over = True
        self._wake()

    async def events(self) -> AsyncGenerator[str]:
        """The newest event whenever there is a newer one. Ends, or raises the error where there was no event."""
        was_sent = False
        while True:
            has_changed = self._has_changed
            if self._error is not None:
                if was_sent:
                    return
                raise self._error
            if self._event is not None:
                yield self._event
                was_sent = True
            await has_changed.wait()

    def _wake(self) -> None:
        self._has_changed.set()
        self._has_changed = asyncio.Event()


async def _look(source: SnapshotSource, interval_s: float, broadcast: _Broadcast) -> None:
    """Looks again and again, with a pause after each look, until the engine is gone."""
    seen: Snapshot | None = None
    try:
        while True:
            snapshot = await source.take_snapshot()
            if snapshot != seen:
                broadcast.publish(_event(snapshot))
            seen = snapshot
            await asyncio.sleep(interval_s)
    except Exception as error:  # whatever it was, the watchers' replies tell
        broadcast.end(error)


def _event(snapshot: Snapshot) -> str:
    return f"data: {_SNAPSHOTS.dump_json(snapshot, exclude_defaults=True).decode()}\n\n"
