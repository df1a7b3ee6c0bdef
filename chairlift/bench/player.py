"""Plays conversations through the client: each turn is sent with all before it, and the replies that were given."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from time import perf_counter
from typing import Any

from chairlift.bench.arrivals import sleep_until
from chairlift.bench.client import Request, StreamClient
from chairlift.bench.config import BenchConfig
from chairlift.bench.failures import Failure, FailureKind
from chairlift.bench.messages import Message
from chairlift.bench.records import RequestRecord
from chairlift.bench.sources import Conversation, Turn

TakeRecord = Callable[[RequestRecord], None]


class Player:
    """Sends conversation after conversation, as arrivals ask for them, and hands on a record of every request.

    The first turns' bodies are encoded ahead of the clock. `config` is resolved; where it has a schedule, its
    concurrency is the most requests in flight, and those for which there is no room wait here.
    """

    def __init__(
        self, client: StreamClient, config: BenchConfig, conversations: Sequence[Conversation], take: TakeRecord
    ) -> None:
        self._client = client
        self._settings = _common_fields(config)
        self._think_time = config.think_time
        self._conversations = conversations
        self._first_bodies = [self._body(conversation[0], []) for conversation in conversations]
        self._first_indices = _first_indices(conversations)
        self._take = take
        self._gate: AbstractAsyncContextManager[Any] = nullcontext()
        if config.is_open_loop and config.concurrency is not None:
            self._gate = asyncio.Semaphore(config.concurrency)

    async def play(self, number: int, due_at: float) -> None:
        """All turns of one conversation, the first due at a time of `perf_counter`. Never raises."""
        conversation, history = self._conversations[number], list[Message]()
        body = self._first_bodies[number]
        for position, turn in enumerate(conversation):
            is_last = position == len(conversation) - 1
            request = Request(
                index=self._first_indices[number] + position,
                body=body,
                turn=position,
                prompt_tokens=turn.prompt_tokens,
                output_tokens=turn.output_tokens,
                wants_text=not is_last,
            )
            async with self._gate:
                reply = await self._client.send(request, due_at)
            self._take(reply.record)
            if is_last:
                return
            if reply.record.failure is not None:
                self._give_up(number, position + 1)
                return
            history += [*turn.prompt["messages"], {"role": "assistant", "content": reply.text}]
            body = self._body(conversation[position + 1], history)
            due_at = perf_counter() + self._think_time
            await sleep_until(due_at)

    def _give_up(self, number: int, first_unsent: int) -> None:
        """Turns that cannot be sent, since there is no reply to go on from, count as failed."""
        now = perf_counter()
        failure = Failure(FailureKind.NOT_SENT, "an earlier turn of the conversation failed")
        for position in range(first_unsent, len(self._conversations[number])):
            index = self._first_indices[number] + position
            self._take(RequestRecord(index, intended_at=now, sent_at=now, ended_at=now, failure=failure, turn=position))

    def _body(self, turn: Turn, history: list[Message]) -> bytes:
        prompt = {"messages": history + turn.prompt["messages"]} if history else turn.prompt
        return json.dumps(self._settings | {"max_tokens": turn.output_tokens} | prompt).encode()


def _common_fields(config: BenchConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": config.model,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if config.ignore_eos:
        fields["ignore_eos"] = True
    return fields


def _first_indices(conversations: Sequence[Conversation]) -> list[int]:
    """For each conversation the index of its first request within the test."""
    starts = [0]
    for conversation in conversations:
        starts.append(starts[-1] + len(conversation))
    return starts[:-1]
