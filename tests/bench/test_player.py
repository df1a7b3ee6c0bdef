"""Conversations against a real socket: what each turn says, when it is due, and what happens where one fails."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from chairlift.bench import BenchConfig
from chairlift.bench.arrivals import open_loop
from chairlift.bench.client import StreamClient, open_session
from chairlift.bench.failures import FailureKind
from chairlift.bench.player import Player
from chairlift.bench.records import RequestRecord
from chairlift.bench.workload import build_workload

from .null_server import DONE, NullServer, answer_in_full, chat_token, status, stream
from .one_request import play_one


def texts(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


@pytest.mark.asyncio
async def test_each_turn_repeats_what_was_said_before(server: NullServer) -> None:
    replies = (stream(chat_token(content=f"reply {n}"), chat_token("stop"), DONE) for n in count(1))

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(replies)(request, body)

    server.answer = answer
    records = await play_one(server.url, num_requests=3, turns=3, prefix_tokens=2)
    assert [record.failure for record in records] == [None] * 3
    first, second, third = (texts(body) for body in server.bodies)
    assert [role for role, _ in first] == ["system", "user"]
    assert second[:3] == [*first, ("assistant", "reply 1")]
    assert third[:5] == [*second, ("assistant", "reply 2")]
    assert [len(said) for said in (first, second, third)] == [2, 4, 6]


@pytest.mark.asyncio
async def test_turns_are_numbered_and_due_after_the_reply_and_a_time_to_think(server: NullServer) -> None:
    records = await play_one(server.url, num_requests=2, turns=2, think_time=0.03)
    assert [(record.index, record.turn) for record in records] == [(0, 0), (1, 1)]
    first, second = records
    assert first.intended_at == 1.5
    assert second.intended_at - first.ended_at >= 0.03
    assert second.queue_time >= 0.0


@pytest.mark.asyncio
async def test_turns_after_a_failed_one_count_as_not_sent(server: NullServer) -> None:
    answers = iter([answer_in_full, status(500, "broken")])

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await next(answers)(request, body)

    server.answer = answer
    records = await play_one(server.url, num_requests=4, turns=4)
    assert len(server.bodies) == 2
    assert [record.index for record in records] == [0, 1, 2, 3]
    assert [record.turn for record in records] == [0, 1, 2, 3]
    assert [record.failure and record.failure.kind for record in records] == [
        None,
        FailureKind.HTTP_STATUS,
        FailureKind.NOT_SENT,
        FailureKind.NOT_SENT,
    ]


@pytest.mark.asyncio
async def test_a_message_is_sent_with_all_its_fields(server: NullServer, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello", "name": "ann"}]}', encoding="utf-8")
    await play_one(server.url, messages=path)
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello", "name": "ann"}]


@pytest.mark.asyncio
async def test_a_schedule_with_a_most_in_flight_makes_the_others_wait_in_the_client(server: NullServer) -> None:
    first_is_in, gate = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        first_is_in.set()
        await gate.wait()
        return await answer_in_full(request, body)

    server.answer = answer
    settings = {"url": server.url, "num_requests": 3, "request_rate": 1000.0, "concurrency": 1, "output_tokens": 2}
    config = BenchConfig.model_validate(settings).resolved("null")
    records: list[RequestRecord] = []
    async with open_session(config) as session:
        client = StreamClient(session, config.endpoint_url)
        player = Player(client, config, build_workload(config).conversations, records.append)
        sending = asyncio.create_task(open_loop([0.0, 0.0, 0.0], player.play))
        await first_is_in.wait()
        await asyncio.sleep(0.02)
        assert client.live.num_running == 1
        gate.set()
        await sending
    assert server.peak_in_flight == 1
    assert [record.failure for record in records] == [None] * 3
    assert records[1].queue_time >= 0.015
    assert records[1].ttft >= records[1].queue_time
