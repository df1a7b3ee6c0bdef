"""`AsyncLLM`: the engine behind an event loop. Text lives on this side, token ids on the engine thread's."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from chairlift.config import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.inputs import Generation, InputProcessor, Prompt
from chairlift.engine.outputs import GenerationState, OutputProcessor
from chairlift.engine.thread import Abort, Add, EngineThread, Stop, Update
from chairlift.engine.tokenizer import Message
from chairlift.errors import EngineClosed, EngineDead
from chairlift.params import RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


class _Mailbox:
    """One generation's news. A slow reader finds the newest state, not a backlog; an error ends it."""

    def __init__(self, state: GenerationState) -> None:
        self.state = state
        self.error: Exception | None = None
        self._has_news = asyncio.Event()

    def notify(self) -> None:
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._has_news.set()

    async def wait(self) -> RequestOutput:
        """The state after the next news, or the error."""
        await self._has_news.wait()
        self._has_news.clear()
        if self.error is not None:
            raise self.error
        return self.state.snapshot()


class AsyncLLM:
    """A model and its engine thread, used from one event loop. An async context manager closes it.

    Construction loads the model and takes as long as that does; the thread starts with the first request.
    """

    def __init__(self, model: str = "bundled", **config: Any) -> None:
        """`model`: a checkpoint directory, a hub id or "bundled"; `config`: fields of `EngineConfig`."""
        self._core = EngineCore(EngineConfig(model=model, **config))
        self.config = self._core.config
        self.inputs = InputProcessor(self.config, self._core.vocab_size)
        self._outputs = OutputProcessor(self.inputs.tokenizer)
        self._mailboxes: dict[str, _Mailbox] = {}
        self._thread: EngineThread | None = None
        self._is_closed = False
        self.death: Exception | None = None
        self.died = asyncio.Event()

    @property
    def is_healthy(self) -> bool:
        """True while new requests are served."""
        return self.death is None and not self._is_closed

    @property
    def num_unfinished(self) -> int:
        """Generations that have not ended."""
        return len(self._mailboxes)

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> Generation:
        """Tokenizes and checks off the event loop. `InvalidRequest` if the prompt or params cannot be served."""
        chosen_id = request_id or uuid4().hex
        return await asyncio.to_thread(self.inputs.prepare, chosen_id, prompt, params)

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Continues a prompt: cumulative outputs as they come, the last one finished.

        Leaving the iterator early aborts the request. Raises `InvalidRequest`, `QueueFull`, `EngineClosed` or
        `EngineDead`.
        """
        generation = await self.prepare(prompt, params, request_id)
        async with contextlib.aclosing(self.run(generation)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Answers a conversation; otherwise like `generate`."""
        token_ids = await asyncio.to_thread(self.inputs.encode_chat, messages)
        chosen = params or self.inputs.default_chat_params
        async with contextlib.aclosing(self.generate(token_ids, chosen, request_id)) as outputs:
            async for output in outputs:
                yield output

    async def run(self, generation: Generation) -> AsyncGenerator[RequestOutput]:
        """Runs what `prepare` made; otherwise like `generate`."""
        thread = self._usable_thread()
        if generation.request_id in self._mailboxes:
            raise ValueError(f"request {generation.request_id!r} is already running")
        mailbox = _Mailbox(self._outputs.open(generation))
        self._mailboxes[generation.request_id] = mailbox
        thread.send(Add(generation.requests))
        try:
            while True:
                output = await mailbox.wait()
                yield output
                if output.finished:
                    return
        finally:
            self._forget(mailbox)

    async def abort(self, request_id: str) -> None:
        """Ends a generation; who iterates over it gets what there is, with finish reason "abort"."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None and self._thread is not None:
            self._thread.send(Abort(mailbox.state.unfinished_ids))

    async def abort_all(self) -> None:
        """Ends every generation."""
        for request_id in list(self._mailboxes):
            await self.abort(request_id)

    async def close(self) -> None:
        """Ends what runs with `EngineClosed` and stops the thread. Calls after it raise `EngineClosed`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(EngineClosed("the engine was closed"))
        if self._thread is not None:
            self._thread.send(Stop())
            if not await asyncio.to_thread(self._thread.join, _JOIN_TIMEOUT_S):
                logger.error("the engine thread did not stop within %.0f s", _JOIN_TIMEOUT_S)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _usable_thread(self) -> EngineThread:
        if self.death is not None:
            raise EngineDead(f"the engine died: {type(self.death).__name__}: {self.death}")
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = EngineThread(self._core, lambda update: _call_if_open(loop, self._take, update))
            self._thread.start()
        return self._thread

    def _take(self, update: Update) -> None:
        """On the event loop: one step's news."""
        try:
            self._distribute(update)
        except Exception as error:  # on the text side; whoever waits for that text must not wait for ever
            logger.critical("delivering a step's tokens failed", exc_info=error)
            self._die(error)

    def _distribute(self, update: Update) -> None:
        delivery = self._outputs.process(update.events)
        for state in delivery.changed:
            self._mailboxes[state.generation.request_id].notify()
        for failure in delivery.failed:
            self._mailboxes[failure.state.generation.request_id].fail(failure.error)
        if delivery.to_abort and self._thread is not None:
            self._thread.send(Abort(delivery.to_abort))
        for rejection in update.rejections:
            rejected = self._outputs.state_of(rejection.requests[0].request_id)
            if rejected is not None:
                self._mailboxes[rejected.generation.request_id].fail(rejection.error)
        if update.death is not None:
            self._die(update.death)

    def _die(self, error: Exception) -> None:
        self.death = error
        self._fail_all(EngineDead(f"a step failed: {type(error).__name__}: {error}"))
        self.died.set()
        if self._thread is not None:
            self._thread.send(Stop())

    def _fail_all(self, error: Exception) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

    def _forget(self, mailbox: _Mailbox) -> None:
        """Whoever leaves early is an abort."""
        del self._mailboxes[mailbox.state.generation.request_id]
        self._outputs.close(mailbox.state)
        unfinished = mailbox.state.unfinished_ids
        if unfinished and self._thread is not None:
            self._thread.send(Abort(unfinished))


def _call_if_open(loop: asyncio.AbstractEventLoop, callback: Any, update: Update) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed while a step was running: nobody is left to tell
        loop.call_soon_threadsafe(callback, update)
