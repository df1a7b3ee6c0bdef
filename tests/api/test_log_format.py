"""Records as lines for people and as JSON for programs."""

import io
import json
import logging
import os
import signal
import sys
import threading
from datetime import datetime

import httpx
import pytest

from chairlift.api.telemetry import log
from chairlift.api.telemetry.log import JsonFormatter, QueuedHandler, TextFormatter, with_fields
from tests.support.server_process import SERVE, long_stream, running


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
