"""`AsyncLLM`: the engine behind an event loop. Text lives on this side, token ids on the engine thread's."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from chairlift.config import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.inputs import DEFAULT_CHAT, Generation, InputProcessor, Prompt
from chairlift.engine.outputs import GenerationState, OutputProcessor
from chairlift.engine.snapshot import Snapshot
from chairlift.engine.stats import EngineStats
from chairlift.engine.thread import Abort, Add, EngineThread, Look, Stop, Update
from chairlift.engine.tokenizer import ChatOptions, Message
from chairlift.errors import EngineClosed, EngineDead, EngineHung
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, RequestOutput, SamplingParams

logger = logging.getLogger(__name__)

_JOIN_TIMEOUT_S = 10.0


Numbered = tuple[int, RequestOutput]
"""Which of the generations that run together, and its newest output."""


class _Mailbox:
    """News of generations that run together. A slow reader finds the newest states, not a backlog; an error ends it."""

    def __init__(self, states: list[GenerationState]) -> None:
        self.states = states
        self.error: Exception | None = None
        self._changed: dict[int, None] = {}  # in order, each once
        self._has_news = asyncio.Event()

    def notify(self, index: int) -> None:
        self._changed[index] = None
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        self.error = error
        self._has_news.set()

    async def wait(self) -> list[Numbered]:
        """Each generation that changed since the last look, as it is now; or the error."""
        await self._has_news.wait()
        self._has_news.clear()
        if self.error is not None:
            raise self.error
        changed, self._changed = self._changed, {}
        return [(index, self.states[index].snapshot()) for index in changed]


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a generation's news go."""

    mailbox: _Mailbox
    index: int

    @property
    def state(self) -> GenerationState:
        return self.mailbox.states[self.index]


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
        self._addresses: dict[str, _Address] = {}
        self._looks: set[asyncio.Future[Snapshot]] = set()
        self._thread: EngineThread | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = False
        self.death: BaseException | None = None
        self.died = asyncio.Event()

    @property
    def is_healthy(self) -> bool:
        """True while new requests are served."""
        is_alive = self._thread is None or self._thread.is_alive
        return self.death is None and not self._is_closed and is_alive

    @property
    def num_unfinished(self) -> int:
        """Generations that have not ended."""
        return len(self._addresses)

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        param: str = "prompt",
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Generation:
        """Tokenizes and checks off the event loop. `InvalidRequest` if the prompt or params cannot be served.

        `param` is the field that the prompt came from, for the errors that name it.
        """
        chosen_id = request_id or uuid4().hex
        return await asyncio.to_thread(self.inputs.prepare, chosen_id, prompt, params, param, options)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[RequestOutput]:
        """Continues a prompt: cumulative outputs as they come, the last one finished.

        Leaving the iterator early aborts the request. Raises `InvalidRequest`, `QueueFull`, `QueueTimeout`,
        `EngineClosed` or `EngineDead`.
        """
        generation = await self.prepare(prompt, params, request_id, options=options)
        async with contextlib.aclosing(self.run(generation)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        chat_options: ChatOptions = DEFAULT_CHAT,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[RequestOutput]:
        """Answers a conversation; otherwise like `generate`."""
        token_ids = await asyncio.to_thread(self.inputs.encode_chat, messages, chat_options)
        chosen = params or self.inputs.default_chat_params
        async with contextlib.aclosing(self.generate(token_ids, chosen, request_id, options)) as outputs:
            async for output in outputs:
                yield output

    async def run(self, generation: Generation) -> AsyncGenerator[RequestOutput]:
        """Runs what `prepare` made; otherwise like `generate`."""
        async with contextlib.aclosing(self.run_all([generation])) as outputs:
            async for _, output in outputs:
                yield output

    async def run_all(self, generations: Sequence[Generation]) -> AsyncGenerator[Numbered]:
        """Runs what `prepare` made, side by side: all of them are taken, or none (`QueueFull`).

        Leaving the iterator early, or an error in one of them, ends them all. Otherwise like `generate`.
        """
        thread = self._usable_thread()
        for generation in generations:
            if generation.request_id in self._addresses:
                raise ValueError(f"request {generation.request_id!r} is already running")
        mailbox = _Mailbox([self._outputs.open(generation) for generation in generations])
        for index, generation in enumerate(generations):
            self._addresses[generation.request_id] = _Address(mailbox, index)
        thread.send(Add([request for generation in generations for request in generation.requests]))
        unfinished = set(range(len(generations)))
        try:
            while unfinished:
                for index, output in await mailbox.wait():
                    yield index, output
                    if output.finished:
                        unfinished.discard(index)
        finally:
            self._forget(mailbox)

    async def abort(self, request_id: str) -> None:
        """Ends a generation; who iterates over it gets what there is, with finish reason "abort"."""
        address = self._addresses.get(request_id)
        if address is not None and self._thread is not None:
            self._thread.send(Abort(address.state.unfinished_ids))

    async def abort_all(self) -> None:
        """Ends every generation."""
        for request_id in list(self._addresses):
            await self.abort(request_id)

    async def take_snapshot(self) -> Snapshot:
        """The engine after its present launch, or right away if it is idle. Raises `EngineClosed` or `EngineDead`."""
        thread = self._usable_thread()
        loop = asyncio.get_running_loop()
        look: asyncio.Future[Snapshot] = loop.create_future()
        self._looks.add(look)
        try:
            thread.send(Look(lambda snapshot: _call_if_open(loop, _resolve, look, snapshot)))
            return await look
        finally:
            self._looks.discard(look)

    def read_stats(self) -> EngineStats:
        """What the engine has done so far; also of one that hangs, is dead or was closed."""
        return self._core.read_stats()

    async def close(self) -> None:
        """Ends what runs with `EngineClosed` and stops the thread. Calls after it raise `EngineClosed`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(EngineClosed("the engine was closed"))
        if self._thread is not None:
            self._thread.send(Stop())
            timeout = 0.0 if isinstance(self.death, EngineHung) else _JOIN_TIMEOUT_S
            if await asyncio.to_thread(self._thread.join, timeout):
                self._thread = None  # and with it the way back from the thread: the memory is free at once
            else:
                logger.error("the engine thread did not stop; it is left behind")
        if self._watch is not None and self._watch.get_loop() is asyncio.get_running_loop():
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._watch = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def start(self) -> None:
        """Starts the engine's thread, and the watch over it, in the running event loop."""
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = EngineThread(self._core, lambda update: _call_if_open(loop, self._take, update))
            self._thread.start()
            self._watch = loop.create_task(self._watch_over(self._thread), name="chairlift-watchdog")

    def _usable_thread(self) -> EngineThread:
        if self.death is not None:
            raise EngineDead(f"the engine died: {_describe(self.death)}")
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        self.start()
        assert self._thread is not None, "just started"
        return self._thread

    async def _watch_over(self, thread: EngineThread) -> None:
        """A step that does not come back, or a thread that is gone, is the engine's death: nobody may wait for it."""
        limit = self.config.step_timeout
        interval = min(1.0, limit / 4)
        seen, num_looks = None, 0
        while self.death is None:
            # Looks are counted rather than time taken: a process that was stopped, or a loop that was blocked, is not
            # the engine's fault.
            await asyncio.sleep(interval)
            progress = thread.progress
            num_looks = num_looks + 1 if progress is not None and progress == seen else 0
            seen = progress
            if num_looks * interval >= limit:
                self._die(EngineHung(f"a step did not come back within {limit:g} s"))
            elif not thread.is_alive and not self._is_closed:
                self._die(EngineHung("the engine's thread is gone"))

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
            address = self._address_of(state)
            address.mailbox.notify(address.index)
        for failure in delivery.failed:
            self._address_of(failure.state).mailbox.fail(failure.error)
        if delivery.to_abort and self._thread is not None:
            self._thread.send(Abort(delivery.to_abort))
        for rejection in update.rejections:
            rejected = self._outputs.state_of(rejection.requests[0].request_id)
            if rejected is not None:
                self._address_of(rejected).mailbox.fail(rejection.error)
        if update.death is not None:
            self._die(update.death)

    def _address_of(self, state: GenerationState) -> _Address:
        return self._addresses[state.generation.request_id]

    def _die(self, error: BaseException) -> None:
        if self.death is not None:
            return
        logger.critical("the engine is dead: %s", _describe(error))
        self.death = error
        self._fail_all(EngineDead(_describe(error)))
        self.died.set()
        if self._thread is not None:
            self._thread.send(Stop())

    def _fail_all(self, error: Exception) -> None:
        for address in self._addresses.values():
            address.mailbox.fail(error)
        for look in self._looks:
            if not look.done():
                look.set_exception(error)

    def _forget(self, mailbox: _Mailbox) -> None:
        """Whoever leaves early is an abort."""
        unfinished: list[str] = []
        for state in mailbox.states:
            del self._addresses[state.generation.request_id]
            self._outputs.close(state)
            unfinished += state.unfinished_ids
        if unfinished and self._thread is not None:
            self._thread.send(Abort(unfinished))


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, EngineHung) else f"a step failed: {type(error).__name__}: {error}"


def _resolve(look: asyncio.Future[Snapshot], snapshot: Snapshot) -> None:
    if not look.done():  # who asked may have left
        look.set_result(snapshot)


def _call_if_open(loop: asyncio.AbstractEventLoop, callback: Any, *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed while a step was running: nobody is left to tell
        loop.call_soon_threadsafe(callback, *args)
