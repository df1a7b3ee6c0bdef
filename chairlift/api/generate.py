"""From a parsed request to its reply, streamed or whole: what completions and chat completions share."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import web

from chairlift.api.errors import failure_of
from chairlift.api.replies import Reply
from chairlift.api.sse import DONE, EventStream
from chairlift.api.wire import Usage
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.inputs import Generation
from chairlift.params import RequestOutput

Numbered = tuple[int, RequestOutput]
"""Which prompt of the request, and its newest output."""


async def answer_whole(llm: AsyncLLM, generations: list[Generation], reply: Reply) -> web.Response:
    """Waits for every generation to end. A client that leaves meanwhile cancels this, and with it the work."""
    async with aclosing(_run_all(llm, generations)) as outputs:
        latest = {index: output async for index, output in outputs}
    body = reply.whole([latest[index] for index in range(len(generations))])
    return web.Response(text=body.model_dump_json(), content_type="application/json")


async def answer_stream(
    request: web.Request, llm: AsyncLLM, generations: list[Generation], reply: Reply, has_usage_chunk: bool
) -> web.StreamResponse:
    """Streams chunks as tokens come. What fails before the first of them still gets a status of its own."""
    async with aclosing(_run_all(llm, generations)) as outputs:
        first = await anext(outputs)
        stream = EventStream()
        response = await stream.open(request)
        writer = _ChunkWriter(stream, reply, generations, has_usage_chunk)
        try:
            await writer.begin()
            await writer.write(first)
            async for numbered in outputs:
                await writer.write(numbered)
            await writer.end()
        except ConnectionError:  # the client left; nobody is there to be told
            return response
        except Exception as error:  # the status is sent, so the error goes into the stream
            with suppress(ConnectionError):
                await stream.send(failure_of(error).body())
        with suppress(ConnectionError):
            await stream.close()
    return response


class _ChunkWriter:
    """Turns cumulative outputs into chunks that hold what is new."""

    def __init__(self, stream: EventStream, reply: Reply, generations: list[Generation], has_usage_chunk: bool) -> None:
        self._stream = stream
        self._reply = reply
        self._num_choices = generations[0].params.n
        self._has_usage_chunk = has_usage_chunk
        self._sent = [0] * (len(generations) * self._num_choices)  # characters, by choice
        self._ended = [False] * len(self._sent)
        self._latest: dict[int, RequestOutput] = {}

    async def begin(self) -> None:
        await self._stream.send(*(chunk.model_dump_json() for chunk in self._reply.opening(len(self._sent))))

    async def write(self, numbered: Numbered) -> None:
        """Sends what each choice of one prompt has more than when it was last sent."""
        prompt_index, output = numbered
        self._latest[prompt_index] = output
        chunks = []
        for choice in output.outputs:
            index = prompt_index * self._num_choices + choice.index
            text = choice.text[self._sent[index] :]
            has_ended = choice.finish_reason is not None and not self._ended[index]
            if text or has_ended:
                self._sent[index] += len(text)
                self._ended[index] = has_ended
                chunks.append(self._reply.chunk(index, text, choice))
        await self._stream.send(*(chunk.model_dump_json() for chunk in chunks))

    async def end(self) -> None:
        if self._has_usage_chunk:
            usage = Usage.of(list(self._latest.values()))
            await self._stream.send(self._reply.usage_chunk(usage).model_dump_json())
        await self._stream.send(DONE)


async def _run_all(llm: AsyncLLM, generations: list[Generation]) -> AsyncGenerator[Numbered]:
    """Runs generations side by side. Leaving it, or an error in one, ends them all."""
    if len(generations) == 1:  # nearly every request, and no task is needed for it
        async with aclosing(llm.run(generations[0])) as outputs:
            async for output in outputs:
                yield 0, output
        return
    news: asyncio.Queue[Numbered | Exception] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(llm, index, each, news)) for index, each in enumerate(generations)]
    num_running = len(pumps)
    try:
        while num_running:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            yield item
            num_running -= item[1].finished
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(llm: AsyncLLM, index: int, generation: Generation, news: "asyncio.Queue[Numbered | Exception]") -> None:
    try:
        async with aclosing(llm.run(generation)) as outputs:
            async for output in outputs:
                await news.put((index, output))
    except Exception as error:
        await news.put(error)
