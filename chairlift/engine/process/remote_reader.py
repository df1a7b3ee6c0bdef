"""The engine's end of the socket: a worker as the engine sees it."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count

from chairlift.engine.async_llm import AsyncLLM, call_if_open
from chairlift.engine.process.connection import ProcessConnection, Service, pack
from chairlift.engine.process.messages import EnginesGrammar, NumberedAdd, PackedUpdate, Release
from chairlift.engine.text.grammar import Thinking
from chairlift.engine.thread import Abort, Add, Leave, LocalEngine, Taken, describe_death
from chairlift.errors import EngineDead
from chairlift.params import StructuredOutputs
from chairlift.plan import Grammar
from chairlift.scheduler import Request

_FEW_SCORES = 100  # in a message; more are pickled in a thread


class RemoteReader(ProcessConnection):
    """The engine's end of the socket: a worker as a reader."""

    def __init__(self, llm: AsyncLLM, services: Mapping[str, Service]) -> None:
        """`services`: offered to the worker, beside the engine's. The worker is connected once it has a socket."""
        of_engine = {"read_snapshot": llm.read_snapshot, "reset_prefix_cache": llm.reset_prefix_cache}
        super().__init__({**of_engine, "compile": self._compile, **services})
        loop = asyncio.get_running_loop()
        self._grammars = llm.inputs.grammars
        self._kept: dict[int, Callable[[], Grammar]] = {}  # grammars that the worker has numbers of
        self._serials = count()
        self._numbers_of: dict[str, int] = {}  # of sequences
        self._parts: deque[PackedUpdate] = deque()  # of an update; the next ones to send
        self._sending: asyncio.Task[None] | None = None
        self._is_full = False  # a part is in flight
        engine = llm.usable_engine()
        assert isinstance(engine, LocalEngine), "the engine of a server with workers is in its own process"
        self._subscription = engine.subscribe(lambda: call_if_open(loop, self._flush))

    def tell_death(self, death: BaseException) -> None:
        """Reports the engine's death to the worker, because a hung thread cannot."""
        self.post(PackedUpdate(death=EngineDead(describe_death(death))))

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._subscription.send(Leave())
        self._kept.clear()

    def _receive(self, message: object) -> None:
        match message:
            case Taken():
                self._is_full = False
                self._flush()
            case Abort():
                self._subscription.send(message)
            case NumberedAdd():
                self._numbers_of |= message.numbers
                self._subscription.send(Add([self._with_grammar(request) for request in message.requests]))
            case Release():
                self._kept.pop(message.number, None)
            case _:
                super()._receive(message)

    def _flush(self) -> None:
        """Sends the next part of the pending news, unless the worker has not yet taken the one before."""
        if self._is_full or self.lost.is_set():
            return
        try:
            if not self._parts and (update := self._subscription.take()):
                self._parts.extend(PackedUpdate.in_parts(update, self._numbers_of))
            if self._parts:
                self._is_full = True
                self._send(self._parts.popleft())
        except Exception as error:  # it is called by the loop, which would only log it
            self.break_off(error)

    def _send(self, part: PackedUpdate) -> None:
        if part.num_scores <= _FEW_SCORES:
            self.post(part)
        else:
            self._sending = asyncio.create_task(self._send_slowly(part), name="chairlift-scores")

    async def _send_slowly(self, part: PackedUpdate) -> None:
        try:
            self.post_packed(await asyncio.to_thread(pack, part))
        except Exception as error:
            self.break_off(error)

    def _with_grammar(self, request: Request) -> Request:
        if not isinstance(request.new_grammar, EnginesGrammar):
            return request
        return replace(request, new_grammar=self._kept[request.new_grammar.number])

    async def _compile(self, outputs: StructuredOutputs, thinking: Thinking | None) -> int:
        shared = asyncio.wrap_future(self._grammars.compile(outputs, thinking))
        number = next(self._serials)
        self._kept[number] = self._grammars.starter(await asyncio.shield(shared))
        return number
