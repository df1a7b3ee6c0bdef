"""When conversations are sent, what each turn says, where one fails; and the load test's watch over itself."""

import asyncio
import json
import sys
import time
from io import StringIO
from pathlib import Path
from time import perf_counter

import pytest

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import open_session
from chairlift.loadtest.runner import Player, closed_loop, open_loop, watching
from chairlift.loadtest.summary import RequestRecord
from chairlift.loadtest.workload import build_workload

from .conftest import (
    BUSY,
    DONE,
    NullServer,
    after,
    answer_in_full,
    chat_token,
    failed,
    in_turn,
    play_one,
    record,
    status,
    stream,
)

pytestmark = pytest.mark.asyncio


class Flights:
    """A stand-in for the client: counts what is in flight; a request ends when the gate is open."""

    def __init__(self, is_open: bool = False) -> None:
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()
        self.order: list[str] = []
        self.num_in_flight = self.peak = 0

    async def send(self, index: int, intended_at: float) -> None:
        assert intended_at <= perf_counter()
        self.order.append(f"sent {index}")
        self.num_in_flight += 1
        self.peak = max(self.peak, self.num_in_flight)
        await self.gate.wait()
        await asyncio.sleep(0)  # the others see it before it lands
        self.order.append(f"ended {index}")
        self.num_in_flight -= 1


@pytest.mark.parametrize(("count", "concurrency", "peak"), [(20, 3, 3), (2, 100, 2), (0, 8, 0)])
async def test_closed_loop_reaches_its_concurrency_and_never_exceeds_it(
    count: int, concurrency: int, peak: int
) -> None:
    flights = Flights(is_open=True)
    await closed_loop(count, concurrency, flights.send)
    assert flights.peak == peak
    assert sorted(flights.order) == sorted(f"{what} {index}" for what in ("sent", "ended") for index in range(count))


async def test_closed_loop_sends_nothing_more_until_a_reply_has_ended() -> None:
    flights = Flights()
    loop = asyncio.create_task(closed_loop(5, 2, flights.send))
    for _ in range(10):
        await asyncio.sleep(0)
    assert flights.order == ["sent 0", "sent 1"]
    flights.gate.set()
    await loop
    assert {f"sent {index}" for index in range(5)} < set(flights.order)


async def test_closed_loop_intends_each_request_when_it_sends_it() -> None:
    sent = [perf_counter()]

    async def send(_index: int, intended_at: float) -> None:
        assert sent[-1] <= intended_at <= perf_counter()
        await asyncio.sleep(0.002)
        sent.append(perf_counter())

    await closed_loop(3, 1, send)
    assert len(sent) == 4


async def test_open_loop_sends_all_though_none_has_ended() -> None:
    flights = Flights()
    loop = asyncio.create_task(open_loop([0.0, 0.001, 0.002, 0.003], flights.send))
    while flights.num_in_flight < 4:
        await asyncio.sleep(0.001)
    assert not loop.done()
    flights.gate.set()
    await loop
    assert flights.num_in_flight == 0


async def test_a_late_open_loop_keeps_to_the_schedule_it_was_given_and_never_sends_early() -> None:
    """Coordinated omission: the stall shifts when requests are sent, not when they were meant to be."""
    intended: list[float] = []
    late_by: list[float] = []

    async def send(index: int, intended_at: float) -> None:
        intended.append(intended_at)
        late_by.append(perf_counter() - intended_at)
        if index == 0:
            time.sleep(0.02)

    await open_loop([0.0, 0.005, 0.010, 0.025], send)
    assert [moment - intended[0] for moment in intended] == pytest.approx([0.0, 0.005, 0.010, 0.025])
    assert late_by[1] >= 0.014
    assert late_by[2] >= 0.009
    assert min(late_by) >= 0.0


async def test_an_open_loop_that_lags_still_sends_while_it_catches_up() -> None:
    flights = Flights(is_open=True)
    await open_loop([-1.0] * 50, flights.send)
    assert flights.order.index("ended 0") < flights.order.index("sent 49")


