"""From checked generations to their reply, streamed or whole: what all endpoints share."""

from contextlib import aclosing, suppress
from dataclasses import dataclass

from aiohttp import web

from chairlift.api.errors import failure_of
from chairlift.api.observation import Observation
from chairlift.api.replies import Reply
from chairlift.api.sse import EventStream
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.inputs import Generation
from chairlift.errors import RequestFailed
from chairlift.params import RequestOutput


@dataclass(frozen=True, slots=True)
class Job:
    """What an endpoint has made of a request."""

    generations: list[Generation]
    reply: Reply
    observation: Observation


async def answer_whole(llm: AsyncLLM, job: Job) -> web.Response:
    """Waits for every generation to end. A client that leaves meanwhile cancels this, and with it the work."""
    latest: dict[int, RequestOutput] = {}
    async with aclosing(job.observation.follow(llm.run_all(job.generations))) as outputs:
        async for index, output in outputs:
            _check(output)
            latest[index] = output
    body = job.reply.whole([latest[index] for index in range(len(job.generations))])
    return web.Response(text=body.model_dump_json(), content_type="application/json")


async def answer_stream(llm: AsyncLLM, job: Job, stream: EventStream) -> web.StreamResponse:
    """Sends events as tokens come. What fails before the first of them still gets a status of its own."""
    try:
        async with stream, aclosing(job.observation.follow(llm.run_all(job.generations))) as outputs:
            events = job.reply.opening()
            async for index, output in outputs:
                _check(output)
                await stream.send(*events, *job.reply.news(index, output))
                events = []
            await stream.send(*events, *job.reply.closing())
    except ConnectionError:  # the client left; nobody is there to be told
        return stream.response
    except Exception as error:
        if not stream.is_open:
            raise
        with suppress(ConnectionError):
            await stream.send(*job.reply.failure(failure_of(error).detail))
    with suppress(ConnectionError):
        await stream.close()
    return stream.response


def _check(output: RequestOutput) -> None:
    """A sequence that could not be computed is the end of its request."""
    for choice in output.outputs:
        if choice.error is not None:
            raise RequestFailed(choice.error)
