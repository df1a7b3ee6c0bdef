"""What one streamed reply has said so far: completions and chat chunks alike, and errors within the stream.

A content chunk is one whose choice carries text (for chat: content or reasoning). An empty text counts as
well, since a token may have none to show yet (half a character), except where a chunk only announces the role
or the finish reason. vLLM's own client counts those two as well; servers that send them apart from tokens
would gain a token by it.
"""

import json
from typing import Any

from chairlift.bench.failures import FailureKind, RequestFailed

CHAT_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


class StreamTally:
    """Takes events in order with their arrival times, in seconds of one clock.

    `keeps_text` is for conversations, whose next turn repeats the reply; reasoning is no part of that.
    """

    def __init__(self, keeps_text: bool = False) -> None:
        self.chunk_times: list[float] = []
        self._texts: list[str] | None = [] if keeps_text else None
        self.last_choice_at: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._has_finish_reason = False
        self._has_done_mark = False

    def take(self, event: bytes, arrived_at: float) -> None:
        """Count one event's data. Raises `RequestFailed` on an error object or on what is no chunk at all."""
        if event == b"[DONE]":
            self._has_done_mark = True
            return
        try:
            self._take_chunk(json.loads(event), arrived_at)
        except (ValueError, TypeError, AttributeError, KeyError) as problem:
            shown = event.decode(errors="replace")
            raise RequestFailed(FailureKind.MALFORMED_CHUNK, f"{shown!r} ({problem})") from None

    @property
    def text(self) -> str:
        """The reply so far, if it is kept."""
        return "".join(self._texts or ())

    def require_complete(self) -> None:
        """Called at the end of the stream; raises `RequestFailed` if that came too early."""
        if not (self._has_done_mark or self._has_finish_reason):
            message = f"ended after {len(self.chunk_times)} chunks with neither finish reason nor [DONE]"
            raise RequestFailed(FailureKind.INCOMPLETE_STREAM, message)
        if not self.chunk_times:
            raise RequestFailed(FailureKind.INCOMPLETE_STREAM, "ended without a single token")

    def _take_chunk(self, chunk: dict[str, Any], arrived_at: float) -> None:
        if chunk.get("error"):
            raise RequestFailed(FailureKind.STREAM_ERROR, error_message(chunk))
        if choices := chunk.get("choices"):
            self._take_choice(choices[0], arrived_at)
        if usage := chunk.get("usage"):
            self.prompt_tokens = _count(usage, "prompt_tokens")
            self.output_tokens = _count(usage, "completion_tokens")
            self.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")

    def _take_choice(self, choice: dict[str, Any], arrived_at: float) -> None:
        self.last_choice_at = arrived_at
        if self._texts is not None:
            self._texts.append(_reply_text(choice))
        is_last = choice.get("finish_reason") is not None
        self._has_finish_reason |= is_last
        # A reply whose only token has no text shows itself in its last chunk alone.
        if _has_text(choice) or (not self.chunk_times if is_last else _may_be_token(choice)):
            self.chunk_times.append(arrived_at)


def _count(usage: dict[str, Any], field: str) -> int | None:
    count = usage.get(field)
    return None if count is None else int(count)


def _reply_text(choice: dict[str, Any]) -> str:
    source = choice.get("delta") or {"content": choice.get("text")}
    return str(source.get("content") or "")


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in CHAT_TEXT_FIELDS)


def _may_be_token(choice: dict[str, Any]) -> bool:
    return not (choice.get("delta") or {}).get("role")


def error_message(body: object) -> str:
    """The sentence in an error body like OpenAI's `{"error": {"message": ...}}`, else the whole body."""
    while isinstance(body, dict):
        inner = next((body[key] for key in ("error", "message", "detail") if body.get(key)), None)
        if inner is None:
            break
        body = inner
    return body if isinstance(body, str) else json.dumps(body)
