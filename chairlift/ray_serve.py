"""Chairlift on Ray Serve: replicas of one engine each, behind an ingress that prefers replicas with a warm prefix.

    serve run chairlift.ray_serve:build_app model=smollm2 num_replicas=2

The ingress reads a request's body, names the blocks of its prompt, forwards the request to a replica, and streams the
answer back. A replica runs the whole HTTP application on a socket of its own, so that streams, errors, keys and
disconnects work as they do without Ray. Ray exports each replica's metrics under the same names.
"""

import asyncio
import logging
import tempfile
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from pydantic_core import from_json
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.metrics import Gauge
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from yarl import URL

from chairlift.api import ServerConfig
from chairlift.api.errors import error_reply, find_convention
from chairlift.api.protocols import CONVENTIONS
from chairlift.api.telemetry.request_ids import REQUEST_ID_HEADER
from chairlift.config import EngineConfig
from chairlift.errors import ConfigurationError, EngineClosed, QueueFull
from chairlift.routing import PrefixRouter, name_blocks

logger = logging.getLogger(__name__)

_METRICS_INTERVAL_S = 5.0
_HEALTH_PERIOD_S = 2.0  # within which a dead replica is noticed and restarted
_MIN_WINDOW_S, _SAMPLES_OF_WINDOW = 1.0, 4  # for averaging the load; Ray's default of 30 s would add to the delay
_NUM_TRIES = 2  # a request whose replica dies before it answers is retried once, on another one
_PROMPT_FIELDS = ("tools", "system", "instructions", "input", "prompt", "messages")  # in the order of chat templates
_OWN_HEADERS = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "expect", "date", "server"}
_READ_BUFFER_BYTES = 2**20


_DECIDED_BY_RAY = {
    "api_workers": "a replica is one process; set num_replicas",
    "worker_timeout": "a replica is one process",
    "drain_delay": "Ray sends no requests to a replica that is shutting down",
    "log_format": "Ray writes the log",
    "log_interval": "Ray's metrics have the same values",
    "client_timeout": "Ray's proxy has request_timeout_s in its http_options",
    "idle_timeout": "Ray's proxy has keep_alive_timeout_s in its http_options",
} | dict.fromkeys(
    ("host", "port", "ssl_certfile", "ssl_keyfile", "allowed_host"), "Ray's proxy listens, by its http_options"
)


