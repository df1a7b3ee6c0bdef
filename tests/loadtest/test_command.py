"""Whole tests against a real socket, from the settings or flags to the exit code."""

import asyncio
import gc
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.runner import run

from .null_server import Answer, NullServer, answer_in_full, cut_stream, in_turn, status, token

pytestmark = pytest.mark.asyncio


async def bench(url: str, **settings: object) -> int:
    """`run` has an event loop of its own, so it runs in a thread beside the server's."""
    fields = {"url": url, "num_requests": 6, "output_tokens": 3, "prompt_tokens": 5} | settings
    fields = {name: value for name, value in fields.items() if value is not None}
    return await asyncio.to_thread(run, BenchConfig.model_validate(fields))


def together(count: int) -> Answer:
    """Nobody is answered until so many requests are in flight."""
    barrier = asyncio.Barrier(count)

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await barrier.wait()
        return await answer_in_full(request, body)

    return answer


class Printed(NamedTuple):
    lines: list[str]
    errors: list[str]


def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    captured = capsys.readouterr()
    return Printed(captured.out.splitlines(), captured.err.splitlines())


def besides_load(errors: list[str]) -> list[str]:
    """Without the warning that this machine is busy, which it may be."""
    return [line for line in errors if "the load test itself fell behind" not in line]


async def test_success_prints_a_table_and_nothing_else(server: NullServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert await bench(server.url) == 0
    lines, errors = printed(capsys)
    assert lines[:3] == [
        f"server                    {server.url}/v1/completions",
        "model                     null",
        "arrivals                  --concurrency 8 (closed loop)",
    ]
    assert "requests succeeded        6 of 6" in lines
    assert "output tokens             18 (server's usage)" in lines
    assert besides_load(errors) == []


async def test_a_trace_is_replayed(server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 20 * n, "input_length": 5 + n, "output_length": 2 + n} for n in range(3)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    unset = dict.fromkeys(("num_requests", "prompt_tokens", "output_tokens"))
    assert await bench(server.url, trace=path, trace_speedup=2.0, warmup=0, **unset) == 0
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(5, 2), (6, 3), (7, 4)]
    assert f"arrivals                  --trace {path} --trace-speedup 2 (open loop)" in printed(capsys).lines


async def test_conversations_send_all_their_turns_so_many_at_a_time(server: NullServer) -> None:
    server.answer = together(2)
    assert await bench(server.url, num_requests=6, turns=3, warmup=0, concurrency=2) == 0
    assert Counter(len(body["messages"]) for body in server.bodies) == {1: 2, 3: 2, 5: 2}
    assert server.peak_in_flight == 2


