"""Files and batches as clients see them, and as they are kept on disk."""

import time
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field

from chairlift.api.wire.body import Metadata, ModelBody

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OVER: frozenset[Status] = frozenset({"failed", "completed", "expired", "cancelled"})
"""States in which a batch stays."""


class FileObject(BaseModel):
    """A file that a client uploaded, or the replies of a batch."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class ListPage(BaseModel):
    """A part of a list, in the order that was asked for."""

    object: Literal["list"] = "list"
    data: list[Any]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False

    @classmethod
    def of(cls, items: "Sequence[FileObject | Batch]", *, has_more: bool) -> Self:
        """Makes one of what it holds."""
        first_id, last_id = (items[0].id, items[-1].id) if items else (None, None)
        return cls(data=list(items), first_id=first_id, last_id=last_id, has_more=has_more)


class FileList(ListPage):
    data: list[FileObject]


class DeletedFile(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchMistake(BaseModel):
    """Says why a batch failed, perhaps at a line of its file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchMistakes(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchMistake]


class RequestCounts(BaseModel):
    """The number of a batch's requests, and of those that have a good reply or an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(BaseModel):
    """A file of requests that is being answered, or was. Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    errors: BatchMistakes | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None

    def turned(self, status: Status, **changes: Any) -> "Batch":
        """Returns this batch in another state, with the time at which it came to it."""
        return self.model_copy(update={"status": status, f"{status}_at": int(time.time()), **changes})


class BatchList(ListPage):
    data: list[Batch]


class BatchBody(ModelBody):
    """Asks for a batch."""

    input_file_id: str = Field(max_length=64, description="a file with the purpose batch")
    endpoint: Endpoint = Field(description="that of every line of the file")
    completion_window: str = Field(
        pattern="^[1-9][0-9]{0,2}[hd]$", description="hours or days, as in 24h, after which open requests are given up"
    )
    metadata: Metadata | None = Field(None, description="kept with the batch")

    @property
    def window_s(self) -> int:
        """The completion window in seconds."""
        return int(self.completion_window[:-1]) * {"h": 3600, "d": 86400}[self.completion_window[-1]]
