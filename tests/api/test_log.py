"""The log: the line of each request and its id, the lines about the batch, and how records are written."""

import asyncio
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientSession

from chairlift.api import ServerConfig
from chairlift.api.pages import WATCH_PATH
from chairlift.api.server import reporting
from chairlift.api.telemetry import log
from chairlift.api.telemetry.log import (
    JsonFormatter,
    LogFile,
    QueuedHandler,
    TextFormatter,
    activity_fields,
    with_fields,
)
from chairlift.engine.journal import EngineStats, Histogram, Totals
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, post, user
from tests.api.fault_support import forward_of, held, serving, until_idle
from tests.engine.async_support import wait_until
from tests.support.server_process import SERVE, long_stream, run_to_end, running, start_python

Log = pytest.LogCaptureFixture
SECRET = "Zanzibar"
SIX = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True)
def info_level(caplog: Log) -> None:
    caplog.set_level(logging.INFO)


def lines_of(caplog: Log, message: str) -> list[dict[str, Any]]:
    """The lines of that message, as a reader of the JSON format gets them."""
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    return [line for line in lines if line["message"] == message]


async def test_a_request_has_one_line_with_ids_tokens_times_and_endings(server: Server, caplog: Log) -> None:
    async with ClientSession() as http:
        for _ in range(2):
            async with http.post(server.url + COMPLETIONS, json=SIX, headers={"X-Request-Id": "mine"}) as response:
                reply = await response.json()
    await post(server, COMPLETIONS, {**SIX, "prompt": ["Once upon a time", "a"], "stop": [","]})
    first, second, third = lines_of(caplog, "request")
    told = {"request_id": "mine", "path": COMPLETIONS, "status": 200, "finish": "length", "stream": "no"}
    told |= {"level": "info", "prompt_tokens": 4, "cached_tokens": 3, "output_tokens": 6}
    assert {name: second[name] for name in told} == told
    assert second["id"] == reply["id"] != first["id"]
    assert (first["cached_tokens"], third["finish"]) == (0, "stop,length")  # of several sequences all
    assert 0 <= second["queue_seconds"] <= second["first_token_seconds"] <= second["total_seconds"]


async def test_no_text_of_anybody_is_in_the_log(server: Server, caplog: Log) -> None:
    await post(server, CHAT, {"messages": user(SECRET), "user": SECRET, "max_tokens": 4, "stop": [SECRET]})
    await post(server, CHAT, {"messages": user(SECRET), "temperature": SECRET}, status=400)
    await post(server, CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}, status=400)
    await post(server, COMPLETIONS, {"prompt": SECRET * 1000}, status=400)
    lines = lines_of(caplog, "request")
    assert [line["status"] for line in lines] == [200, 400, 400, 400]
    assert SECRET not in json.dumps(lines)
    assert SECRET not in caplog.text


async def test_the_line_of_a_refused_request_says_why(server: Server, caplog: Log) -> None:
    for fields, status in (({"foo": 1}, 400), ({"model": "gpt-9"}, 404), ({"x" * 10_000: 1}, 400), ({}, 200)):
        await post(server, CHAT, {"messages": user("a"), "max_tokens": 1, **fields}, status)
    assert [line.get("reason") for line in lines_of(caplog, "request")] == [
        "unknown or unsupported field: foo",
        "there is no model 'gpt-9' here, only 'bundled'",
        f"unknown or unsupported field: {'x' * 170}...",
        None,
    ]


async def test_a_client_that_leaves_is_an_abort_before_a_reply_or_amid_it(server: Server, caplog: Log) -> None:
    body = {**SIX, "max_tokens": 400}
    async with ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            waiting = asyncio.create_task(http.post(server.url + COMPLETIONS, json=body))
            await gate.entered()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await wait_until(lambda: len(lines_of(caplog, "request")) == 1, "the line is there")
            gate.open()
            async with http.post(server.url + COMPLETIONS, json={**body, "stream": True}) as response:
                await response.content.readany()
        await until_idle(server, server.llm.config.num_slots)
    left, cut = lines_of(caplog, "request")
    assert (left["status"], left["finish"], left["output_tokens"]) == (499, "abort", 0)
    assert (cut["status"], cut["finish"], cut["stream"]) == (200, "abort", "yes")
    assert cut["output_tokens"] > 0


async def test_what_clients_make_up_cannot_look_like_another_field(server: Server, caplog: Log) -> None:
    forged = 'a" status=200 \\'
    async with ClientSession() as http:
        await http.post(server.url + "/nowhere", headers={"X-Request-Id": forged})
    (record,) = [record for record in caplog.records if record.message == "request"]
    text = TextFormatter().format(record)
    assert text.count("\n") == 0
    assert ' request_id="a\\" status=200 \\\\" path=other status=404 ' in text
    assert json.loads(JsonFormatter().format(record))["request_id"] == forged


