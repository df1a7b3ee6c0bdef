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
from datetime import datetime
from typing import Any

import aiohttp
import httpx
import pytest

from chairlift.api import ServerConfig
from chairlift.api.pages import WATCH_PATH
from chairlift.api.server import reporting
from chairlift.api.telemetry import log
from chairlift.api.telemetry.log import (
    JsonFormatter,
    QueuedHandler,
    TextFormatter,
    activity_fields,
    log_activity,
    with_fields,
)
from chairlift.engine.journal import EngineStats, Histogram, Totals
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, post, user
from tests.api.fault_support import forward_of, held, serving, until_idle
from tests.engine.async_support import wait_until
from tests.support.server_process import SERVE, long_stream, running

SECRET = "Zanzibar"
SIX = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(autouse=True)
def info_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def lines_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    """The lines of that message, as a reader of the JSON format gets them."""
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    return [line for line in lines if line["message"] == message]


async def test_a_request_that_is_over_has_one_line_with_ids_tokens_and_times(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(2):
            async with http.post(server.url + COMPLETIONS, json=SIX, headers={"X-Request-Id": "mine"}) as response:
                reply = await response.json()
    first, second = lines_of(caplog, "request")
    assert {name: second[name] for name in ("request_id", "path", "status", "finish", "stream", "level")} == {
        "request_id": "mine",
        "path": COMPLETIONS,
        "status": 200,
        "finish": "length",
        "stream": "no",
        "level": "info",
    }
    assert second["id"] == reply["id"] != first["id"]
    assert [(line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) for line in (first, second)] == [
        (4, 0, 6),
        (4, 3, 6),
    ]
    assert 0 <= second["queue_seconds"] <= second["first_token_seconds"] <= second["total_seconds"]


async def test_no_text_of_anybody_is_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await post(server, CHAT, {"messages": user(SECRET), "user": SECRET, "max_tokens": 4, "stop": [SECRET]})
    await post(server, CHAT, {"messages": user(SECRET), "temperature": SECRET}, status=400)
    await post(server, CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}, status=400)
    await post(server, COMPLETIONS, {"prompt": SECRET * 1000}, status=400)
    lines = lines_of(caplog, "request")
    assert [line["status"] for line in lines] == [200, 400, 400, 400]
    assert SECRET not in json.dumps(lines)
    assert SECRET not in caplog.text


