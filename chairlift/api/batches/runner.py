"""Makes the requests of a batch, a number of them at a time, and hands over each reply as it comes."""

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from http import HTTPStatus

import aiohttp

from chairlift.api.batches.lines import BatchRequest, Reply

_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_NUM_TRIES = 5
_LONGEST_WAIT_S = 60.0


async def make_requests(
    requests: Iterator[BatchRequest],
    session: aiohttp.ClientSession,
    url: str,
    concurrency: int,
    note: Callable[[BatchRequest, Reply], None],
    num_tries: int | None = _NUM_TRIES,
    turns: AbstractAsyncContextManager[object] | None = None,
    first_wait_s: float = 1.0,
) -> None:
    """Makes all requests of the server at `url`. `note` gets each reply, in the order in which they come.

    A busy server (429, 503) and one that cannot be reached are asked `num_tries` times; None: until they answer.
    `turns`: entered for each request, which limits those of several batches. `first_wait_s`: before a request is made
    again; doubles each time.
    """

    async def work() -> None:
        for request in requests:  # shared: each takes the next one
            async with turns or nullcontext():
                reply = await _ask(session, url, request, num_tries, first_wait_s)
            note(request, reply)

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(work())


async def _ask(
    session: aiohttp.ClientSession, url: str, request: BatchRequest, num_tries: int | None, wait_s: float
) -> Reply:
    reply = Reply(0, None, "not asked")
    for attempt in itertools.count() if num_tries is None else range(num_tries):
        if attempt:
            await asyncio.sleep(wait_s)
        wait_s = min(_LONGEST_WAIT_S, 2 * wait_s)
        try:
            async with session.post(f"{url}{request.url}", json=request.body) as response:
                text = await response.text()
                reply = _read(response, text)
                if response.status not in _BUSY:
                    return reply
                wait_s = max(wait_s, _seconds(response.headers.get("Retry-After")))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reply = Reply(0, None, str(error) or type(error).__name__)
    return reply


def _read(response: aiohttp.ClientResponse, text: str) -> Reply:
    try:
        body = json.loads(text)
    except ValueError:  # a proxy's page, for instance
        return Reply(response.status, None, f"status {response.status}, and no JSON: {text[:200]}")
    return Reply(response.status, body, request_id=response.headers.get("X-Request-Id", ""))


def _seconds(written: str | None) -> float:
    return min(_LONGEST_WAIT_S, float(written)) if written is not None and written.isdecimal() else 0.0