def stats(seconds: float, num_steps: int, num_rows: int, *totals: int, **requests: Any) -> EngineStats:
    """An engine after so many steps, of so many rows in all. `totals`: tokens of prompts, reused and generated ones."""
    rows = Histogram((1.0,), [0, num_steps], float(num_rows))
    tokens = dict(zip(("num_prompt_tokens", "num_cached_tokens", "num_generated_tokens"), totals, strict=False))
    return EngineStats(seconds, Totals(**tokens), num_warm=2, step_rows=rows, **requests)


def test_a_line_about_the_batch_tells_what_was_done_since_the_one_before() -> None:
    before = stats(10.0, 100, 400, 1000, 500, 2000)
    now = stats(15.0, 120, 470, 1100, 525, 2070, num_running=3, num_waiting=1)
    state = {"running": 3, "waiting": 1, "slots": 8, "warm": 2, "cache_usage": 0.0}
    rates = {"prompt_tokens_per_second": 20.0, "generated_tokens_per_second": 14.0}
    assert activity_fields(before, now, num_slots=8) == {**state, **rates, "batch_size": 3.5, "hit_rate": 0.25}
    rates, means = dict.fromkeys(rates, 0.0), {"batch_size": None, "hit_rate": None}  # of nothing
    assert activity_fields(now, replace(now, time=16.0), 8) == {**state, **rates, **means}


async def test_the_batch_has_lines_while_something_runs_only(server: Server, caplog: Log) -> None:
    looks = [stats(1.0, 0, 0), stats(2.0, 0, 0), stats(3.0, 5, 5), stats(4.0, 5, 5), stats(5.0, 5, 5, num_running=1)]
    seen = iter(looks)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await log.log_activity(lambda: next(seen), num_slots=8, interval_s=0.001)
    assert [line["running"] for line in lines_of(caplog, "batch")] == [0, 1]
    for interval_s, num_tasks in ((0.0, 0), (60.0, 1)):  # an interval of zero is never
        with reporting(server.llm, interval_s):
            assert [task.get_name() for task in asyncio.all_tasks()].count("chairlift-activity-log") == num_tasks


HEADER = "X-Request-Id"
FRESH = re.compile(r"[0-9a-f]{32}")
BODY = {"prompt": "a", "max_tokens": 2}


async def test_every_reply_carries_the_sane_id_that_was_sent_or_a_new_one(server: Server, http: ClientSession) -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = [
        *(("POST", COMPLETIONS, {"json": body}) for body in (BODY, {**BODY, "stream": True}, "no object")),
        ("POST", COMPLETIONS, {"json": BODY, "headers": {"Expect": "miracles"}}),
        *(("GET", path, {}) for path in (COMPLETIONS, "/", "/page/page.js", "/health", "/metrics", WATCH_PATH)),
        *(("POST", "/nowhere", {}), ("HEAD", "/version", {})),
    ]
    for method, path, arguments in asked:
        async with http.request(method, server.url + path, **arguments) as response:
            assert FRESH.fullmatch(response.headers[HEADER]), (method, path)
        sent = {**arguments, "headers": {**arguments.get("headers", {}), HEADER: "my id/42"}}
        async with http.request(method, server.url + path, **sent) as response:
            assert response.headers.getall(HEADER) == ["my id/42"], (method, path)
    longest = "".join(chr(code) for code in range(0x21, 0x7F)).ljust(128, "x")
    for insane in ("", f"{longest}x", "tab\there", "ümlaut"):
        async with http.get(server.url + "/health", headers={HEADER: insane}) as response:
            assert FRESH.fullmatch(response.headers[HEADER])
    async with http.get(server.url + "/health", headers={HEADER: longest}) as response:
        assert response.headers[HEADER] == longest


async def test_refusals_carry_it_too() -> None:
    config = ServerConfig.model_validate({"api_key": ["key"], "allowed_origin": ["https://a.example"]})
    origin = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    async with serving(config) as server, ClientSession() as http:
        async with http.post(server.url + COMPLETIONS, json=BODY, headers={HEADER: "mine"}) as refused:
            assert (refused.status, refused.headers[HEADER]) == (401, "mine")
        async with http.options(server.url + COMPLETIONS, headers={**origin, HEADER: "mine"}) as preflight:
            assert (preflight.status, preflight.headers[HEADER]) == (403, "mine")


def record_of(
    text: str, /, *arguments: object, exc_info: Any = None, **fields: str | float | None
) -> logging.LogRecord:
    logger, extra = logging.getLogger("chairlift.test"), with_fields(fields)
    return logger.makeRecord(logger.name, logging.WARNING, "file.py", 1, text, arguments, exc_info, None, extra)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        *(("plain-1.5/x:y", "plain-1.5/x:y"), ("two words", '"two words"'), ('quote"', '"quote\\""'), ("a=b", '"a=b"')),
        *(("back\\slash", '"back\\\\slash"'), ("new\nline", '"new\\nline"'), ("", '""'), ("ü", '"\\u00fc"')),
        *((3, "3"), (0.25, "0.25")),
    ],
)
def test_a_value_is_quoted_where_it_needs_it_and_none_left_out(value: str | float, written: str) -> None:
    record = record_of("said", unknown=None, name=value)
    assert TextFormatter().format(record).endswith(f" WARNING said name={written}")
    assert "unknown" not in json.loads(JsonFormatter().format(record))