async def test_the_line_of_a_refused_request_says_why(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await post(server, CHAT, {"messages": user("a"), "foo": 1}, status=400)
    await post(server, CHAT, {"messages": user("a"), "model": "gpt-9"}, status=404)
    await post(server, CHAT, {"messages": user("a"), "x" * 10_000: 1}, status=400)
    await post(server, CHAT, {"messages": user("a"), "max_tokens": 1})
    reasons = [line.get("reason") for line in lines_of(caplog, "request")]
    assert reasons == [
        "unknown or unsupported field: foo",
        "there is no model 'gpt-9' here, only 'bundled'",
        f"unknown or unsupported field: {'x' * 170}...",
        None,
    ]


async def test_a_client_that_leaves_is_an_abort_whether_there_was_a_reply_or_not(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**SIX, "max_tokens": 400}
    async with aiohttp.ClientSession() as http:
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


async def test_sequences_that_end_differently_are_all_told(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    await post(server, COMPLETIONS, {**SIX, "prompt": ["Once upon a time", "a"], "stop": [","]})
    (line,) = lines_of(caplog, "request")
    assert line["finish"] == "stop,length"


async def test_what_a_client_made_up_cannot_look_like_another_line_or_field(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    forged = 'a" status=200 \\'
    async with aiohttp.ClientSession() as http:
        await http.post(server.url + "/nowhere", headers={"X-Request-Id": forged})
    (record,) = [record for record in caplog.records if record.message == "request"]
    text = TextFormatter().format(record)
    assert text.count("\n") == 0
    assert ' request_id="a\\" status=200 \\\\" path=other status=404 ' in text
    assert json.loads(JsonFormatter().format(record))["request_id"] == forged


def stats(
    seconds: float, num_steps: int, num_rows: int, running: int = 0, waiting: int = 0, **totals: int
) -> EngineStats:
    """An engine after so many steps, of so many rows in all."""
    rows = Histogram((1.0,), [0, num_steps], float(num_rows))
    return EngineStats(seconds, Totals(**totals), waiting, running, num_warm=2, step_rows=rows)


def test_a_line_about_the_batch_tells_what_was_done_since_the_one_before() -> None:
    before = stats(10.0, 100, 400, num_prompt_tokens=1000, num_cached_tokens=500, num_generated_tokens=2000)
    now = stats(
        15.0, 120, 470, running=3, waiting=1, num_prompt_tokens=1100, num_cached_tokens=525, num_generated_tokens=2070
    )
    assert activity_fields(before, now, num_slots=8) == {
        "running": 3,
        "waiting": 1,
        "slots": 8,
        "warm": 2,
        "cache_usage": 0.0,
        "batch_size": 3.5,
        "prompt_tokens_per_second": 20.0,
        "generated_tokens_per_second": 14.0,
        "hit_rate": 0.25,
    }


def test_what_there_was_none_of_has_no_mean() -> None:
    fields = activity_fields(stats(1.0, 5, 5), stats(2.0, 5, 5, waiting=1), num_slots=8)
    assert (fields["batch_size"], fields["hit_rate"], fields["waiting"]) == (None, None, 1)


async def test_an_interval_of_zero_is_never(server: Server) -> None:
    for interval_s, num_tasks in ((0.0, 0), (60.0, 1)):
        with reporting(server.llm, interval_s):
            tasks = [task.get_name() for task in asyncio.all_tasks()]
        assert tasks.count("chairlift-activity-log") == num_tasks


async def test_lines_about_the_batch_are_written_while_something_runs_only(caplog: pytest.LogCaptureFixture) -> None:
    looks = [stats(1.0, 0, 0), stats(2.0, 0, 0), stats(3.0, 5, 5), stats(4.0, 5, 5), stats(5.0, 5, 5, running=1)]
    seen = iter(looks)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await log_activity(lambda: next(seen), num_slots=8, interval_s=0.001)
    assert [line["running"] for line in lines_of(caplog, "batch")] == [0, 1]


HEADER = "X-Request-Id"
FRESH = re.compile(r"[0-9a-f]{32}")
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    ("method", "path", "arguments"),
    [
        ("POST", COMPLETIONS, {"json": BODY}),
        ("POST", COMPLETIONS, {"json": {**BODY, "stream": True}}),
        ("POST", COMPLETIONS, {"data": b"no json"}),
        ("POST", COMPLETIONS, {"json": BODY, "headers": {"Expect": "miracles"}}),
        ("POST", "/nowhere", {}),
        ("GET", COMPLETIONS, {}),
        ("GET", "/", {}),
        ("GET", "/page/page.js", {}),
        ("GET", "/health", {}),
        ("HEAD", "/version", {}),
        ("GET", "/metrics", {}),
        ("GET", WATCH_PATH, {}),
    ],
)
async def test_every_kind_of_reply_carries_the_id_that_was_sent_or_a_new_one(
    server: Server, http: aiohttp.ClientSession, method: str, path: str, arguments: dict[str, dict[str, str]]
) -> None:
    async with http.request(method, server.url + path, **arguments) as response:  # type: ignore[arg-type]
        assert FRESH.fullmatch(response.headers[HEADER])
    sent = {**arguments, "headers": {**arguments.get("headers", {}), HEADER: "my id/42"}}
    async with http.request(method, server.url + path, **sent) as response:  # type: ignore[arg-type]
        assert response.headers.getall(HEADER) == ["my id/42"]


async def test_refusals_carry_it_too() -> None:
    config = ServerConfig.model_validate({"api_key": ["key"], "allowed_origin": ["https://a.example"]})
    origin = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    async with serving(config) as server, aiohttp.ClientSession() as http:
        async with http.post(server.url + COMPLETIONS, json=BODY, headers={HEADER: "mine"}) as refused:
            assert (refused.status, refused.headers[HEADER]) == (401, "mine")
        async with http.options(server.url + COMPLETIONS, headers={**origin, HEADER: "mine"}) as preflight:
            assert (preflight.status, preflight.headers[HEADER]) == (403, "mine")


LONGEST = "".join(chr(code) for code in range(0x21, 0x7F)).ljust(128, "x")


@pytest.mark.parametrize("sent", [LONGEST, "", f"{LONGEST}x", "tab\there", "ümlaut"])
async def test_the_longest_sane_id_comes_back_whole_and_another_is_replaced(
    server: Server, http: aiohttp.ClientSession, sent: str
) -> None:
    async with http.get(server.url + "/health", headers={HEADER: sent}) as response:
        known = response.headers[HEADER]
    assert known == LONGEST if sent == LONGEST else FRESH.fullmatch(known)


# --- how records are written


def record_of(
    text: str, /, *arguments: object, exc_info: bool = False, **fields: str | int | float | None
) -> logging.LogRecord:
    extra = with_fields(fields)
    return logging.getLogger("chairlift.test").makeRecord(
        "chairlift.test",
        logging.WARNING,
        "file.py",
        1,
        text,
        arguments,
        sys.exc_info() if exc_info else None,
        None,
        extra,
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain-1.5/x:y", "plain-1.5/x:y"),
        ("two words", '"two words"'),
        ('quote"', '"quote\\""'),
        ("a=b", '"a=b"'),
        ("back\\slash", '"back\\\\slash"'),
        ("new\nline", '"new\\nline"'),
        ("", '""'),
        ("ü", '"\\u00fc"'),
        (3, "3"),
        (0.25, "0.25"),
    ],
)
def test_a_value_is_quoted_where_it_could_be_taken_for_more_than_one(value: str | float, written: str) -> None:
    assert TextFormatter().format(record_of("said", name=value)).endswith(f" WARNING said name={written}")


def test_fields_that_are_not_known_are_left_out() -> None:
    assert TextFormatter().format(record_of("said", a=None, b=1)).endswith(" said b=1")
    assert "a" not in json.loads(JsonFormatter().format(record_of("said", a=None)))


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
    assert entry == {
        "level": "warning",
        "logger": "chairlift.test",
        "message": "2 lines\nin one",
        "status": 200,
        "request_id": "é",
    }


def test_an_exception_is_a_string_of_the_record_and_lines_after_it_in_text() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = record_of("it failed", exc_info=True)
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


def test_records_that_find_the_queue_full_are_dropped_and_counted() -> None:
    stream = Stuck()
    handler = QueuedHandler(stream, max_records=2)
    handler.emit(record_of("first"))
    assert stream.is_writing.wait(10)
    for number in range(5):
        handler.emit(record_of(f"number {number}"))
    stream.may_write.set()
    handler.flush()
    assert stream.getvalue().splitlines() == [
        "first",
        "3 log records were dropped: the log was not read fast enough",
        "number 0",
        "number 1",
    ]


def test_a_log_that_nobody_reads_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_FLUSH_S", 0.01)
    stream = Stuck()
    handler = QueuedHandler(stream)
    handler.emit(record_of("never"))
    handler.flush()
    assert stream.getvalue() == ""
    stream.may_write.set()


def test_a_reader_that_goes_away_ends_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        handler = QueuedHandler(stream)
        handler.emit(record_of("to nobody"))
        handler.flush()
        handler.emit(record_of("again"))
        handler.flush()


def test_every_record_is_an_object_of_its_own_from_start_to_end() -> None:
    with running(SERVE, "--log-format", "json", "--log-interval", "0.05") as process:
        url = process.url.rstrip('"}')  # it was read out of a JSON string
        with httpx.Client(base_url=url, timeout=60) as client:
            client.post("/v1/completions", json=long_stream(800), headers={"X-Request-Id": 129 * "x"})
            client.post("/v1/completions", json=long_stream(800), headers={"X-Request-Id": "mine"})
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
    entries = [json.loads(line) for line in process.log]
    assert all({"time", "level", "logger", "message"} <= set(entry) for entry in entries)
    requests = [entry for entry in entries if entry["message"] == "request"]
    assert [entry["output_tokens"] for entry in requests] == [800, 800]
    assert len(requests[0]["request_id"]) == 32
    assert requests[1]["request_id"] == "mine"
    batches = [entry for entry in entries if entry["message"] == "batch"]
    assert batches
    assert all(entry["running"] <= entry["slots"] for entry in batches)
