"""What can go wrong, in two sorts.

Exception
+-- BenchError       the test cannot be made at all; its message is one line for the user
+-- RequestFailed    one request failed; becomes a `Failure` in that request's record
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_MESSAGE_CHARS = 200


class BenchError(Exception):
    """The test cannot be made: no server there, or none that speaks the OpenAI API."""


class FailureKind(StrEnum):
    """How a request can fail."""

    CONNECTION = "connection failed"
    TIMEOUT = "timeout"
    HTTP_STATUS = "HTTP error"
    NOT_A_STREAM = "not an event stream"
    STREAM_ERROR = "error in stream"
    MALFORMED_CHUNK = "malformed chunk"
    INCOMPLETE_STREAM = "incomplete stream"
    NOT_SENT = "not sent"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed. `status` is set for HTTP errors only."""

    kind: FailureKind
    message: str
    status: int | None = None

    @property
    def label(self) -> str:
        """What failures are counted by: the kind, or the HTTP status."""
        return self.kind.value if self.status is None else f"HTTP {self.status}"

    def __str__(self) -> str:
        return f"{self.label}: {self.message}" if self.message else self.label


class RequestFailed(Exception):
    """One request failed, and this is how."""

    def __init__(self, kind: FailureKind, message: str, status: int | None = None) -> None:
        self.failure = Failure(kind, one_line(message), status)
        super().__init__(str(self.failure))


def one_line(text: str) -> str:
    """`text` fit for a table: white space collapsed, cut to MAX_MESSAGE_CHARS."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."
