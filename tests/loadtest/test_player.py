"""Conversations: when they are sent, what each turn says, and what happens where one fails."""

import asyncio
import statistics
import time
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from aiohttp import web

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import StreamClient, open_session
from chairlift.loadtest.records import RequestRecord
from chairlift.loadtest.runner import Player, closed_loop, open_loop
from chairlift.loadtest.workload import build_workload, random_offsets

from .null_server import DONE, NullServer, answer_in_full, chat_token, status, stream
from .one_request import play_one


class Moment(NamedTuple):
    """When a request was meant to be sent, and when it was."""

    intended: float
    sent: float


class Flights:
    """A stand-in for the client: counts what is in flight; a request ends when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.intended: dict[int, float] = {}
        self.num_in_flight = 0
        self.peak = 0

    async def send(self, index: int, intended_at: float) -> None:
        self.intended[index] = intended_at
        self.num_in_flight += 1
        self.peak = max(self.peak, self.num_in_flight)
        await self.gate.wait()
        # Let the others see it before it lands.
        await asyncio.sleep(0)
        self.num_in_flight -= 1


def poisson_offsets(count: int, rate: float, seed: int = 0) -> list[float]:
    return random_offsets(count, rate, rate, 1.0, np.random.default_rng(seed))


def gaps(offsets: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(offsets)]


def test_offsets_begin_at_once_and_never_go_back() -> None:
    offsets = poisson_offsets(1000, rate=50.0)
    assert (len(offsets), offsets[0]) == (1000, 0.0)
    assert min(gaps(offsets)) >= 0.0
    assert poisson_offsets(1, rate=0.001) == [0.0]
    assert random_offsets(1, 1.0, 2.0, 1.0, np.random.default_rng(0)) == [0.0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_add_up_to_what_the_rate_says_whatever_the_seed(seed: int) -> None:
    assert poisson_offsets(21, rate=4.0, seed=seed)[-1] == pytest.approx(5.0)
    assert poisson_offsets(5, 2.0, seed=seed) == poisson_offsets(5, 2.0, seed=seed)
    assert poisson_offsets(5, 2.0, seed=seed) != poisson_offsets(5, 2.0, seed=seed + 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    spaces = gaps(random_offsets(40_001, 20.0, 20.0, burstiness, np.random.default_rng(0)))
    assert statistics.mean(spaces) == pytest.approx(0.05)
    assert statistics.stdev(spaces) == pytest.approx(0.05 / burstiness**0.5, rel=0.05)
    if burstiness == 1.0:  # exponential: P(gap > mean) = 1/e
        assert sum(gap > 0.05 for gap in spaces) / len(spaces) == pytest.approx(0.368, abs=0.01)


def test_a_ramp_goes_from_the_first_rate_to_the_last() -> None:
    spaces = gaps(random_offsets(30_001, 10.0, 30.0, 1.0, np.random.default_rng(0)))
    assert statistics.mean(spaces[:1000]) == pytest.approx(1 / 10, rel=0.1)
    assert statistics.mean(spaces[14_500:15_500]) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.mean(spaces[-1000:]) == pytest.approx(1 / 30, rel=0.1)


@pytest.mark.asyncio
@pytest.mark.parametrize(("count", "concurrency", "peak"), [(20, 3, 3), (2, 100, 2), (0, 8, 0)])
async def test_closed_loop_reaches_its_concurrency_and_never_exceeds_it(
    count: int, concurrency: int, peak: int
) -> None:
    flights = Flights()
    flights.gate.set()
    await closed_loop(count, concurrency, flights.send)
    assert flights.peak == peak
    assert sorted(flights.intended) == list(range(count))


@pytest.mark.asyncio
async def test_closed_loop_sends_nothing_more_until_a_reply_has_ended() -> None:
    flights = Flights()
    loop = asyncio.create_task(closed_loop(5, 2, flights.send))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(flights.intended) == [0, 1]
    flights.gate.set()
    await loop
    assert sorted(flights.intended) == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
async def test_closed_loop_intends_each_request_when_it_sends_it() -> None:
    moments: list[Moment] = []

    async def send(_index: int, intended_at: float) -> None:
        moments.append(Moment(intended_at, perf_counter()))
        await asyncio.sleep(0.002)

    before = perf_counter()
    await closed_loop(3, 1, send)
    assert moments[0].intended >= before
    assert all(moment.intended <= moment.sent for moment in moments)
    assert all(later.intended - earlier.sent >= 0.0015 for earlier, later in pairwise(moments))


@pytest.mark.asyncio
async def test_open_loop_sends_all_though_none_has_ended() -> None:
    flights = Flights()
    loop = asyncio.create_task(open_loop([0.0, 0.001, 0.002, 0.003], flights.send))
    while flights.num_in_flight < 4:
        await asyncio.sleep(0.001)
    assert not loop.done()
    flights.gate.set()
    await loop
    assert flights.num_in_flight == 0


@pytest.mark.asyncio
async def test_open_loop_never_sends_early() -> None:
    sent_early_by: list[float] = []

    async def send(_index: int, intended_at: float) -> None:
        sent_early_by.append(intended_at - perf_counter())

    await open_loop([0.0, 0.004, 0.008], send)
    assert max(sent_early_by) <= 0.0


@pytest.mark.asyncio
async def test_a_late_open_loop_keeps_to_the_schedule_it_was_given() -> None:
    """Coordinated omission: the stall shifts when requests are sent, not when they were meant to be."""
    moments: list[Moment] = []

    async def send(index: int, intended_at: float) -> None:
        moments.append(Moment(intended_at, perf_counter()))
        if index == 0:
            time.sleep(0.02)

    await open_loop([0.0, 0.005, 0.010], send)
    start = moments[0].intended
    assert [moment.intended - start for moment in moments] == pytest.approx([0.0, 0.005, 0.010])
    assert moments[1].sent - moments[1].intended >= 0.014
    assert moments[2].sent - moments[2].intended >= 0.009


@pytest.mark.asyncio
async def test_an_open_loop_that_lags_still_sends_while_it_catches_up() -> None:
    order: list[str] = []

    async def send(index: int, _intended_at: float) -> None:
        order.append(f"sent {index}")
        await asyncio.sleep(0)
        order.append(f"ended {index}")

    await open_loop([-1.0] * 50, send)
    assert order.index("ended 0") < order.index("sent 49")


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
    assert [record.failure and record.failure.label for record in records] == [
        None,
        "HTTP 500",
        "not sent",
        "not sent",
    ]


@pytest.mark.asyncio
async def test_a_message_is_sent_with_all_its_fields(server: NullServer, tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hello", "name": "ann"}]}', encoding="utf-8")
    await play_one(server.url, conversations=path)
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
        assert client.num_running == 1
        gate.set()
        await sending
    assert server.peak_in_flight == 1
    assert [record.failure for record in records] == [None] * 3
    assert records[1].queue_time >= 0.015
    assert records[1].ttft >= records[1].queue_time
