"""Runs the batches of a server's clients: one of each client at a time, at idle priority, by asking the server itself.

The requests go over a socket file that only this user can open, so all that holds for a client's request holds for a
line of its batch. Of several workers one runs them, which has the lock. What is done is on disk: after a restart a
batch goes on where it stopped.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from filelock import FileLock, Timeout

from chairlift.api.batches.directory import BatchDirectory, DirectoryFull
from chairlift.api.batches.lines import BatchRequest, Reply, ReplyFile, find_mistakes, read_requests
from chairlift.api.batches.runner import make_requests
from chairlift.api.batches.shapes import Batch, BatchMistake, BatchMistakes, FileObject, RequestCounts, Status
from chairlift.api.http.access import KeyRing

logger = logging.getLogger(__name__)

_CLEANING_S = 60.0
_OUTPUT_LIFE_S = 30 * 86400  # of files of replies
_MAX_MISTAKES = 100
_EXPIRED = "batch_expired"


@asynccontextmanager
async def executing_batches(
    directory: BatchDirectory | None,
    keys: KeyRing,
    num_slots: int,
    make_protocol: Callable[[], asyncio.BaseProtocol],
    poll_s: float = 0.5,
) -> AsyncIterator[None]:
    """Runs batches until the context is left; requests in flight are then given up, and made again by the next server.

    `directory` None: does nothing. `make_protocol`: of the server that is asked. `poll_s`: between two looks.
    """
    if directory is None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="chairlift-", ignore_cleanup_errors=True) as folder:
        path = str(Path(folder) / "socket")
        server = await asyncio.get_running_loop().create_unix_server(make_protocol, path)
        executor = BatchExecutor(directory, keys, path, num_slots, poll_s)
        task = asyncio.create_task(executor.run(), name="chairlift-batches")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()


class BatchExecutor:
    """Looks for batches that are not over, and runs them."""

    def __init__(self, directory: BatchDirectory, keys: KeyRing, socket: str, num_slots: int, poll_s: float) -> None:
        """`num_slots`: of the engine; some are left free, so that other requests need not wait for one."""
        self._directory, self._keys, self._socket, self._poll_s = directory, keys, socket, poll_s
        self._concurrency = max(1, num_slots - max(1, num_slots // 8))
        self._turns = asyncio.Semaphore(self._concurrency)  # of all batches together
        self._running: dict[str, asyncio.Task[None]] = {}  # by owner

    async def run(self) -> None:
        """Runs batches until it is cancelled, in the one process that gets the lock."""
        lock = FileLock(self._directory.path / "executor.lock")
        while True:
            try:
                with lock.acquire(blocking=False):
                    await self._run_all()
            except (Timeout, OSError) as error:
                if not isinstance(error, Timeout):
                    logger.error("batches wait: %s", error)
            await asyncio.sleep(self._poll_s)

    async def _run_all(self) -> None:
        cleaned = -_CLEANING_S
        try:
            while True:
                if time.monotonic() - cleaned >= _CLEANING_S:
                    await asyncio.to_thread(self._directory.remove_expired)
                    cleaned = time.monotonic()
                for owner, batch in await asyncio.to_thread(self._find_work):
                    self._running[owner] = asyncio.create_task(self._run(owner, batch), name=f"chairlift-{batch.id}")
                await asyncio.sleep(self._poll_s)
        finally:
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _find_work(self) -> list[tuple[str, Batch]]:
        """The next batch of each owner that has none in progress."""
        self._running = {owner: task for owner, task in self._running.items() if not task.done()}
        idle = [each for each in self._directory.owners() if each not in self._running and self._keys.has_owner(each)]
        return [(owner, batches[0]) for owner in idle if (batches := self._directory.unfinished(owner))]

    async def _run(self, owner: str, batch: Batch) -> None:
        """Runs a batch to its end, whatever that is."""
        try:
            with _OpenBatch(self._directory, owner, batch) as opened:
                if await asyncio.to_thread(opened.begin):
                    await self._make_requests(owner, opened)
                await asyncio.to_thread(opened.finish)
        except Exception as error:  # whatever it is, it must not happen again and again
            logger.error("batch %s failed", batch.id, exc_info=error)
            mistake = BatchMistake(code="server_error", message=f"the server failed: {type(error).__name__}")
            with contextlib.suppress(OSError):
                self._directory.keep_batch(owner, batch.turned("failed", errors=BatchMistakes(data=[mistake])))

    async def _make_requests(self, owner: str, opened: "_OpenBatch") -> None:
        """Makes the requests that have no reply, until all have one or the batch must stop."""
        connector = aiohttp.UnixConnector(self._socket, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, headers=self._keys.headers_for(owner), timeout=timeout
        ) as session:
            work = asyncio.ensure_future(
                make_requests(
                    read_requests(opened.input_path, opened.answered),
                    session,
                    "http://localhost",
                    self._concurrency,
                    opened.note,
                    num_tries=None,
                    turns=self._turns,
                )
            )
            try:
                while not work.done() and not await asyncio.to_thread(opened.must_stop):
                    await asyncio.wait([work], timeout=self._poll_s)
                if work.done():
                    work.result()
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)


class _OpenBatch:
    """A batch in progress, and its files of replies. A context manager, which closes them."""

    def __init__(self, directory: BatchDirectory, owner: str, batch: Batch) -> None:
        self._directory, self._owner, self._batch = directory, owner, batch
        number = batch.id.removeprefix("batch_")
        self._ids = {"output": f"file-{number}-output", "error": f"file-{number}-error"}
        self.input_path = directory.content_path(owner, batch.input_file_id)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, ReplyFile] = {}
        self.answered: set[str] = set()
        self._counts, self._has_news = batch.request_counts, False
        self._ending: Status | None = None  # if it stops early: cancelled, expired or failed

    def begin(self) -> bool:
        """Checks the lines. False if there is nothing to do: they are wrong, or it was cancelled."""
        if self._directory.is_to_be_cancelled(self._owner, self._batch.id):
            self._ending = "cancelled"
            return False
        if not self.input_path.exists():
            self._fail([BatchMistake(code="file_not_found", message="the input file was deleted")])
            return False
        ids, mistakes = find_mistakes(self.input_path, self._batch.endpoint, _MAX_MISTAKES)
        if not ids and not mistakes:
            self._fail([BatchMistake(code="empty_file", message="the input file has no requests")])
        elif mistakes:
            self._fail(
                [
                    BatchMistake(code="invalid_line", message=each.message, line=each.line, param=each.field)
                    for each in mistakes
                ]
            )
        if self._ending is not None:
            return False
        for kind, file_id in self._ids.items():
            path = self._directory.content_path(self._owner, file_id)
            self._files[kind] = self._stack.enter_context(ReplyFile(path))
        done, failed = (self._files[kind].answered.keys() for kind in ("output", "error"))
        self.answered = {*done, *failed}
        self._counts = RequestCounts(total=len(ids), completed=len(done), failed=len(failed))
        if self._batch.status == "validating":
            self._batch = self._batch.turned("in_progress")
        self._keep()
        return True

    def note(self, request: BatchRequest, reply: Reply) -> None:
        """Writes a reply down."""
        self._files["output" if reply.is_good else "error"].add(request.custom_id, reply)
        self.answered.add(request.custom_id)
        counts = self._counts
        self._counts = counts.model_copy(
            update={"completed": counts.completed + reply.is_good, "failed": counts.failed + (not reply.is_good)}
        )
        self._has_news = True

    def must_stop(self) -> bool:
        """Records how far it has come. True if it was cancelled, has expired, or there is no room for replies."""
        if self._has_news:
            self._keep()
        if self._directory.is_to_be_cancelled(self._owner, self._batch.id):
            self._ending = "cancelled"
        elif self._batch.expires_at <= time.time():
            self._ending = "expired"
        else:
            try:
                self._directory.check_room(self._owner)
            except DirectoryFull as error:
                self._fail([BatchMistake(code="no_room", message=str(error))])
        return self._ending is not None

    def finish(self) -> None:
        """Makes the replies so far files that clients can find, and ends the batch."""
        if self._ending == "expired":
            self._fail_remaining()
        if self._ending is None:
            self._batch = self._batch.turned("finalizing")
            self._keep()
        found = {}
        for kind, file_id in self._ids.items():
            path = self._directory.content_path(self._owner, file_id)
            if path.exists() and path.stat().st_size:
                found[f"{kind}_file_id"] = file_id
                self._directory.add_file(self._owner, path, self._record(kind, path.stat().st_size))
            else:
                path.unlink(missing_ok=True)
        self._batch = self._batch.turned(self._ending or "completed", request_counts=self._counts, **found)
        if self._ending == "cancelled":
            asked_at = self._directory.batch(self._owner, self._batch.id).cancelling_at
            self._batch = self._batch.model_copy(update={"cancelling_at": asked_at})
        self._directory.keep_batch(self._owner, self._batch)

    def _record(self, kind: str, num_bytes: int) -> FileObject:
        now = int(time.time())
        return FileObject(
            id=self._ids[kind],
            bytes=num_bytes,
            created_at=now,
            expires_at=now + _OUTPUT_LIFE_S,
            filename=f"{self._batch.id}_{kind}.jsonl",
            purpose="batch_output",
        )

    def _fail_remaining(self) -> None:
        """Writes an error for each request that has no reply."""
        for request in read_requests(self.input_path, frozenset(self.answered)):
            self.note(request, Reply(0, None, "it was not made before the batch expired", code=_EXPIRED))

    def _fail(self, mistakes: list[BatchMistake]) -> None:
        self._ending = "failed"
        self._batch = self._batch.model_copy(update={"errors": BatchMistakes(data=mistakes)})

    def _keep(self) -> None:
        self._has_news = False
        self._batch = self._batch.model_copy(update={"request_counts": self._counts})
        self._directory.keep_batch(self._owner, self._batch)

    def __enter__(self) -> "_OpenBatch":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
