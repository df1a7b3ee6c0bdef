"""Replies to requests, streamed or whole, for all endpoints that generate."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web

from chairlift.api.errors import ErrorReply, error_reply
from chairlift.api.http.event_stream import EventStream
from chairlift.api.http.warning import warning_header
from chairlift.api.jobs import Job
from chairlift.api.telemetry.observation import OBSERVATION
from chairlift.api.wire.body import WholeReply
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.text.deltas import RequestDelta
from chairlift.errors import ChairliftError, InvalidRequest, RequestFailed
from chairlift.params import GRAMMAR_LIMIT, TokenLogprobs

logger = logging.getLogger(__name__)

_LARGE = 500  # scored tokens, which take 5 to 10 microseconds each
_CHARACTERS_PER_SCORE = 100  # that take as long as one scored token
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Answering:
    """One request, and the job that was made of it, while it is computed and its reply is sent."""

    request: web.Request
    job: Job
    llm: AsyncLLM
    off_loop: OffLoop
    settled: Callable[[], Awaitable[None]]  # awaited before the end of the reply; see `Store`

    async def answer(self) -> web.StreamResponse:
        """Replies. An error before the first event of a stream still gets a status of its own."""
        if not self.job.is_streamed:
            return await self._answer_whole()
        stream = EventStream(self.request, warning_header(self.job.warnings), self.job.reply.keep_alive)
        try:
            await self._answer_stream(stream)
        except ConnectionError:  # the client left
            return stream.response
        except Exception as error:
            if not stream.is_open:
                raise
            await self._send_failure(stream, error_reply(error))
        with suppress(ConnectionError):
            await stream.close()
        return stream.response

    async def _answer_whole(self) -> web.Response:
        """Waits for every generation to end. If the client leaves, this is cancelled, and the generations with it."""
        job, outputs = self.job, dict[int, RequestDelta]()
        run = self.llm.run_all(job.generations, wants_steps=False)
        async with aclosing(self.request[OBSERVATION].follow(run)) as deltas:
            async for index, delta in deltas:
                _check(delta)
                outputs[index] = delta
        whole = [outputs[index] for index in range(len(job.generations))]
        size = self._size_of_repeats + sum(map(_size_of, whole))
        body = await self._make(size, lambda: _to_json(job.reply.whole(whole)))
        await self.settled()
        return web.Response(body=body, content_type="application/json", headers=warning_header(job.warnings))

    async def _answer_stream(self, stream: EventStream) -> None:
        """Sends events as tokens arrive."""
        reply, generations = self.job.reply, self.job.generations
        total_size = self._size_of_repeats
        async with stream, aclosing(self.request[OBSERVATION].follow(self.llm.run_all(generations))) as deltas:
            prompts = [generation.prompt_token_ids for generation in generations]
            events = await self._make(self._size_of_repeats, reply.opening, prompts)
            async for index, delta in deltas:
                _check(delta)
                size = _size_of(delta)
                total_size += size
                news = await self._make(size, reply.news, index, delta)
                await stream.send(*events, *news)
                events = []
            closing = await self._make(total_size, reply.closing)
            await self.settled()
            await stream.send(*events, *closing)

    async def _send_failure(self, stream: EventStream, error: ErrorReply) -> None:
        """Tells that a stream failed, briefly if that is not possible in its own form, which repeats much of the
        request.

        Never raises: after the status of a stream there cannot be another.
        """
        with suppress(ConnectionError):
            try:
                await stream.send(*self.job.reply.failure(error.status, error.detail))
            except ConnectionError:
                raise
            except Exception as another:
                if not isinstance(another, ChairliftError):  # such as that too many bytes are not read
                    logger.error("a stream could not tell of its failure in its own form", exc_info=another)
                await stream.send(f"event: error\ndata: {error.body(self.request)}\n\n")

    @property
    def _size_of_repeats(self) -> int:
        """The cost of repeating the request; see `_size_of`."""
        return self.job.reply.num_repeated // _CHARACTERS_PER_SCORE

    async def _make(self, size: int, function: Callable[..., _Made], *args: Any) -> _Made:
        """Calls a method of the reply, off the event loop if that is much work; `size`: see `_size_of`."""
        return function(*args) if size <= _LARGE else await self.off_loop(function, *args)


def _to_json(body: WholeReply) -> bytes:
    text = body.model_dump_json().encode()
    parts = body.parts
    while parts:  # one by one: freeing a large reply at once would block all other threads
        parts.pop()
    return text


def _size_of(delta: RequestDelta) -> int:
    """Estimates the cost of making a reply of a delta, in scored tokens."""
    size = 0 if delta.prompt_result is None else delta.prompt_result.size
    for choice in delta.choices:
        size += _num_scores(choice.logprobs) + len(choice.text) // _CHARACTERS_PER_SCORE
    return size


def _num_scores(positions: Sequence[TokenLogprobs]) -> int:
    """Returns the number of scores, if each position has as many as the last one."""
    return len(positions) * len(positions[-1]) if positions else 0


def _check(delta: RequestDelta) -> None:
    """Raises if a sequence could not be computed, which ends its request."""
    for choice in delta.choices:
        if choice.error is not None:
            is_clients_fault = choice.stop_reason == GRAMMAR_LIMIT
            raise InvalidRequest(choice.error) if is_clients_fault else RequestFailed(choice.error)
