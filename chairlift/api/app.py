"""The endpoints' handlers: from a body to a job for the engine, or to an answer right away."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel

import chairlift
from chairlift.api.connections import meet_expectation, read_body
from chairlift.api.docs_page import render_page
from chairlift.api.errors import Handler, error_middleware
from chairlift.api.generate import Job, answer_stream, answer_whole
from chairlift.api.home import add_page_routes
from chairlift.api.keys import KeyRing
from chairlift.api.metrics import Metrics
from chairlift.api.observation import OBSERVATION
from chairlift.api.observer import Observer
from chairlift.api.openapi import describe
from chairlift.api.replies import Reply
from chairlift.api.replies.chat import ChatReply
from chairlift.api.replies.completion import CompletionReply
from chairlift.api.replies.responses import ResponsesReply
from chairlift.api.routes import ROUTES
from chairlift.api.sse import EventStream
from chairlift.api.tool_choice import AnswerPlan, plan_answer
from chairlift.api.tools import ToolFamily, family_of_template
from chairlift.api.tracing import Tracing
from chairlift.api.watch import SnapshotFeed, add_watch_route
from chairlift.api.wire.chat import ChatCompletionRequest
from chairlift.api.wire.completions import CompletionRequest
from chairlift.api.wire.conversation import Conversation, own_field_names
from chairlift.api.wire.request import GenerationRequest
from chairlift.api.wire.responses import ResponsesRequest
from chairlift.api.wire.service import (
    DetokenizeReply,
    DetokenizeRequest,
    Health,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
    Version,
)
from chairlift.api.wire.structure import WantedStructure
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.inputs import Generation, Prompt
from chairlift.errors import EngineClosed, InvalidRequest, ModelNotFound
from chairlift.params import RequestOptions, SamplingParams

_LARGE_BODY_BYTES = 2**16

_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """How the API behaves, beside what the engine does. Times are in seconds."""

    api_keys: Sequence[str] = ()
    tool_call_parser: ToolFamily | None = None  # None: what the chat template teaches
    max_body_bytes: int = 10 * 2**20
    keep_alive_interval: float = 10.0


class Api:
    """The handlers. One model, one engine."""

    def __init__(self, llm: AsyncLLM, model_name: str, options: ApiOptions = ApiOptions()) -> None:
        self._llm = llm
        self._model_name = model_name
        self._options = options
        self._keys = KeyRing(options.api_keys)
        self._tool_family = options.tool_call_parser or family_of_template(llm.inputs.tokenizer.chat_template)
        self._created = int(time.time())
        self._metrics = Metrics(llm, model_name)
        self.is_draining = False
        self.num_active = 0  # requests from their headers to the last byte of their replies

    def make_app(self) -> web.Application:
        """The application, ready for a runner with `handler_cancellation=True`: who leaves must be noticed."""
        middlewares = [error_middleware, self._keys.middleware, self._refuse_when_draining]
        app = web.Application(middlewares=middlewares, client_max_size=self._options.max_body_bytes)
        for route in ROUTES:
            # A model's name may hold slashes, as hub ids do.
            path = route.path.replace("{model}", "{model:.+}")
            methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
            for method in methods:
                app.router.add_route(method, path, getattr(self, route.handler), expect_handler=meet_expectation)
        Observer(self._metrics, Tracing(self._model_name)).install(app)
        add_page_routes(app)
        add_watch_route(app, SnapshotFeed(self._llm), self._options.keep_alive_interval)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`"""
        body = await self._read(request, CompletionRequest)
        params = body.params(self._llm.inputs.default_params)
        reply = CompletionReply(body, self._model_name, self._llm.inputs)
        prompts: list[Prompt] = list(body.prompts())
        options = self._request_options(request, body)
        generations = await self._prepare(prompts, params, options, reply.id, body.wanted_structure(), "prompt")
        return await self._answer(request, body, Job(generations, reply, request[OBSERVATION]))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`"""
        body = await self._read(request, ChatCompletionRequest)
        plan = self._plan(body)
        reply = ChatReply(body, self._model_name, self._llm.inputs.vocabulary, plan.calling)
        return await self._answer_conversation(request, body, plan, reply)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`"""
        body = await self._read(request, ResponsesRequest)
        plan = self._plan(body)
        inputs = self._llm.inputs
        params = body.params(inputs.default_chat_params)
        reply = ResponsesReply(body, params, self._model_name, inputs.vocabulary, plan.calling)
        return await self._answer_conversation(request, body, plan, reply)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`"""
        body = await self._read(request, TokenizeRequest)
        inputs = self._llm.inputs
        if body.messages is not None:
            tokens = await asyncio.to_thread(inputs.encode_chat, body.template_messages(), body.chat_options())
        else:
            tokens = await asyncio.to_thread(
                inputs.tokenizer.encode, body.prompt or "", body.add_special_tokens is not False
            )
        return _json(TokenizeReply(tokens=tokens, count=len(tokens), max_model_len=self._llm.config.max_seq_len))

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`"""
        body = await self._read(request, DetokenizeRequest)
        return _json(DetokenizeReply(prompt=await asyncio.to_thread(self._llm.inputs.decode, body.tokens)))

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`"""
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{model}`"""
        self._check_model(request.match_info["model"])
        return _json(self._card())

    async def health(self, _: web.Request) -> web.Response:
        """`GET /health`: 200 while the engine's thread answers and new requests are served, else 503."""
        if self._llm.death is not None:
            raise EngineClosed(f"the engine died: {self._llm.death}")
        if self.is_draining:
            raise EngineClosed("the server is going down")
        if not self._llm.is_healthy:
            raise EngineClosed("the engine does not answer")
        return _json(Health())

    async def metrics_text(self, request: web.Request) -> web.Response:
        """`GET /metrics`"""
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def version(self, _: web.Request) -> web.Response:
        """`GET /version`"""
        return _json(Version(version=chairlift.__version__))

    async def openapi(self, _: web.Request) -> web.Response:
        """`GET /openapi.json`"""
        return web.json_response(describe())

    async def docs(self, _: web.Request) -> web.Response:
        """`GET /docs`"""
        return render_page()

    async def _read(self, request: web.Request, model: type[_Body]) -> _Body:
        """The checked body, which may name the model that is served here, and no other."""
        raw = await read_body(request)
        if len(raw) > _LARGE_BODY_BYTES:  # to check it takes long enough to be noticed by everybody's streams
            body = await asyncio.to_thread(model.model_validate_json, raw)
        else:
            body = model.model_validate_json(raw)
        self._check_model(getattr(body, "model", None))
        return body

    def _request_options(self, request: web.Request, body: GenerationRequest | Conversation) -> RequestOptions:
        return body.request_options(self._keys.tenant_of(request))

    async def _prepare(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        options: RequestOptions,
        name: str,
        wanted: WantedStructure | None,
        field: str,
    ) -> list[Generation]:
        """Checks all of it before anything runs; complaints name the fields that the client wrote."""
        capacity = self._llm.config.max_batch_size + self._llm.config.max_queue_size
        if len(prompts) > 1 and len(prompts) * params.n > capacity:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n {params.n} are more than the {capacity} requests that can run and wait"
                " here; send fewer at once",
                field,
            )
        if wanted is not None:
            params = params.model_copy(update={"structured_outputs": wanted.outputs})
        try:
            return [
                await self._llm.prepare(prompt, params, f"{name}-{index}", field, options)
                for index, prompt in enumerate(prompts)
            ]
        except InvalidRequest as error:
            if wanted is not None and error.param == "structured_outputs":
                error.param = wanted.field
            raise

    def _plan(self, body: Conversation) -> AnswerPlan:
        is_parallel = body.parallel_tool_calls is not False
        functions = body.functions_to_call()
        return plan_answer(self._tool_family, functions, body.is_call_forced, is_parallel, body.wanted_structure())

    async def _answer_conversation(
        self, request: web.Request, body: Conversation, plan: AnswerPlan, reply: Reply
    ) -> web.StreamResponse:
        """The one way from a conversation to the engine."""
        inputs = self._llm.inputs
        params = body.params(inputs.default_chat_params)
        options = self._request_options(request, body)
        chat_options = body.chat_options(shows_tools=plan.calling is not None)
        with own_field_names(body):
            token_ids = await asyncio.to_thread(lambda: inputs.encode_chat(body.template_messages(), chat_options))
            generations = await self._prepare([token_ids], params, options, reply.id, plan.structure, "messages")
        return await self._answer(request, body, Job(generations, reply, request[OBSERVATION]))

    async def _answer(
        self, request: web.Request, body: GenerationRequest | Conversation, job: Job
    ) -> web.StreamResponse:
        job.observation.note_job(job.reply.id, job.generations, is_streamed=bool(body.stream))
        if not body.stream:
            return await answer_whole(self._llm, job)
        stream = EventStream(request, self._options.keep_alive_interval)
        return await answer_stream(self._llm, job, stream)

    def _check_model(self, name: str | None) -> None:
        """A request that names no model means the one there is."""
        if name not in (None, self._model_name):
            raise ModelNotFound(f"there is no model {name!r} here, only {self._model_name!r}", "model")

    def _card(self) -> ModelCard:
        return ModelCard(id=self._model_name, created=self._created, max_model_len=self._llm.config.max_seq_len)

    @web.middleware
    async def _refuse_when_draining(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST":
            return await handler(request)
        if self._llm.death is not None:
            raise EngineClosed(f"the engine died: {self._llm.death}")
        if self.is_draining:
            raise EngineClosed("the server is going down; try another one, or later")
        self.num_active += 1
        try:
            return await handler(request)
        finally:
            self.num_active -= 1


def _json(reply: BaseModel) -> web.Response:
    return web.Response(text=reply.model_dump_json(), content_type="application/json")
