"""The lines of a batch: requests in a file, and the file of replies that grows beside it."""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chairlift.errors import ConfigurationError

_MAX_COMPLAINTS = 10


class BatchRequest(BaseModel):
    """A line of the input: a request, and the name that its reply will have."""

    model_config = ConfigDict(extra="ignore")

    custom_id: str = Field(min_length=1)
    method: str = Field("POST", pattern="^POST$")
    url: str = Field(pattern="^/[^ ]+$")
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds what a request got: a status and JSON, or in `failure` why there is none."""

    status: int
    body: Any
    failure: str | None = None
    request_id: str = ""
    code: str = "no_reply"  # of the failure

    @property
    def is_good(self) -> bool:
        return self.failure is None and is_good(self.status)


def is_good(status: int) -> bool:
    """Says whether a status is a success."""
    return 200 <= status < 300


def read_requests(path: Path, but: Collection[str] = ()) -> Iterator[BatchRequest]:
    """Yields the requests of a file that was checked, but those with these ids. Reads a line at a time."""
    for _, line in _lines(path):
        request = BatchRequest.model_validate_json(line)
        if request.custom_id not in but:
            yield request


@dataclass(frozen=True, slots=True)
class Mistake:
    """Says what is wrong with a line of a file, counted from 1."""

    line: int
    message: str
    field: str | None = None


def find_mistakes(path: Path, url: str | None = None, most: int = _MAX_COMPLAINTS) -> tuple[set[str], list[Mistake]]:
    """Returns the ids of a file's requests, and its first mistakes. `url`: that of every line; None: any."""
    ids: set[str] = set()
    mistakes: list[Mistake] = []
    for number, line in _lines(path):
        try:
            request = BatchRequest.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            mistakes.append(Mistake(number, first["msg"], ".".join(map(str, first["loc"])) or None))
        else:
            if request.custom_id in ids:
                mistakes.append(Mistake(number, f"another line has the custom_id {request.custom_id!r}"))
            if request.body.get("stream"):
                mistakes.append(Mistake(number, "a reply in a file is whole; leave stream out"))
            if url is not None and request.url != url:
                mistakes.append(Mistake(number, f"it is {request.url}, and the batch's endpoint is {url}", "url"))
            ids.add(request.custom_id)
        if len(mistakes) >= most:
            break
    return ids, mistakes


def check_requests(path: Path) -> set[str]:
    """Returns the ids of all requests. `ConfigurationError` with a line for each mistake, of the first few."""
    ids, mistakes = find_mistakes(path)
    if mistakes:
        raise ConfigurationError(
            "\n".join(
                f"{path}, line {each.line}: {f'{each.field}: ' if each.field else ''}{each.message}"
                for each in mistakes
            )
        )
    return ids


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, with their numbers from 1."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigurationError(f"--input-file {path} cannot be read: {error.strerror}") from error


class ReplyFile:
    """The replies so far, and those to come. A context manager, which closes the file."""

    def __init__(self, path: Path) -> None:
        """`ConfigurationError` if the file cannot be written, or holds something else than replies."""
        self._path = path
        try:
            self._file = path.open("ab+")
        except OSError as error:
            raise ConfigurationError(f"--output-file {path} cannot be written to: {error.strerror}") from error
        self.answered = self._read()
        """The ids of requests that got a reply, with True where it was good. Those that got none are made again."""

    def add(self, custom_id: str, reply: Reply) -> None:
        """Adds a line, which is in the file when this returns."""
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        line = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": custom_id,
            "response": None if reply.failure is not None else response,
            "error": None if reply.failure is None else {"code": reply.code, "message": reply.failure},
        }
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def _read(self) -> dict[str, bool]:
        """Reads the ids, and cuts off the rest of a line that a killed process has left."""
        answered: dict[str, bool] = {}
        self._file.seek(0)
        end = 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(end)
                break
            end += len(line)
            try:
                entry = json.loads(line)
                if entry["response"] is not None:
                    answered[entry["custom_id"]] = is_good(entry["response"]["status_code"])
            except (ValueError, LookupError, TypeError):
                self._file.close()
                raise ConfigurationError(
                    f"--output-file {self._path}, line {number}, is not a batch's reply; name another file"
                ) from None
        return answered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