class ReplicaConfig(BaseModel):
    """The number of replicas, and the resources of each."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: PositiveInt = Field(1, description="replicas, or the fewest of them if max_replicas is set")
    max_replicas: PositiveInt | None = Field(None, description="replicas are added up to so many as requests come")
    target_requests: PositiveInt = Field(16, description="requests at a replica at which another one is added")
    max_requests: PositiveInt = Field(256, description="requests that a replica may hold, waiting ones included")
    max_queued_requests: PositiveInt | None = Field(
        None,
        description="requests that may wait at an ingress for a replica, more are refused; left out: max_queue_size",
    )
    upscale_delay: float = Field(10.0, ge=0.0, description="seconds of more load before replicas are added")
    downscale_delay: float = Field(300.0, ge=0.0, description="seconds of less load before replicas are taken away")
    num_cpus: float = Field(1.0, ge=0.0, description="CPUs of a replica, fractions allowed")
    num_gpus: float = Field(0.0, ge=0.0, description="GPUs of a replica, fractions allowed")
    num_ingresses: PositiveInt = Field(
        1, description="replicas of the ingress; each learns by itself what is warm where"
    )
    stream_interval: float = Field(
        0.05, ge=0.0, description="seconds between two pieces of a stream; tokens that come meanwhile are one piece"
    )
    is_prefix_aware: bool = Field(True, description="send prompts where their beginning is warm; else Ray's own choice")


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A request to be forwarded to a replica; the router reads its `blocks`."""

    method: str
    target: str  # path and query, as they were sent
    headers: list[tuple[str, str]]
    body: bytes
    blocks: list[bytes]


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer."""

    status: int
    headers: list[tuple[str, str]]


class WarmReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """Ray Serve's request router over `PrefixRouter`. Loads are the queue lengths that Ray keeps."""

    def initialize_state(self) -> None:
        """Called by Ray instead of a constructor."""
        self._prefixes = PrefixRouter[ReplicaID]()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Puts each replica in a rank of its own, so that the best one with capacity gets the request."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        loads = {replica_id: lengths.get(replica_id) or 0 for replica_id in replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all were tried: wait before the next round
        return [[replicas[chosen]] for chosen in self._prefixes.rank(_blocks_of(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, _: Any) -> None:
        """Called by Ray when a replica has accepted the request."""
        self._prefixes.note(_blocks_of(pending_request), replica_id)


class Replica:
    """One engine with its HTTP application, on a Unix socket."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: EngineConfig, server: ServerConfig, stream_interval: float
    ) -> None:
        """Loads the model. Imports torch only here, because the ingress and the deploying process do not need it."""
        from chairlift.api.app import Api
        from chairlift.api.http.connections import connections_of
        from chairlift.api.server import make_runner
        from chairlift.engine.async_llm import AsyncLLM

        self._stream_interval = stream_interval
        self._llm = AsyncLLM(**engine.model_dump())
        self._api = Api(self._llm, server)
        self._runner = make_runner(self._api)
        await self._runner.setup()
        assert self._runner.server is not None, "set up"
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-")
        path = str(Path(self._folder.name) / "http")
        make_connection = connections_of(self._runner.server, server)
        self._socket = await asyncio.get_running_loop().create_unix_server(make_connection, path)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=None),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER_BYTES,
            skip_auto_headers=["User-Agent", "Accept", "Accept-Encoding", "Content-Type"],
        )
        self._reporting = asyncio.create_task(self._report(), name="chairlift-ray-metrics")

    async def forward(self, call: ForwardedRequest) -> AsyncGenerator[Head | bytes]:
        """Yields the answer's head, then its body as it arrives. Closing the generator aborts the request."""
        url = URL(f"http://replica{call.target}", encoded=True)
        async with self._http.request(
            call.method, url, headers=call.headers, data=call.body or None, allow_redirects=False
        ) as answer:
            headers = [each for each in _end_to_end(answer.headers) if each[0].lower() != "x-request-id"]  # Ray adds it
            yield Head(answer.status, headers)
            async for chunk in answer.content.iter_any():
                yield chunk
                if not answer.content.at_eof():  # each piece takes Ray's processes some milliseconds
                    await asyncio.sleep(self._stream_interval)

    async def check_health(self) -> None:
        """Called by Ray, which restarts the replica if this raises."""
        self._api.service.check_health()

    async def __del__(self) -> None:
        """Called by Ray once, when the replica's requests have ended."""
        self._reporting.cancel()
        self._api.drain()
        await self._http.close()
        self._socket.close()
        await self._llm.close()
        await self._runner.cleanup()
        self._folder.cleanup()

    async def _report(self) -> None:
        """Copies the engine's metrics to Ray's, under the same names. An error ends this task, not the replica."""
        gauges: dict[str, Gauge] = {}
        try:
            while True:
                families = (await self._api.service.read_metrics()).collect()
                for family in (each for each in families if ":" not in each.name):  # Ray warns of vLLM's names
                    for sample in family.samples:
                        if sample.name not in gauges:
                            keys = tuple(sample.labels)
                            gauges[sample.name] = Gauge(sample.name, family.documentation, tag_keys=keys)
                        gauges[sample.name].set(sample.value, tags=sample.labels)
                await asyncio.sleep(_METRICS_INTERVAL_S)
        except Exception:
            logger.exception("Ray gets no metrics of this replica any more")


class Ingress:
    """Receives requests. Its own refusals look like a server's."""

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._forward = replicas.options(stream=True).forward
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """A replica's answer; 413 if the body is too large, 429 if too many wait, 503 if no replica is alive."""
        try:
            body = await self._read(request)
        except web.HTTPRequestEntityTooLarge as error:
            return _refuse(request, error)
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        blocks = _name_prompt(request.headers, body) if request.method == "POST" else []
        call = ForwardedRequest(request.method, target, _end_to_end(request.headers), body, blocks)
        for _ in range(_NUM_TRIES):
            chunks = self._forward.remote(call)
            try:
                head = await anext(aiter(chunks))
            except RayActorError:
                continue
            except BackPressureError:
                return _refuse(request, QueueFull("too many requests wait for a replica; try again later"))
            except DeploymentUnavailableError as error:
                return _refuse(request, EngineClosed(str(error)))
            answer = StreamingResponse(chunks, head.status)  # if the replica dies, the client's connection is cut
            answer.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.headers]
            return answer
        return _refuse(request, EngineClosed("the replicas that this request was sent to died; try again"))

    async def _read(self, request: Request) -> bytes:
        """Reads the whole body. HTTPRequestEntityTooLarge, without reading more, if a replica would refuse it."""
        chunks, num_bytes = [], 0
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, int(announced))
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > self._max_body_bytes:
                raise web.HTTPRequestEntityTooLarge(self._max_body_bytes, num_bytes)
            chunks.append(chunk)
        return b"".join(chunks)