async def test_a_server_that_drops_half_of_the_streams_is_reported_and_counted(
    server: NullServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = in_turn(cut_stream(token()), answer_in_full)
    # The warm-up meets a dropped stream too, and the test goes on.
    assert await bench(server.url, num_requests=9, warmup=1, concurrency=1, goodput="ttft:60000") == 1
    lines, errors = printed(capsys)
    assert "requests succeeded        5 of 9" in lines
    assert lines[-1].startswith("failed: incomplete stream 4 (")
    assert any("55.6% of requests within ttft:60000" in line for line in lines)
    assert besides_load(errors) == []


async def test_a_sweep_tests_every_rate_and_tells_the_highest(
    server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "sweep.json", tmp_path / "sweep.html"
    settings = {"sweep": "rate=300,200", "goodput": "ttft:60000", "json_file": path, "report": report}
    assert await bench(server.url, warmup=0, **settings) == 0
    lines = printed(capsys).lines
    assert [line.split()[0] for line in lines[1:3]] == ["200", "300"]
    assert lines[-1] == "highest rate              300"
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 12
    assert json.loads(path.read_text(encoding="utf-8"))["highest"] == 300.0
    assert report.stat().st_size > 10_000


async def test_a_sweep_in_which_no_load_meets_the_limits_fails(
    server: NullServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await bench(server.url, sweep="concurrency=1,2", goodput="ttft:0.0001") == 1
    assert printed(capsys).lines[-1] == "highest concurrency       none"


async def test_without_matplotlib_nothing_is_sent(
    server: NullServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chairlift.loadtest.runner.find_spec", lambda _name: None)
    assert await bench(server.url, report=tmp_path / "report.html") == 1
    [error] = printed(capsys).errors
    assert error == "error: --report needs matplotlib: pip install 'chairlift[bench]', or leave --report out"
    assert server.bodies == []


async def test_a_client_that_falls_behind_says_so(
    server: NullServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("chairlift.loadtest.summary.TOLERABLE_BUSY_SHARE", 0.0)
    assert await bench(server.url) == 0
    [warning] = printed(capsys).errors
    assert warning.startswith("warning: the load test itself fell behind: ")


async def test_warm_up_is_sent_first_and_not_counted_and_every_prompt_is_sent_once(
    server: NullServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await bench(server.url, num_requests=1, warmup=1) == 0
    assert server.peak_in_flight == 1
    assert await bench(server.url, num_requests=20, warmup=3, seed=1) == 0
    assert "requests succeeded        20 of 20" in printed(capsys).lines
    assert len(server.bodies) == 2 + 23
    assert set(Counter(tuple(body["prompt"]) for body in server.bodies).values()) == {1}


async def test_a_rate_sends_without_waiting_for_replies(server: NullServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = together(6)
    assert await bench(server.url, request_rate=500.0, warmup=0) == 0
    assert server.peak_in_flight == 6
    lines = printed(capsys).lines
    assert "arrivals                  --request-rate 500 (open loop)" in lines
    assert any(line.startswith("queued in the client") for line in lines)


async def test_the_garbage_collector_leaves_the_imports_alone_while_measuring(server: NullServer) -> None:
    frozen: list[int] = []

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        frozen.append(gc.get_freeze_count())
        return await answer_in_full(request, body)

    server.answer = answer
    await bench(server.url, num_requests=1, warmup=1)
    during_warm_up, during_measurement = frozen
    assert during_measurement > during_warm_up + 10_000
    assert gc.get_freeze_count() == 0


async def test_a_given_model_is_not_asked_for(server: NullServer) -> None:
    server.models = status(500)
    assert await bench(server.url, model="mine") == 0
    assert {body["model"] for body in server.bodies} == {"mine"}


async def test_a_refused_warm_up_ends_the_run_before_it_begins(
    server: NullServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = status(400, '{"error": {"message": "ignore_eos: extra inputs are not permitted"}}')
    assert await bench(server.url) == 1
    assert len(server.bodies) == 1
    assert printed(capsys).errors == [
        f"error: the warm-up request to {server.url}/v1/completions failed: HTTP 400: this server does not "
        "take ignore_eos: give --no-ignore-eos (ignore_eos: extra inputs are not permitted)"
    ]


async def test_the_files(server: NullServer, tmp_path: Path) -> None:
    path, report = tmp_path / "result.json", tmp_path / "report.html"
    assert await bench(server.url, json_file=path, report=report, concurrency=2) == 0
    assert "6 of 6" in report.read_text(encoding="utf-8")
    document = json.loads(path.read_text(encoding="utf-8"))
    assert (document["config"]["model"], document["config"]["concurrency"]) == ("null", 2)
    assert document["summary"]["num_succeeded"] == 6
    assert [request["index"] for request in document["requests"]] == [0, 1, 2, 3, 4, 5]
    for request in document["requests"]:
        assert len(request["chunks_s"]) == 3
        assert 0 <= request["intended_s"] <= request["sent_s"] <= request["chunks_s"][0] <= request["ended_s"]
        assert request["ended_s"] <= document["summary"]["duration_s"]


async def test_where_nothing_succeeded_all_that_was_asked_for_is_written_and_tells_of_the_failures(
    server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = status(500, "no")
    path, report = tmp_path / "result.json", tmp_path / "report.html"
    assert await bench(server.url, json_file=path, report=report, warmup=0) == 1
    summary = json.loads(path.read_text(encoding="utf-8"))["summary"]
    assert summary["failures"] == [{"label": "HTTP 500", "count": 6, "first_message": "no"}]
    assert summary["ttft_ms"] is None
    assert "failed: HTTP 500" in report.read_text(encoding="utf-8")
    assert printed(capsys).lines[-1] == "failed: HTTP 500          6 (no)"


async def test_a_file_that_cannot_be_written_costs_the_exit_code_not_the_table(
    server: NullServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "result.json"
    path.parent.mkdir()

    async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if path.parent.exists():
            path.parent.rmdir()
        return await answer_in_full(request, body)

    server.answer = answer
    assert await bench(server.url, json_file=path) == 1
    lines, errors = printed(capsys)
    assert "requests succeeded        6 of 6" in lines
    assert errors[-1] == f"error: cannot write {path}: No such file or directory"


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
