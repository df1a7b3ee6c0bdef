"""Whole tests against a real socket; when conversations are sent, what each turn says, and where one fails."""

import asyncio
import gc
import json
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import pytest

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.client import open_session
from chairlift.loadtest.command import run
from chairlift.loadtest.records import RequestRecord
from chairlift.loadtest.runner import Player, closed_loop, open_loop, watching
from chairlift.loadtest.workload import build_workload

from .conftest import (
    BUSY,
    DONE,
    Answer,
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
    token,
)

pytestmark = pytest.mark.asyncio


class Ran(NamedTuple):
    """The exit code, and what was written but for the warning that this machine is busy, which it may be."""

    code: int
    lines: list[str]
    errors: list[str]


Bench = Callable[..., Awaitable[Ran]]


@pytest.fixture
def bench(server: NullServer, capsys: pytest.CaptureFixture[str], stays_frozen: None) -> Bench:  # noqa: ARG001
    async def make_test(**settings: object) -> Ran:
        """`run` has an event loop of its own, so it runs in a thread beside the server's."""
        fields = {"url": server.url, "num_requests": 6, "output_tokens": 3, "prompt_tokens": 5} | settings
        given = {name: value for name, value in fields.items() if value is not None}
        code = await asyncio.to_thread(run, BenchConfig.model_validate(given))
        captured = capsys.readouterr()
        errors = [line for line in captured.err.splitlines() if "the load test itself fell behind" not in line]
        return Ran(code, captured.out.splitlines(), errors)

    return make_test


def together(count: int) -> Answer:
    """Nobody is answered until so many requests are in flight."""
    return after(asyncio.Barrier(count).wait)


async def test_success_prints_a_table_and_nothing_else(server: NullServer, bench: Bench) -> None:
    code, lines, errors = await bench()
    assert (code, errors) == (0, [])
    assert lines[:2] == [f"server                    {server.url}/v1/completions", "model                     null"]
    assert lines[2] == "arrivals                  --concurrency 8 (closed loop)"
    assert "requests succeeded        6 of 6" in lines
    assert "output tokens             18 (server's usage)" in lines


async def test_a_trace_is_replayed(server: NullServer, tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 20 * n, "input_length": 5 + n, "output_length": 2 + n} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unset = dict.fromkeys(("num_requests", "prompt_tokens", "output_tokens"))
    ran = await bench(trace=path, trace_speedup=2.0, warmup=0, **unset)
    assert ran.code == 0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(5, 2), (6, 3), (7, 4)]
    assert f"arrivals                  --trace {path} --trace-speedup 2 (open loop)" in ran.lines


async def test_conversations_send_all_their_turns_so_many_at_a_time(server: NullServer, bench: Bench) -> None:
    server.answer = together(2)
    assert (await bench(num_requests=6, turns=3, warmup=0, concurrency=2)).code == 0
    assert Counter(len(body["messages"]) for body in server.bodies) == {1: 2, 3: 2, 5: 2}
    assert server.peak_in_flight == 2


async def test_a_server_that_drops_half_of_the_streams_is_reported_and_counted(
    server: NullServer, bench: Bench
) -> None:
    server.answer = in_turn(stream(token(), end="cut"), answer_in_full)
    # The warm-up meets a dropped stream too, and the test goes on.
    code, lines, errors = await bench(num_requests=9, warmup=1, concurrency=1, goodput="ttft:60000")
    assert (code, errors) == (1, [])
    assert "requests succeeded        5 of 9" in lines
    assert lines[-1].startswith("failed: incomplete stream 4 (")
    assert any("55.6% of requests within ttft:60000" in line for line in lines)


async def test_a_sweep_tests_every_value_and_tells_the_highest_and_fails_where_there_is_none(
    server: NullServer, tmp_path: Path, bench: Bench
) -> None:
    path = tmp_path / "sweep.json"
    code, lines, _ = await bench(warmup=0, sweep="rate=300,200", goodput="ttft:60000", json_file=path)
    assert [line.split()[0] for line in lines[1:3]] == ["200", "300"]
    assert (code, lines[-1]) == (0, "highest rate              300")
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12
    assert json.loads(path.read_text(encoding="utf-8"))["highest"] == 300.0
    code, lines, _ = await bench(sweep="concurrency=1,2", goodput="ttft:0.0001")
    assert (code, lines[-1]) == (1, "highest concurrency       none")


async def test_without_matplotlib_nothing_is_sent(
    server: NullServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench
) -> None:
    monkeypatch.setattr("chairlift.loadtest.command.find_spec", lambda _name: None)
    error = "error: --report needs matplotlib: pip install 'chairlift[bench]', or leave --report out"
    assert await bench(report=tmp_path / "report.html") == (1, [], [error])
    assert server.bodies == []