def _refuse(request: Request, error: Exception) -> Response:
    reply = error_reply(error)
    convention = find_convention(request.url.path, CONVENTIONS)
    body = reply.body_in(convention, request.headers.get(REQUEST_ID_HEADER))
    return Response(body, reply.status, reply.headers, "application/json")


def _end_to_end(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    """The headers without those that concern a single connection."""
    return [(name, value) for name, value in headers.items() if name.lower() not in _OWN_HEADERS]


def _name_prompt(headers: Mapping[str, str], body: bytes) -> list[bytes]:
    """The block names of the body's prompt; none if the body is invalid, which the replica will report."""
    try:
        fields = from_json(body)
    except ValueError:
        return []
    if not isinstance(fields, dict):
        return []
    owner = repr((headers.get("authorization"), headers.get("x-api-key"), fields.get("cache_salt")))
    return name_blocks(owner.encode(), repr([fields.get(name) for name in _PROMPT_FIELDS]).encode())


def _blocks_of(pending_request: PendingRequest | None) -> list[bytes]:
    """Uses no isinstance: Ray pickles the router with its module, so its classes are not the ingress's."""
    calls = [] if pending_request is None else pending_request.args
    return calls[0].blocks if calls else []


def deployment(
    engine: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
    server: ServerConfig = ServerConfig(),  # noqa: B008
    replicas: ReplicaConfig = ReplicaConfig(),  # noqa: B008
) -> serve.Application:
    """The application, for `serve.run`. A removed replica first completes its requests, within `drain_timeout`.

    `ConfigurationError` for server settings that have no effect on Ray Serve.
    """
    if rays := server.model_fields_set & _DECIDED_BY_RAY.keys():
        name = min(rays)
        raise ConfigurationError(f"{name} has no effect on Ray Serve; leave it out: {_DECIDED_BY_RAY[name]}")
    scaling: dict[str, Any] = {"num_replicas": replicas.num_replicas}
    if replicas.max_replicas is not None:
        window = max(replicas.upscale_delay, _MIN_WINDOW_S)
        autoscaling = {
            "min_replicas": replicas.num_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_requests,
            "upscale_delay_s": replicas.upscale_delay,
            "downscale_delay_s": replicas.downscale_delay,
            "look_back_period_s": window,
            "metrics_interval_s": window / _SAMPLES_OF_WINDOW,
        }
        scaling = {"autoscaling_config": autoscaling}
    if replicas.is_prefix_aware:
        scaling["request_router_config"] = {"request_router_class": f"{__name__}:{WarmReplicaRouter.__name__}"}
    behind = serve.deployment(
        Replica,
        max_ongoing_requests=replicas.max_requests,
        max_queued_requests=replicas.max_queued_requests or max(1, engine.max_queue_size),
        ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=server.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        **scaling,
    )
    before = serve.deployment(
        Ingress,
        num_replicas=replicas.num_ingresses,
        max_ongoing_requests=2**20,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=server.drain_timeout,
    )
    return before.bind(behind.bind(engine, server, replicas.stream_interval), server.max_body_bytes)


def build_app(settings: dict[str, Any]) -> serve.Application:
    """For `serve run` and Serve's configuration files: fields of `EngineConfig`, `ServerConfig` and `ReplicaConfig`.

    `ConfigurationError` for an unknown setting.
    """
    models: tuple[type[Any], ...] = EngineConfig, ServerConfig, ReplicaConfig
    unknown = settings.keys() - {name for model in models for name in model.model_fields}
    if unknown:
        raise ConfigurationError(f"unknown setting {min(unknown)!r}: see chairlift serve --help and docs/scaling.md")
    return deployment(
        *(model(**{name: settings[name] for name in settings.keys() & model.model_fields}) for model in models)
    )
