"""`AsyncLLM`: the engine behind an event loop. This side handles text, the engine's thread token ids."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, Self, TypeVar
from uuid import uuid4

from chairlift.config import EngineConfig
from chairlift.engine.async_prompts import AsyncPrompts
from chairlift.engine.collector import paused_collector
from chairlift.engine.core import EngineCore
from chairlift.engine.forks import Home
from chairlift.engine.journal import EngineStats, Snapshot
from chairlift.engine.mailbox import Mailbox
from chairlift.engine.text.chat_template import ChatOptions, Message
from chairlift.engine.text.deltas import CumulativeOutput
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.text.inputs import (
    DEFAULT_CHAT,
    DEFAULT_TEXT,
    Generation,
    Grammars,
    InputProcessor,
    Prompt,
    TextOptions,
)
from chairlift.engine.text.outputs import OutputProcessor
from chairlift.engine.text.tokenizer_ahead import reading_ahead
from chairlift.engine.thread import Abort, Add, Engine, Invoke, LocalEngine, Stop, Update, describe_death
from chairlift.errors import EngineClosed, EngineDead, EngineHung
from chairlift.params import DEFAULT_OPTIONS, RequestOptions, RequestOutput, SamplingParams, StructuredOutputs

logger = logging.getLogger(__name__)

_MAX_DELAY_S = 0.01
_SAVE_POLL_S = 0.02

_Result = TypeVar("_Result")


class OffLoop(Protocol):
    """Calls a slow function in some thread, as `asyncio.to_thread` does."""

    async def __call__(self, function: Callable[..., _Result], /, *args: Any) -> _Result: ...


async def compile_grammar(grammars: Grammars, outputs: StructuredOutputs, thinking: Thinking | None = None) -> Any:
    """Compiles what `InputProcessor.prepare` needs. `InvalidGrammar`, or `GrammarsBusy` if that is not possible now."""
    shared = asyncio.wrap_future(grammars.compile(outputs, thinking))
    shared.add_done_callback(lambda done: done.cancelled() or done.exception())  # its client may have left
    return await asyncio.shield(shared)


def _open(config: EngineConfig) -> tuple[Engine, InputProcessor]:
    """Makes an engine in this process, and what prepares its prompts."""
    with reading_ahead(config) as tokenizer:
        engine = LocalEngine(EngineCore(config))
        return engine, InputProcessor(engine.config, engine.vocab_size, tokenizer=tokenizer)


class AsyncLLM(AsyncPrompts):
    """A model and its engine thread, used from one event loop. An async context manager closes it.

    Construction loads the model and takes as long as that does; the thread starts with the first request. In a process
    that was forked later, `EngineClosed` is raised.
    """

    def __init__(self, model: str = "bundled", **config: Any) -> None:
        """`model`: a checkpoint directory, a hub id, a GGUF file, "smollm2" or "bundled".

        `config`: fields of `EngineConfig`.
        """
        with paused_collector():
            self._use(*_open(EngineConfig(model=model, **config)))

    @classmethod
    def of(cls, engine: Engine, grammars: Grammars | None = None, seed_stream: int = 0) -> Self:
        """For an engine of other `Parts`, or one that other readers also use; see `InputProcessor`."""
        llm = cls.__new__(cls)
        llm._use(engine, InputProcessor(engine.config, engine.vocab_size, grammars, seed_stream))
        return llm

    def _use(self, engine: Engine, inputs: InputProcessor) -> None:
        self._engine, self._home = engine, Home()
        self.config, self.vocab_size = engine.config, engine.vocab_size
        self.inputs = inputs
        self.inputs.vocabulary.load()  # now, because all requests would wait for it later
        self._outputs = OutputProcessor(self.inputs.tokenizer)
        self._mailboxes: dict[str, Mailbox] = {}  # by the generation's id; those that run together share one
        self._answers: set[asyncio.Future[Any]] = set()  # pending results of `_call`
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = False
        self.death: BaseException | None = None
        self.died = asyncio.Event()

    @property
    def is_healthy(self) -> bool:
        """True while new requests are served."""
        return self._home.is_here and self.death is None and not self._is_closed and self._engine.is_alive

    @property
    def num_unfinished(self) -> int:
        """Generations that have not ended."""
        return len(self._mailboxes)

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        param: str = "prompt",
        options: RequestOptions = DEFAULT_OPTIONS,
        text_options: TextOptions = DEFAULT_TEXT,
        off_loop: OffLoop = asyncio.to_thread,
    ) -> Generation:
        """Tokenizes and checks off the event loop. `InvalidRequest` if the prompt or params cannot be served.

        `param`: the field that the prompt came from, for errors. `off_loop` calls what is slow, except for grammars,
        which are compiled in threads of their own; `GrammarsBusy` if that is not possible now.
        """
        self._home.check()
        outputs = None if params is None else params.structured_outputs
        compiled = (
            None if outputs is None else await compile_grammar(self.inputs.grammars, outputs, text_options.thinking)
        )
        chosen_id = request_id or uuid4().hex
        return await off_loop(self.inputs.prepare, chosen_id, prompt, params, param, options, text_options, compiled)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[RequestOutput]:
        """Continues a prompt: yields cumulative outputs as they come, the last one finished.

        Closing the iterator early aborts the request. Raises `InvalidRequest`, `QueueFull`, `QueueTimeout`,
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
        self._home.check()
        chosen = params or self.inputs.default_chat_params
        token_ids = await asyncio.to_thread(self.inputs.encode_chat, messages, chat_options, chosen.truncates_prompt)
        async with contextlib.aclosing(self.generate(token_ids, chosen, request_id, options)) as outputs:
            async for output in outputs:
                yield output

    async def run(self, generation: Generation) -> AsyncGenerator[RequestOutput]:
        """Runs what `prepare` made; otherwise like `generate`."""
        output = CumulativeOutput(generation)
        async with self.run_all([generation]) as mailbox:
            async for _, delta in mailbox:
                yield output.add(delta)

    @contextlib.asynccontextmanager
    async def run_all(self, generations: Sequence[Generation], *, wants_steps: bool = True) -> AsyncGenerator[Mailbox]:
        """Runs several generations that `prepare` made at once: all are queued, or none (`QueueFull`).

        `wants_steps`: see `Mailbox`. Leaving the context early, or an error in one, ends all.
        Otherwise like `generate`.
        """
        engine = self.usable_engine()
        names = [generation.request_id for generation in generations]
        for index, name in enumerate(names):
            if name in self._mailboxes or name in names[:index]:
                raise ValueError(f"request {name!r} is already running")
        mailbox = Mailbox([self._outputs.open(generation) for generation in generations], wants_steps)
        self._mailboxes.update(dict.fromkeys(names, mailbox))
        engine.send(Add([request for generation in generations for request in generation.requests]))
        try:
            yield mailbox
        finally:  # a reader that leaves early aborts what is unfinished
            for name, state in mailbox.states.items():
                del self._mailboxes[name]
                self._outputs.close(state)
            if unfinished_ids := mailbox.unfinished_ids:
                engine.send(Abort(unfinished_ids))

    async def abort(self, request_id: str) -> None:
        """Ends a generation; its reader gets the output so far, with finish reason "abort"."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            self._engine.send(Abort(mailbox.states[request_id].unfinished_ids))

    async def abort_all(self) -> None:
        """Ends every generation."""
        await asyncio.gather(*map(self.abort, self._mailboxes))

    async def read_snapshot(self) -> Snapshot:
        """The engine's state after its current launch. Raises `EngineClosed` or `EngineDead`."""
        return await self._call(EngineCore.read_snapshot)

    async def reset_prefix_cache(self) -> None:
        """Forgets all prompts, so that later requests reuse nothing. Raises `EngineClosed` or `EngineDead`."""
        await self._call(EngineCore.reset_prefix_cache)

    async def until_saved(self) -> None:
        """Returns when nothing runs, and all that is worth it is on disk. Raises `EngineClosed` or `EngineDead`."""
        while self.config.prefix_cache_dir is not None and not await self._call(EngineCore.has_saved_all):
            await asyncio.sleep(_SAVE_POLL_S)

    def read_stats(self) -> EngineStats:
        """Returns what the engine has done so far, also if it hangs, is dead or was closed."""
        return self._engine.read_stats()

    async def close(self) -> None:
        """Ends running generations with `EngineClosed` and stops the thread. Does nothing in a forked process."""
        if self._is_closed or not self._home.is_here:
            return
        self._is_closed = True
        self._fail_all(EngineClosed("the engine was closed"))
        if self._watch is not None and self._watch.get_loop() is asyncio.get_running_loop():
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._watch = None
        await self._engine.close(waits=not isinstance(self.death, EngineHung))
        await asyncio.to_thread(self.inputs.grammars.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, function: Callable[[EngineCore], _Result]) -> _Result:
        """Calls a function in the engine's thread between two launches; its result."""
        engine = self.usable_engine()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_Result] = loop.create_future()
        self._answers.add(answer)
        try:
            engine.send(Invoke(function, lambda result: call_if_open(loop, _resolve, answer, result)))
            return await answer
        finally:
            self._answers.discard(answer)

    def usable_engine(self) -> Engine:
        """The engine. The first call starts it, and its watchdog. Raises `EngineClosed` or `EngineDead`."""
        self._home.check()
        if self.death is not None:
            raise EngineDead(f"the engine died: {describe_death(self.death)}")
        if self._is_closed:
            raise EngineClosed("the engine was closed")
        if self._watch is None:
            loop = asyncio.get_running_loop()
            self._engine.start(lambda: call_if_open(loop, self._deliver))
            self._watch = loop.create_task(self._watch_over(), name="chairlift-watchdog")
        return self._engine

    async def _watch_over(self) -> None:
        """Fails all readers of an engine that has died."""
        self._die(await self._engine.until_dead())

    def _deliver(self) -> None:
        """On the event loop: hands each reader its news."""
        begin = time.thread_time()
        try:
            if not (update := self._engine.take()):
                return
            self._distribute(update)
        except Exception as error:  # on the text side: readers must not wait for ever
            logger.critical("delivering a step's tokens failed", exc_info=error)
            self._die(error)
        asyncio.get_running_loop().call_soon(self._delay_next, begin)  # after the readers, which run next

    def _delay_next(self, begin: float) -> None:
        """Delays the next news by the time that these took: under load, several steps at once cost less."""
        took = time.thread_time() - begin
        asyncio.get_running_loop().call_later(min(took, _MAX_DELAY_S), self._deliver)

    def _distribute(self, update: Update) -> None:
        delivery = self._outputs.process(update.events)
        for state in delivery.changed:
            self._mailboxes[state.generation.request_id].notify(state.generation.request_id)
        for state, error in delivery.failed.items():
            self._mailboxes[state.generation.request_id].fail(error)
        if delivery.to_abort:
            self._engine.send(Abort(delivery.to_abort))
        if update.death is not None:
            self._die(update.death)

    def _die(self, error: BaseException) -> None:
        if self.death is not None:
            return
        logger.critical("the engine is dead: %s", describe_death(error))
        self.death = error
        self._fail_all(EngineDead(describe_death(error)))
        self.died.set()
        self._engine.send(Stop())

    def _fail_all(self, error: Exception) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(error)


def _resolve(answer: asyncio.Future[_Result], result: _Result) -> None:
    if not answer.done():  # the caller may have left
        answer.set_result(result)


def call_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[..., Any], *args: Any) -> None:
    """Schedules the call on the loop. From any thread."""
    with contextlib.suppress(RuntimeError):  # the loop was closed while a step was running
        loop.call_soon_threadsafe(callback, *args)
