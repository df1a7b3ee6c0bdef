"""How the log looks: lines for people, or one JSON object per record for programs.

A record may carry fields (`extra=with_fields(...)`) beside its message. Whatever a client chose may be among them: text
lines escape control characters and quote values that could be taken for more than one field.
"""

import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

Field = str | int | float | None

_FIELDS = "chairlift_fields"
_PLAIN_VALUE = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII without spaces, quotes, equals signs and backslashes
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class LogFormat(StrEnum):
    """What a record becomes."""

    TEXT = "text"
    JSON = "json"


def with_fields(fields: Mapping[str, Field]) -> dict[str, Mapping[str, Field]]:
    """The `extra` of a record with these fields; those that are None are left out."""
    return {_FIELDS: {name: value for name, value in fields.items() if value is not None}}


class TextFormatter(logging.Formatter):
    """`2026-11-21 15:12:30,123 INFO    message name=value name="a value"`; a traceback follows on lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", super().formatMessage(record))
        return " ".join([line, *(f"{name}={_value(value)}" for name, value in _fields_of(record).items())])


class JsonFormatter(logging.Formatter):
    """One object per record: `time` (ISO 8601 with its zone), `level`, `logger`, `message`, the fields; `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, in ASCII."""
        entry: dict[str, Field] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry = {**_fields_of(record), **entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry)


def set_up_logging(log_format: LogFormat = LogFormat.TEXT) -> None:
    """Sends records and Python's warnings to standard error, unless the root logger has a handler already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)


def _fields_of(record: logging.LogRecord) -> Mapping[str, Field]:
    fields: Mapping[str, Field] = getattr(record, _FIELDS, {})
    return fields


def _value(value: Field) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)
