"""The log: lines for people, or one JSON object per record for programs. Each request gets a line at its end, and the
batch gets one at intervals. A thread writes them, so that no request waits for the log's reader.

A record may carry fields (`extra=with_fields(...)`) beside its message. Their values may come from clients, so text
lines escape control characters and quote ambiguous values. No text of a prompt or an answer is ever logged; the line of
a refused request says why, which may name a field, a model or a path.
"""

import asyncio
import io
import json
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from chairlift.api import LogFormat
from chairlift.errors import ConfigurationError

if TYPE_CHECKING:  # programs without a server or an engine set up the log, too
    from chairlift.api.telemetry.observation import Observation
    from chairlift.engine.journal import EngineStats

logger = logging.getLogger(__name__)

Field = str | int | float | None

_MAX_QUEUED_RECORDS = 10_000
_FLUSH_S = 1.0
_RETRY_S = 0.05

_FIELDS = "chairlift_fields"
_PLAIN_VALUE = re.compile(r"[!#-<>-\[\]-~]+")  # printable ASCII without spaces, quotes, equals signs and backslashes
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


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


class QueuedHandler(logging.Handler):
    """Writes records in a thread of its own. Records that find the queue full are dropped; their number is logged when
    there is room again.
    """

    def __init__(self, stream: TextIO | io.RawIOBase, max_records: int = _MAX_QUEUED_RECORDS) -> None:
        super().__init__()
        self._stream = stream if isinstance(stream, io.RawIOBase) else _unbuffered(stream)
        self._queue: queue.Queue[str] = queue.Queue(max_records)
        self._num_dropped = 0
        self._num_told = 0  # of the dropped ones, how many the log has reported
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record; never blocks."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, daemon=True, name="chairlift-log")
            self._thread.start()
        try:
            self._queue.put_nowait(self.format(record))
        except queue.Full:
            self._num_dropped += 1

    def flush(self) -> None:
        """Waits until all is written, but not for long, because the reader may have stopped."""
        self.wait(_FLUSH_S)

    def wait(self, timeout_s: float) -> bool:
        """Waits until all is written, at most `timeout_s` seconds. Returns false if it is not written by then."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout_s)

    def _write_all(self) -> None:
        while True:
            line = self._queue.get()
            self._write(f"{line}\n")
            num_dropped = self._num_dropped - self._num_told
            if num_dropped:
                self._num_told += num_dropped
                message = f"{num_dropped} log records were dropped: the log was not read fast enough"
                record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None)
                self._write(f"{self.format(record)}\n")
            self._queue.task_done()

    def _write(self, text: str) -> None:
        if not isinstance(self._stream, io.RawIOBase):
            self._stream.write(text)
            return
        left = memoryview(text.encode(errors="backslashreplace"))
        try:
            while left:
                num_written = self._stream.write(left) or 0
                left = left[num_written:]
                if not num_written:  # the stream was made non-blocking
                    time.sleep(_RETRY_S)
        except OSError:
            self._num_dropped += 1  # the reader is gone; there is nowhere else to report it


class LogFile(io.RawIOBase):
    """A file that records are added to. When it has been renamed or deleted, as by logrotate, a new one is begun."""

    def __init__(self, path: Path) -> None:
        """`ConfigurationError` if it cannot be written to."""
        self._path = path
        try:
            self._file = io.FileIO(path, "a")
        except OSError as error:
            raise ConfigurationError(f"log_file {path} cannot be written to: {error.strerror}") from error

    def write(self, data: Any) -> int:
        """Adds bytes and returns how many. OSError if the file cannot be opened anew."""
        if not self._is_in_place():
            renewed = io.FileIO(self._path, "a")
            self._file.close()
            self._file = renewed
        return self._file.write(data)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _unbuffered(stream: TextIO) -> TextIO | io.RawIOBase:
    """The unbuffered file: the interpreter locks buffers, and at exit it would wait for a thread that blocks in one."""
    try:
        return io.FileIO(stream.fileno(), "w", closefd=False)
    except OSError:  # a test, or a program that embeds the server, has put something else there
        return stream


def set_up_logging(log_format: LogFormat = LogFormat.TEXT, log_file: Path | None = None) -> None:
    """Sends records and Python's warnings to the file, or else standard error, unless the root logger has a handler.

    `ConfigurationError` if the file cannot be written to.
    """
    handler = QueuedHandler(sys.stderr if log_file is None else LogFile(log_file))
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.captureWarnings(True)


def _fields_of(record: logging.LogRecord) -> Mapping[str, Field]:
    fields: Mapping[str, Field] = getattr(record, _FIELDS, {})
    return fields


def _value(value: Field) -> str:
    text = str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else json.dumps(text)


def log_request(observation: "Observation") -> None:
    """Logs a request that has ended. One refused before its prompts were checked has no fields of an answer."""
    fields: dict[str, Field] = {
        "request_id": observation.request_id,
        "path": observation.path,
        "status": observation.status,
        "total_seconds": _rounded(observation.total_seconds),
        "reason": observation.reason,
        "warning": "; ".join(observation.warnings) or None,
    }
    if observation.generations:
        fields |= {
            "id": observation.reply_id,
            "finish": ",".join(dict.fromkeys(observation.outcomes)),
            "stream": "yes" if observation.is_streamed else "no",
            "prompt_tokens": observation.num_prompt_tokens,
            "cached_tokens": observation.num_cached_tokens,
            "output_tokens": sum(observation.output_lengths),
            "queue_seconds": _rounded(observation.queue_seconds),
            "first_token_seconds": _rounded(observation.first_token_seconds),
            "error": None if observation.error is None else type(observation.error).__name__,
        }
    logger.info("request", extra=with_fields(fields))


async def log_activity(read_stats: "Callable[[], EngineStats]", num_slots: int, interval_s: float) -> None:
    """Logs a line every `interval_s` seconds, except while nothing runs."""
    before = read_stats()
    while True:
        await asyncio.sleep(interval_s)
        now = read_stats()
        if now.num_running or now.num_waiting or now.step_rows != before.step_rows:
            logger.info("batch", extra=with_fields(activity_fields(before, now, num_slots)))
        before = now


def activity_fields(before: "EngineStats", now: "EngineStats", num_slots: int) -> dict[str, Field]:
    """The work between two reads: rates per second, mean rows of a step, and requests that run and wait."""
    seconds = now.time - before.time
    num_prompt = now.totals.num_prompt_tokens - before.totals.num_prompt_tokens
    num_cached = now.totals.num_cached_tokens - before.totals.num_cached_tokens
    num_generated = now.totals.num_generated_tokens - before.totals.num_generated_tokens
    num_steps = now.step_rows.count - before.step_rows.count
    return {
        "running": now.num_running,
        "waiting": now.num_waiting,
        "slots": num_slots,
        "warm": now.num_warm,
        "cache_usage": round(now.cache.share, 3),
        "batch_size": round((now.step_rows.sum - before.step_rows.sum) / num_steps, 1) if num_steps else None,
        "prompt_tokens_per_second": round(num_prompt / seconds, 1),
        "generated_tokens_per_second": round(num_generated / seconds, 1),
        "hit_rate": round(num_cached / num_prompt, 3) if num_prompt else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
