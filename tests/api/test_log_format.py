"""Records as lines for people and as JSON for programs."""

import json
import logging
import sys
from datetime import datetime

import pytest

from chairlift.api.log_format import JsonFormatter, TextFormatter, with_fields


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
