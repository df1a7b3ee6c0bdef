"""One HTTP client for any OpenAI-compatible server: it lists models, and streams one reply into a record.

A request never raises: whatever goes wrong is in its record. Times are `time.perf_counter()` seconds, taken
once for each piece that the socket yields, before it is parsed.
"""

import json
import sys
from http import HTTPStatus
from time import perf_counter
from typing import Any

import aiohttp

from chairlift.loadtest.config import BenchConfig
from chairlift.loadtest.records import (
    INCOMPLETE_STREAM,
    BenchError,
    RequestFailed,
    RequestFailure,
    RequestRecord,
)
from chairlift.reachability import unreachable

# What servers answer to a field they do not know: OpenAI's status, and FastAPI's.
REFUSED_FIELD = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
MAX_CONNECTIONS = 2**16
IGNORE_EOS_HINT = "this server does not take ignore_eos: give --no-ignore-eos"
CHAT_TEXT_FIELDS = ("content", "reasoning_content", "reasoning")


def open_session(config: BenchConfig) -> aiohttp.ClientSession:
    """A session with unbounded connections: the test itself decides how many are in flight."""
    key = {} if config.api_key is None else {"Authorization": f"Bearer {config.api_key.get_secret_value()}"}
    headers = {"Content-Type": "application/json"} | key
    timeout = aiohttp.ClientTimeout(total=config.timeout)
    return aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def allow_many_connections() -> None:
    """Raise this process's limit of open files: each request in flight takes one."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server at `url` lists.

    BenchError if it lists none, ServerUnreachable if nobody answers.
    """
    models_url = f"{url}/v1/models"
    try:
        async with session.get(models_url) as response:
            body = await response.read()
    except TimeoutError:
        raise BenchError(f"{models_url} did not answer in time") from None
    except (aiohttp.ClientError, ValueError) as problem:
        raise unreachable(url, problem) from None
    if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise BenchError(f"{models_url} answered HTTP {response.status}: give the server's --api-key")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        raise BenchError(
            f"{models_url} answered HTTP {response.status} and no list of models ({response.content_type}): "
            "is this an OpenAI-compatible server? If it only lacks that route, give --model"
        ) from None


async def send(session: aiohttp.ClientSession, url: str, record: RequestRecord, body: bytes) -> str:
    """Post a body now, follow its stream to the end into the record, and return the reply's text."""
    reply, failure = StreamedReply(record), "connection failed"
    record.sent_at = perf_counter()
    try:
        async with session.post(url, data=body) as response:
            if response.status != HTTPStatus.OK:
                raise _http_failure(response.status, await response.text(errors="replace"))
            if response.content_type != "text/event-stream":
                start = (await response.text(errors="replace"))[:80]
                raise RequestFailed("not an event stream", f"{response.content_type}: {start}")
            failure = INCOMPLETE_STREAM
            async for piece in response.content.iter_any():
                reply.feed(piece, perf_counter())
        reply.require_complete()
    except RequestFailed as problem:
        record.failure = problem.failure
    except TimeoutError:
        record.failure = RequestFailure("timeout", f"no complete reply within {session.timeout.total:g} s")
    except (aiohttp.ClientError, ValueError) as problem:
        record.failure = RequestFailed(failure, str(problem)).failure
    if record.failure is not None:
        record.ended_at = perf_counter()
    return "".join(reply.texts)


class StreamedReply:
    """Reads completions and chat chunks of one stream into a record, and keeps the text without reasoning.

    Each line of server-sent events that begins with `data:` is one chunk: no server of this API sends longer events.
    A content chunk is one whose choice carries text (in a chat: content or reasoning). An empty text counts too, since
    a token may have none to show yet (half a character), except where a chunk only announces the role or the finish
    reason: servers that send those apart from tokens would gain a token by it. vLLM's own client counts them.
    """

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._unfinished_line = b""
        self._is_complete = False
        self.texts: list[str] = []

    def feed(self, piece: bytes, arrived_at: float) -> None:
        """Consumes the chunks that these bytes complete. Raises `RequestFailed` on an error or a malformed chunk."""
        *lines, self._unfinished_line = (self._unfinished_line + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._consume(line[5:].strip(), arrived_at)

    def require_complete(self) -> None:
        """Called at the end of the stream; raises `RequestFailed` if that came too early."""
        if not self._is_complete:
            message = f"ended after {len(self._record.chunk_times)} chunks with neither finish reason nor [DONE]"
            raise RequestFailed(INCOMPLETE_STREAM, message)
        if not self._record.chunk_times:
            raise RequestFailed(INCOMPLETE_STREAM, "ended without a single token")

    def _consume(self, event: bytes, arrived_at: float) -> None:
        if event == b"[DONE]":
            self._is_complete = True
            return
        try:
            chunk = json.loads(event)
            if chunk.get("error"):
                raise RequestFailed("error in stream", error_message(chunk))
            if choices := chunk.get("choices"):
                self._consume_choice(choices[0], arrived_at)
            if usage := chunk.get("usage"):
                self._record.usage_prompt_tokens = _count(usage, "prompt_tokens")
                self._record.usage_output_tokens = _count(usage, "completion_tokens")
                self._record.usage_cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")
                details = usage.get("completion_tokens_details") or {}
                self._record.usage_accepted_tokens = _count(details, "accepted_prediction_tokens")
                self._record.usage_rejected_tokens = _count(details, "rejected_prediction_tokens")
        except (ValueError, TypeError, AttributeError, KeyError) as problem:
            shown = event.decode(errors="replace")
            raise RequestFailed("malformed chunk", f"{shown!r} ({problem})") from None

    def _consume_choice(self, choice: dict[str, Any], arrived_at: float) -> None:
        record = self._record
        record.ended_at = arrived_at
        is_last = choice.get("finish_reason") is not None
        self._is_complete |= is_last
        delta = choice.get("delta") or {"content": choice.get("text")}
        self.texts.append(str(delta.get("content") or ""))
        has_text = any(delta.get(name) for name in CHAT_TEXT_FIELDS)
        # A reply whose only token has no text shows only in its last chunk.
        is_silent_token = not record.chunk_times if is_last else not delta.get("role")
        if has_text or is_silent_token:
            record.chunk_times.append(arrived_at)


def _count(usage: dict[str, Any], field: str) -> int | None:
    return None if usage.get(field) is None else int(usage[field])


def _http_failure(status: int, body: str) -> RequestFailed:
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = body
    if status in REFUSED_FIELD and "ignore_eos" in body:
        message = f"{IGNORE_EOS_HINT} ({message})"
    return RequestFailed(f"HTTP {status}", message)


def error_message(body: object) -> str:
    """The sentence in an error body like OpenAI's `{"error": {"message": ...}}`, else the whole body."""
    while isinstance(body, dict):
        inner = next((body[key] for key in ("error", "message", "detail") if body.get(key)), None)
        if inner is None:
            break
        body = inner
    return body if isinstance(body, str) else json.dumps(body)