@pytest.mark.usefixtures("stays_frozen")
async def test_a_client_that_falls_behind_says_so(
    monkeypatch: pytest.MonkeyPatch, server: NullServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chairlift.loadtest.summary.TOLERABLE_BUSY_SHARE", 0.0)
    assert await asyncio.to_thread(run, BenchConfig(url=server.url, num_requests=6)) == 0
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: the load test itself fell behind: ")


async def test_warm_up_is_sent_first_and_not_counted_and_every_prompt_is_sent_once(
    server: NullServer, bench: Bench
) -> None:
    assert (await bench(num_requests=1, warmup=1)).code == 0
    assert server.peak_in_flight == 1
    ran = await bench(num_requests=20, warmup=3, seed=1)
    assert (ran.code, "requests succeeded        20 of 20" in ran.lines) == (0, True)
    assert len(server.bodies) == 2 + 23
    assert set(Counter(tuple(body["prompt"]) for body in server.bodies).values()) == {1}


async def test_the_garbage_collector_leaves_the_imports_alone_while_measuring(server: NullServer) -> None:
    gc.unfreeze()
    frozen: list[int] = []

    async def count() -> None:
        frozen.append(gc.get_freeze_count())

    server.answer = after(count)
    await asyncio.to_thread(run, BenchConfig(url=server.url, num_requests=1, warmup=1))
    during_warm_up, during_measurement = frozen
    assert during_measurement > during_warm_up + 10_000
    assert gc.get_freeze_count() == 0


async def test_a_given_model_is_not_asked_for(server: NullServer, bench: Bench) -> None:
    server.models = status(500)
    assert (await bench(model="mine")).code == 0
    assert {body["model"] for body in server.bodies} == {"mine"}


async def test_a_refused_warm_up_ends_the_run_before_it_begins(server: NullServer, bench: Bench) -> None:
    server.answer = status(400, '{"error": {"message": "ignore_eos: extra inputs are not permitted"}}')
    error = (
        f"error: the warm-up request to {server.url}/v1/completions failed: HTTP 400: this server does not "
        "take ignore_eos: give --no-ignore-eos (ignore_eos: extra inputs are not permitted)"
    )
    assert await bench() == (1, [], [error])
    assert len(server.bodies) == 1


async def test_the_raw_figures_are_written(tmp_path: Path, bench: Bench) -> None:
    path = tmp_path / "result.json"
    assert (await bench(json_file=path, concurrency=2)).code == 0
    config, summary, requests = json.loads(path.read_text(encoding="utf-8")).values()
    assert (config["model"], config["concurrency"], summary["num_succeeded"]) == ("null", 2, 6)
    assert [request["index"] for request in requests] == [0, 1, 2, 3, 4, 5]
    for request in requests:
        assert len(request["chunks_s"]) == 3
        assert 0 <= request["intended_s"] <= request["sent_s"] <= request["chunks_s"][0] <= request["ended_s"]
        assert request["ended_s"] <= summary["duration_s"]


async def test_where_nothing_succeeded_all_that_was_asked_for_is_written_and_tells_of_the_failures(
    server: NullServer, tmp_path: Path, bench: Bench
) -> None:
    server.answer = status(500, "no")
    path, report = tmp_path / "result.json", tmp_path / "report.html"
    code, lines, _ = await bench(json_file=path, report=report, warmup=0)
    assert (code, lines[-1]) == (1, "failed: HTTP 500          6 (no)")
    summary = json.loads(path.read_text(encoding="utf-8"))["summary"]
    assert summary["failures"] == [{"label": "HTTP 500", "count": 6, "first_message": "no"}]
    assert summary["ttft_ms"] is None
    assert "failed: HTTP 500" in report.read_text(encoding="utf-8")


async def test_a_file_that_cannot_be_written_costs_the_exit_code_not_the_table(
    server: NullServer, tmp_path: Path, bench: Bench
) -> None:
    path = tmp_path / "results" / "result.json"
    path.parent.mkdir()

    async def lose_directory() -> None:
        shutil.rmtree(path.parent, ignore_errors=True)

    server.answer = after(lose_directory)
    code, lines, errors = await bench(json_file=path)
    assert (code, "requests succeeded        6 of 6" in lines) == (1, True)
    assert errors[-1] == f"error: cannot write {path}: No such file or directory"


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


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_terminal"), [(Terminal(), True), (StringIO(), False)])
async def test_a_terminal_sees_how_far_it_is_and_what_failed_and_a_file_nothing(
    stream: StringIO, is_terminal: bool
) -> None:
    async with watching(4, stream) as watch:
        watch.add(record(0))
        watch.add(failed(1, BUSY))
    shown = stream.getvalue()
    assert ("2/4" in shown, "1 failed" in shown, shown == "") == (is_terminal, is_terminal, not is_terminal)