def test_control_characters_cannot_begin_a_new_line_of_text() -> None:
    text = TextFormatter().format(record_of("of %s", "x\n2026 INFO forged\x1b[2J\u2028"))
    assert text.endswith("of x\\x0a2026 INFO forged\\x1b[2J\\x2028")


def test_json_has_time_with_its_zone_level_logger_message_and_fields_on_one_line() -> None:
    line = JsonFormatter().format(record_of("%d lines\nin one", 2, status=200, message="not this", request_id="é"))
    entry = json.loads(line)
    assert line.count("\n") == 0
    assert line.isascii()
    time = datetime.fromisoformat(entry.pop("time"))
    assert time.tzinfo is not None
    assert abs(time.timestamp() - datetime.now().timestamp()) < 60
    text = {"level": "warning", "logger": "chairlift.test", "message": "2 lines\nin one"}
    assert entry == {**text, "status": 200, "request_id": "é"}


def test_an_exception_is_a_string_of_the_record_and_lines_after_it_in_text() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = record_of("it failed", exc_info=sys.exc_info())
    entry = json.loads(JsonFormatter().format(record))
    assert entry["exception"].startswith("Traceback")
    assert entry["exception"].endswith("ValueError: broken")
    first, *others = TextFormatter().format(record).splitlines()
    assert first.endswith("WARNING it failed")
    assert others[-1] == "ValueError: broken"


class Stuck(io.StringIO):
    """A stream that somebody reads only when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.is_writing = threading.Event()

    def write(self, text: str) -> int:
        self.is_writing.set()
        assert self.may_write.wait(10)
        return super().write(text)


def test_a_log_that_nobody_reads_is_not_waited_for_and_drops_records() -> None:
    stream = Stuck()
    handler = QueuedHandler(stream, max_records=2)
    handler.emit(record_of("first"))
    assert stream.is_writing.wait(10)
    for number in range(5):
        handler.emit(record_of(f"number {number}"))
    assert not handler.wait(0.01)
    assert stream.getvalue() == ""
    stream.may_write.set()
    handler.flush()
    dropped = "3 log records were dropped: the log was not read fast enough"
    assert stream.getvalue().splitlines() == ["first", dropped, "number 0", "number 1"]


def test_a_reader_that_goes_away_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        handler = QueuedHandler(stream)
        for text in ("to nobody", "again"):
            handler.emit(record_of(text))
            handler.flush()


def test_every_record_is_an_object_of_its_own_from_start_to_end() -> None:
    with running(SERVE, "--log-format", "json", "--log-interval", "0.02") as process:
        url = process.url.rstrip('"}')  # it was read out of a JSON string
        with httpx.Client(base_url=url, timeout=60) as client:
            client.post("/v1/completions", json=long_stream(100), headers={"X-Request-Id": 129 * "x"})
            client.post("/v1/completions", json=long_stream(100), headers={"X-Request-Id": "mine"})
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    entries = [json.loads(line) for line in process.log]
    assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
    requests = [entry for entry in entries if entry["message"] == "request"]
    assert [entry["output_tokens"] for entry in requests] == [100, 100]
    assert len(requests[0]["request_id"]) == 32
    assert requests[1]["request_id"] == "mine"
    batches = [entry for entry in entries if entry["message"] == "batch"]
    assert batches
    assert all(entry["running"] <= entry["slots"] for entry in batches)


def test_a_log_file_is_added_to_and_begun_anew_when_it_was_renamed(tmp_path: Path) -> None:
    path, renamed = tmp_path / "log", tmp_path / "log.1"
    path.write_text("earlier\n", encoding="utf-8")
    handler = QueuedHandler(LogFile(path))
    handler.emit(record_of("first"))
    handler.flush()
    path.rename(renamed)
    for text in ("second", "third"):
        handler.emit(record_of(text))
    handler.flush()
    assert renamed.read_text(encoding="utf-8") == "earlier\nfirst\n"
    assert path.read_text(encoding="utf-8") == "second\nthird\n"


def test_a_server_writes_its_log_to_a_file(tmp_path: Path) -> None:
    path, stderr = tmp_path / "log", tmp_path / "stderr"
    with stderr.open("wb") as stream:
        flags = ["serve", "--port", "0", "--num-threads", "1", "--log-file", str(path)]
        server = start_python(SERVE, flags, os.environ, stream.fileno())
        try:
            assert wait_for(lambda: path.exists() and "serving on" in path.read_text(encoding="utf-8"))
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0
        finally:
            server.kill()
    assert "engine ready" in path.read_text(encoding="utf-8")
    assert stderr.read_bytes() == b""


def wait_for(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def test_a_log_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    code, said = run_to_end("serve", "--log-file", str(tmp_path / "missing" / "log"))
    assert (code, said.count("\n")) == (2, 1)
    assert f"log_file {tmp_path / 'missing' / 'log'} cannot be written to: No such file or directory" in said
