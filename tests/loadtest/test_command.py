"""Whole tests against a real socket, from the settings or flags to the exit code."""

import asyncio
import gc
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.runner import run

from .conftest import Answer, NullServer, after, answer_in_full, in_turn, status, stream, token

pytestmark = pytest.mark.asyncio


class Ran(NamedTuple):
    """The exit code, and what was written but for the warning that this machine is busy, which it may be."""

    code: int
    lines: list[str]
    errors: list[str]


Bench = Callable[..., Awaitable[Ran]]


@pytest.fixture
def bench(server: NullServer, capsys: pytest.CaptureFixture[str]) -> Bench:
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
    monkeypatch.setattr("chairlift.loadtest.runner.find_spec", lambda _name: None)
    error = "error: --report needs matplotlib: pip install 'chairlift[bench]', or leave --report out"
    assert await bench(report=tmp_path / "report.html") == (1, [], [error])
    assert server.bodies == []


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


async def test_a_rate_sends_without_waiting_for_replies(server: NullServer, bench: Bench) -> None:
    server.answer = together(6)
    code, lines, _ = await bench(request_rate=500.0, warmup=0)
    assert (code, server.peak_in_flight) == (0, 6)
    assert "arrivals                  --request-rate 500 (open loop)" in lines
    assert any(line.startswith("queued in the client") for line in lines)


async def test_the_garbage_collector_leaves_the_imports_alone_while_measuring(server: NullServer, bench: Bench) -> None:
    frozen: list[int] = []

    async def count() -> None:
        frozen.append(gc.get_freeze_count())

    server.answer = after(count)
    await bench(num_requests=1, warmup=1)
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


@pytest.mark.slow
async def test_the_capacity_is_measured_with_a_server_that_costs_nothing() -> None:
    flags = ["--rates", "400", "--streams", "8", "--tokens", "10"]
    command = [sys.executable, "benchmarks/load_test_capacity.py", *flags]
    root = Path(__file__).parents[2]
    finished = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, cwd=root)
    assert finished.returncode == 0, finished.stderr
    report = json.loads(finished.stdout.splitlines()[-1])
    assert (report["settings"]["streams"], report["settings"]["tokens"]) == (8, 10)
    [figures] = report["rounds"]
    assert figures["asked"] == 400
    assert figures["arrived"] > 0
