"""Runs `chairlift run-batch`: reads the requests, makes those without a reply, and tells how it went.

Exit codes: 0 if every request has a good reply, else 1; a file that cannot be used is an error like a wrong flag. A
server that does not answer at the beginning raises ServerUnreachable.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
from tqdm import tqdm

from chairlift.api.batches.lines import BatchRequest, Reply, ReplyFile, check_requests, read_requests
from chairlift.api.batches.runner import make_requests
from chairlift.batch.config import BatchConfig
from chairlift.config import EngineConfig
from chairlift.errors import ChairliftError, ConfigurationError
from chairlift.reachability import require_server

_CONCURRENCY_OF_SERVERS = 64
_ROWS_PER_SLOT = 2  # one runs and one waits, so that no slot is ever idle


def run(
    config: BatchConfig, engine: EngineConfig, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None
) -> int:
    """Makes the requests; returns the process's exit code. `KeyboardInterrupt` leaves what is done in the file."""
    others = sorted(engine.model_fields_set)
    if config.url is not None and others:
        flag = others[0].replace("_", "-")
        raise ConfigurationError(f"--{flag} is a setting of the server; leave it out, or leave --url out")
    ids = check_requests(config.input_file)
    with ReplyFile(config.output_file) as replies:
        answered = ids & replies.answered.keys()
        num_bad_before = sum(not replies.answered[each] for each in answered)
        num_left = len(ids) - len(answered)
        if answered:
            sys.stderr.write(f"{len(answered)} of {len(ids)} requests have a reply; {num_left} are left\n")
        tally = _Tally(replies, num_left)
        requests = read_requests(config.input_file, answered)
        try:
            with asyncio.Runner(loop_factory=loop_factory) as loop:
                loop.run(_make(config, engine, requests, tally) if num_left else asyncio.sleep(0))
        except KeyboardInterrupt:
            sys.stderr.write(f"\n{tally.num_done} of {num_left} are done; the same command makes the others\n")
            raise
        finally:
            tally.close()
    num_bad = num_bad_before + tally.num_bad
    if num_bad:
        sys.stderr.write(f"{num_bad} of {len(ids)} requests failed; see {config.output_file}\n")
    return 1 if num_bad else 0


class _Tally:
    """Writes replies down and counts them."""

    def __init__(self, replies: ReplyFile, num_requests: int) -> None:
        self._replies = replies
        self._bar = tqdm(total=num_requests, disable=None, unit="req")  # None: unless standard error is a terminal
        self.num_done = self.num_bad = 0

    def note(self, request: BatchRequest, reply: Reply) -> None:
        self._replies.add(request.custom_id, reply)
        self._bar.update()
        self.num_done += 1
        self.num_bad += not reply.is_good

    def close(self) -> None:
        self._bar.close()


async def _make(config: BatchConfig, engine: EngineConfig, requests: Iterator[BatchRequest], tally: _Tally) -> None:
    with contextlib.suppress(NotImplementedError):  # on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    async with _own(config, engine) if config.url is None else _other(config, config.url) as server:
        concurrency = server.concurrency if config.concurrency == "auto" else config.concurrency
        work = asyncio.ensure_future(make_requests(requests, server.session, server.url, concurrency, tally.note))
        death = asyncio.ensure_future(server.died())
        await asyncio.wait((work, death), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            raise ChairliftError("the engine died; the same command makes the requests that have no reply")
        death.cancel()
        await work


class _Server(NamedTuple):
    """A server to ask, how many requests it should have at a time, and a wait for the end of its engine."""

    session: aiohttp.ClientSession
    url: str
    concurrency: int
    died: Callable[[], Coroutine[None, None, object]]


@asynccontextmanager
async def _own(config: BatchConfig, engine: EngineConfig) -> AsyncIterator[_Server]:
    from chairlift.batch.own_server import own_server

    async with own_server(engine, config.served_model_name) as (session, url, llm):
        yield _Server(session, url, _ROWS_PER_SLOT * llm.config.max_batch_size, llm.died.wait)


@asynccontextmanager
async def _other(config: BatchConfig, url: str) -> AsyncIterator[_Server]:
    key = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key.get_secret_value()}"}
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(headers=key, connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        url = url.rstrip("/").removesuffix("/v1")
        await require_server(session, url)
        yield _Server(session, url, _CONCURRENCY_OF_SERVERS, asyncio.Event().wait)