async def test_each_turn_repeats_what_was_said_before(server: NullServer) -> None:
    server.answer = in_turn(*(stream(chat_token(content=f"reply {n}"), chat_token("stop"), DONE) for n in (1, 2, 3)))
    records = await play_one(server.url, num_requests=3, turns=3, prefix_tokens=2)
    assert [record.failure for record in records] == [None] * 3
    first, second, third = ([(said["role"], said["content"]) for said in body["messages"]] for body in server.bodies)
    assert [role for role, _ in first] == ["system", "user"]
    assert second[:3] == [*first, ("assistant", "reply 1")]
    assert third[:5] == [*second, ("assistant", "reply 2")]
    assert [len(said) for said in (first, second, third)] == [2, 4, 6]


async def test_turns_are_numbered_and_due_after_the_reply_and_a_time_to_think(server: NullServer) -> None:
    first, second = await play_one(server.url, num_requests=2, turns=2, think_time=0.03)
    assert [(record.index, record.turn) for record in (first, second)] == [(0, 0), (1, 1)]
    assert first.intended_at == 1.5
    assert second.intended_at - first.ended_at >= 0.03
    assert second.queue_time >= 0.0


async def test_turns_after_a_failed_one_count_as_not_sent(server: NullServer) -> None:
    server.answer = in_turn(answer_in_full, status(500, "broken"))
    records = await play_one(server.url, num_requests=4, turns=4)
    assert len(server.bodies) == 2
    assert [(record.index, record.turn) for record in records] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    labels = [record.failure and record.failure.label for record in records]
    assert labels == [None, "HTTP 500", "not sent", "not sent"]


async def test_a_message_is_sent_with_all_its_fields(server: NullServer, tmp_path: Path) -> None:
    message, path = {"role": "user", "content": "hello", "name": "ann"}, tmp_path / "m.jsonl"
    path.write_text(json.dumps({"messages": [message]}), encoding="utf-8")
    await play_one(server.url, conversations=path)
    assert server.bodies[0]["messages"] == [message]


async def test_a_schedule_with_a_most_in_flight_makes_the_others_wait_in_the_client(server: NullServer) -> None:
    gate = asyncio.Event()
    server.answer = after(gate.wait)
    settings = {"url": server.url, "num_requests": 3, "request_rate": 1000.0, "concurrency": 1, "output_tokens": 2}
    config = BenchConfig.model_validate(settings).resolved("null")
    records: list[RequestRecord] = []
    async with open_session(config) as session:
        player = Player(session, config, build_workload(config).conversations, records.append)
        sending = asyncio.create_task(open_loop([0.0, 0.0, 0.0], player.play))
        while not server.bodies:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        assert server.num_in_flight == 1
        gate.set()
        await sending
    assert server.peak_in_flight == 1
    assert [record.failure for record in records] == [None] * 3
    assert records[1].queue_time >= 0.015
    assert records[1].ttft >= records[1].queue_time


async def test_a_blocked_event_loop_is_seen_as_lag_and_it_is_sampled_until_the_end() -> None:
    num_tasks = len(asyncio.all_tasks())
    async with watching(1) as watch:
        await asyncio.sleep(0.005)
        time.sleep(0.08)
        while len(watch.lags) < 3:
            await asyncio.sleep(0.005)
    # The timer was due 10 ms after the start, at the earliest.
    assert max(watch.lags) >= 0.07
    assert min(watch.lags) >= 0.0
    assert len(asyncio.all_tasks()) == num_tasks


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_a_terminal_sees_how_far_it_is_and_what_failed_and_a_file_nothing(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    async with watching(4) as watch:
        watch.take(record(0))
        watch.take(failed(1, BUSY))
    shown = stderr.getvalue()
    assert ("2/4" in shown, "1 failed" in shown, shown == "") == (is_terminal, is_terminal, not is_terminal)
