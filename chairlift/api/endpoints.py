"""The endpoints that belong to no protocol: models, health, metrics, version, and the API's own description."""

from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel

import chairlift
from chairlift.api.routes import Route
from chairlift.api.service import Service


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "chairlift"
    root: str
    parent: None = None
    max_model_len: int
    permission: list[Any] = []


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


async def _models(service: Service, _: web.Request) -> web.Response:
    return json_reply(ModelList(data=[_card(service, name) for name in service.names]))


async def _model(service: Service, request: web.Request) -> web.Response:
    name = request.match_info["model"]
    service.check_model(name)
    return json_reply(_card(service, name))


def _card(service: Service, name: str) -> ModelCard:
    config = service.llm.config
    return ModelCard(id=name, created=service.created, root=config.model, max_model_len=config.max_seq_len)


async def _reset_prefix_cache(service: Service, _: web.Request) -> web.Response:
    if len(service.keys) > 1:  # no single key may slow down all others
        raise web.HTTPForbidden(text="several API keys share this server, so none of them may empty the cache")
    await service.llm.reset_prefix_cache()
    return json_reply(Health())


async def _health(service: Service, _: web.Request) -> web.Response:
    service.check_health()
    return json_reply(Health())


async def _metrics(service: Service, request: web.Request) -> web.Response:
    metrics = await service.read_metrics()
    async with service.turn:
        body, content_type = metrics.render(request.headers.get("Accept", ""), service.engine_pid)
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _version(_: Service, __: web.Request) -> web.Response:
    return json_reply(Version(version=chairlift.__version__))


def json_reply(reply: BaseModel) -> web.Response:
    return web.Response(text=reply.model_dump_json(), content_type="application/json")


_RESET = "Empty the prefix cache, so that a benchmark starts cold; no body"
OWN_ROUTES = (
    Route("GET", "/v1/models", "models", "The served model, under each of its names", _models, ModelList),
    Route("GET", "/v1/models/{model}", "model", "The model under one of its names", _model, ModelCard),
    Route("POST", "/reset_prefix_cache", "reset_prefix_cache", _RESET, _reset_prefix_cache, Health),
    Route("GET", "/health", "health", "Whether requests are served: 200 or 503", _health, Health, is_open=True),
    Route("GET", "/metrics", "metrics_text", "Counts and durations for Prometheus", _metrics, is_open=True),
    Route("GET", "/version", "version", "The version of Chairlift", _version, Version, is_open=True),
)
