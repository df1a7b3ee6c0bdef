"""One HTTP client for any OpenAI-compatible server: it lists models, and streams one reply into a record.

A request never raises: whatever goes wrong is in its record. Times are `time.perf_counter()` seconds, taken
once for each piece that the socket yields, before it is parsed.
"""

import json
import sys
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter

import aiohttp

from chairlift.bench.config import BenchConfig
from chairlift.bench.failures import BenchError, Failure, FailureKind, RequestFailed, one_line
from chairlift.bench.records import RequestRecord
from chairlift.bench.sse import EventReader
from chairlift.bench.tally import StreamTally, error_message

# What servers answer to a field they do not know: OpenAI's status, and FastAPI's.
REFUSED_FIELD = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
MAX_CONNECTIONS = 2**16
IGNORE_EOS_HINT = "this server does not take ignore_eos: give --no-ignore-eos"


def open_session(config: BenchConfig) -> aiohttp.ClientSession:
    """A session with unbounded connections: the test itself decides how many are in flight."""
    headers = {"Content-Type": "application/json"}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key.get_secret_value()}"
    return aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=config.timeout),
    )


def allow_many_connections() -> None:
    """Raise this process's limit of open files, one of which each request in flight takes."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server at `url` lists. Raises `BenchError` if there is none."""
    models_url = f"{url}/v1/models"
    try:
        async with session.get(models_url) as response:
            body = await response.read()
    except TimeoutError:
        raise BenchError(f"{models_url} did not answer in time") from None
    except aiohttp.ClientError as problem:
        raise BenchError(f"cannot reach {url}: {one_line(str(problem))}") from None
    if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise BenchError(f"{models_url} answered HTTP {response.status}: give the server's --api-key")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        raise BenchError(
            f"{models_url} answered HTTP {response.status} and no list of models ({response.content_type}): "
            "is this an OpenAI-compatible server? If it only lacks that route, give --model"
        ) from None


@dataclass(frozen=True, slots=True)
class Request:
    """One body to post. `turn` and the lengths asked for go into its record; `wants_text` keeps the reply."""

    index: int
    body: bytes
    turn: int = 0
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    wants_text: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What was measured, and the text if it was wanted."""

    record: RequestRecord
    text: str


@dataclass(slots=True)
class LiveCounts:
    """What is going on at this moment, over all requests of a client."""

    num_running: int = 0
    num_chunks: int = 0


class StreamClient:
    """Posts bodies to one endpoint within an open session."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self.live = LiveCounts()

    async def send(self, request: Request, intended_at: float) -> Reply:
        """Post one body now and follow its stream to the end."""
        tally = StreamTally(keeps_text=request.wants_text)
        self.live.num_running += 1
        sent_at = perf_counter()
        try:
            failure = await self._try_stream(request.body, tally)
        finally:
            self.live.num_running -= 1
        ended_at = tally.last_choice_at
        if failure is not None or ended_at is None:
            ended_at = perf_counter()
        record = RequestRecord(
            index=request.index,
            intended_at=intended_at,
            sent_at=sent_at,
            ended_at=ended_at,
            chunk_times=tuple(tally.chunk_times),
            usage_prompt_tokens=tally.prompt_tokens,
            usage_output_tokens=tally.output_tokens,
            usage_cached_tokens=tally.cached_tokens,
            failure=failure,
            turn=request.turn,
            asked_prompt_tokens=request.prompt_tokens,
            asked_output_tokens=request.output_tokens,
        )
        return Reply(record, tally.text)

    async def _try_stream(self, body: bytes, tally: StreamTally) -> Failure | None:
        try:
            await self._stream(body, tally)
        except RequestFailed as problem:
            return problem.failure
        except TimeoutError:
            limit = self._session.timeout.total
            return Failure(FailureKind.TIMEOUT, f"no complete reply within {limit:g} s")
        except aiohttp.ClientError as problem:
            return Failure(FailureKind.CONNECTION, one_line(str(problem)))
        return None

    async def _stream(self, body: bytes, tally: StreamTally) -> None:
        async with self._session.post(self._url, data=body) as response:
            if response.status != HTTPStatus.OK:
                raise _http_failure(response.status, await response.text(errors="replace"))
            if response.content_type != "text/event-stream":
                start = (await response.text(errors="replace"))[:80]
                raise RequestFailed(FailureKind.NOT_A_STREAM, f"{response.content_type}: {start}")
            try:
                await self._follow(response.content, tally)
            except TimeoutError:
                raise
            except aiohttp.ClientError as problem:
                raise RequestFailed(FailureKind.INCOMPLETE_STREAM, str(problem)) from None
            tally.require_complete()

    async def _follow(self, content: aiohttp.StreamReader, tally: StreamTally) -> None:
        reader = EventReader()
        async for piece in content.iter_any():
            arrived_at = perf_counter()
            num_before = len(tally.chunk_times)
            for event in reader.feed(piece):
                tally.take(event, arrived_at)
            self.live.num_chunks += len(tally.chunk_times) - num_before


def _http_failure(status: int, body: str) -> RequestFailed:
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = body
    if status in REFUSED_FIELD and "ignore_eos" in body:
        message = f"{IGNORE_EOS_HINT} ({message})"
    return RequestFailed(FailureKind.HTTP_STATUS, message, status)
