"""From a job to its reply, streamed or whole: what all endpoints that generate share.

A reply that is large (many choices with log-probabilities) is put together and written in a worker's thread.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel

from chairlift.api.errors import error_reply
from chairlift.api.replies import Reply
from chairlift.api.sse import EventStream
from chairlift.api.telemetry.observation import Observation
from chairlift.engine.async_llm import AsyncLLM, OffLoop
from chairlift.engine.text.inputs import Generation
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.params import GRAMMAR_LIMIT, RequestOutput, TokenLogprobs

_LARGE = 500  # scored tokens, which take 5 to 10 microseconds each
_CHARACTERS_PER_SCORE = 100  # that take about as long
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True)
class Job:
    """What an endpoint has made of a request."""

    generations: list[Generation]
    reply: Reply
    observation: Observation
    off_loop: OffLoop
    headers: Mapping[str, str] = field(default_factory=dict)

    async def make(self, size: int, function: Callable[..., _Made], *args: Any) -> _Made:
        """Calls a method of the reply, elsewhere if that is much work; `size`: see `_size_of`."""
        return function(*args) if size <= _LARGE else await self.off_loop(function, *args)


async def answer(llm: AsyncLLM, job: Job, request: web.Request) -> web.StreamResponse:
    """Runs the job and sends its reply."""
    if not job.observation.is_streamed:
        return await _answer_whole(llm, job)
    return await _answer_stream(llm, job, EventStream(request, job.headers, job.reply.keep_alive))


async def _answer_whole(llm: AsyncLLM, job: Job) -> web.Response:
    """Waits for every generation to end. A client that leaves meanwhile cancels this, and with it the work."""
    latest: dict[int, RequestOutput] = {}
    async with aclosing(job.observation.follow(llm.run_all(job.generations))) as outputs:
        async for index, output in outputs:
            _check(output)
            latest[index] = output
    whole = [latest[index] for index in range(len(job.generations))]
    body = await job.make(sum(map(_size_of, whole)), lambda: _to_json(job.reply.whole(whole)))
    return web.Response(body=body, content_type="application/json", headers=job.headers)


async def _answer_stream(llm: AsyncLLM, job: Job, stream: EventStream) -> web.StreamResponse:
    """Sends events as tokens come. What fails before the first of them still gets a status of its own."""
    sizes: dict[int, int] = {}  # of each generation, when it was last looked at
    try:
        async with stream, aclosing(job.observation.follow(llm.run_all(job.generations))) as outputs:
            events = job.reply.opening([generation.prompt_token_ids for generation in job.generations])
            async for index, output in outputs:
                _check(output)
                num_seen, sizes[index] = sizes.get(index, 0), _size_of(output)
                news = await job.make(sizes[index] - num_seen, job.reply.news, index, output)
                await stream.send(*events, *news)
                events = []
            await stream.send(*events, *await job.make(sum(sizes.values()), job.reply.closing))
    except ConnectionError:  # the client left; nobody is there to be told
        return stream.response
    except Exception as error:
        if not stream.is_open:
            raise
        reply = error_reply(error)
        with suppress(ConnectionError):
            await stream.send(*job.reply.failure(reply.status, reply.detail))
    with suppress(ConnectionError):
        await stream.close()
    return stream.response


def _to_json(body: BaseModel) -> bytes:
    text = body.model_dump_json().encode()
    choices: list[object] = getattr(body, "choices", [])
    while choices:  # one after the other: while all of a large reply is freed no other thread may run
        choices.pop()
    return text


def _size_of(output: RequestOutput) -> int:
    """How much work it is to dress an output: scored tokens, and characters for what they are worth."""
    scored = sum(_num_scores(choice.logprobs) for choice in output.outputs) + _num_scores(output.prompt_logprobs)
    return scored + sum(len(choice.text) for choice in output.outputs) // _CHARACTERS_PER_SCORE


def _num_scores(positions: Sequence[TokenLogprobs | None] | None) -> int:
    """As many at each position as at the last one."""
    return len(positions) * len(positions[-1] or ()) if positions else 0


def _check(output: RequestOutput) -> None:
    """A sequence that could not be computed is the end of its request."""
    for choice in output.outputs:
        if choice.error is not None:
            is_clients_fault = choice.stop_reason == GRAMMAR_LIMIT
            raise InvalidRequest(choice.error) if is_clients_fault else RequestFailed(choice.error)
