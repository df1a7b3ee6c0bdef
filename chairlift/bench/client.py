"""One HTTP client for any OpenAI-compatible server: it lists models, and streams one reply into a record.

A request never raises: whatever goes wrong is in its record. Times are `time.perf_counter()` seconds, taken
once for each piece that the socket yields, before it is parsed.
"""

import json
from http import HTTPStatus
from time import perf_counter
from typing import Any

import aiohttp

from chairlift.bench.config import BenchConfig
from chairlift.bench.failures import BenchError, Failure, FailureKind, RequestFailed, one_line
from chairlift.bench.prompts import random_token_prompts, random_word_prompts
from chairlift.bench.records import RequestRecord
from chairlift.bench.sse import EventReader
from chairlift.bench.tally import StreamTally, error_message

# What servers answer to a field they do not know: OpenAI's status, and FastAPI's.
REFUSED_FIELD = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)
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


def request_bodies(config: BenchConfig) -> list[bytes]:
    """The JSON of every request, encoded ahead of the clock: those to measure, then the warm-up."""
    count = config.num_requests + config.warmup
    prompts: list[dict[str, Any]]
    if config.endpoint == "completions":
        token_ids = random_token_prompts(count, config.prompt_tokens, config.token_range, config.seed)
        prompts = [{"prompt": ids} for ids in token_ids]
    else:
        texts = random_word_prompts(count, config.prompt_tokens, config.seed)
        prompts = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    settings: dict[str, Any] = {
        "model": config.model,
        "max_tokens": config.output_tokens,
        "temperature": config.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if config.ignore_eos:
        settings["ignore_eos"] = True
    return [json.dumps(settings | prompt).encode() for prompt in prompts]


class StreamClient:
    """Posts bodies to one endpoint within an open session."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def send(self, index: int, body: bytes, intended_at: float) -> RequestRecord:
        """Post one body now and follow its stream to the end."""
        tally = StreamTally()
        failure: Failure | None = None
        sent_at = perf_counter()
        try:
            await self._stream(body, tally)
        except RequestFailed as problem:
            failure = problem.failure
        except TimeoutError:
            limit = self._session.timeout.total
            failure = Failure(FailureKind.TIMEOUT, f"no complete reply within {limit:g} s")
        except aiohttp.ClientError as problem:
            failure = Failure(FailureKind.CONNECTION, one_line(str(problem)))
        ended_at = tally.last_choice_at
        if failure is not None or ended_at is None:
            ended_at = perf_counter()
        return RequestRecord(
            index=index,
            intended_at=intended_at,
            sent_at=sent_at,
            ended_at=ended_at,
            chunk_times=tuple(tally.chunk_times),
            usage_prompt_tokens=tally.prompt_tokens,
            usage_output_tokens=tally.output_tokens,
            failure=failure,
        )

    async def _stream(self, body: bytes, tally: StreamTally) -> None:
        async with self._session.post(self._url, data=body) as response:
            if response.status != HTTPStatus.OK:
                raise _http_failure(response.status, await response.text(errors="replace"))
            if response.content_type != "text/event-stream":
                start = (await response.text(errors="replace"))[:80]
                raise RequestFailed(FailureKind.NOT_A_STREAM, f"{response.content_type}: {start}")
            try:
                await _follow(response.content, tally)
            except TimeoutError:
                raise
            except aiohttp.ClientError as problem:
                raise RequestFailed(FailureKind.INCOMPLETE_STREAM, str(problem)) from None
            tally.require_complete()


async def _follow(content: aiohttp.StreamReader, tally: StreamTally) -> None:
    reader = EventReader()
    async for piece in content.iter_any():
        arrived_at = perf_counter()
        for event in reader.feed(piece):
            tally.take(event, arrived_at)


def _http_failure(status: int, body: str) -> RequestFailed:
    try:
        message = error_message(json.loads(body))
    except ValueError:
        message = body
    if status in REFUSED_FIELD and "ignore_eos" in body:
        message = f"{IGNORE_EOS_HINT} ({message})"
    return RequestFailed(FailureKind.HTTP_STATUS, message, status)
