"""The routes, and what each does with a request."""

import asyncio
import time
from collections.abc import Sequence

from aiohttp import web

import chairlift
from chairlift.api.errors import Handler, error_middleware
from chairlift.api.generate import answer_stream, answer_whole
from chairlift.api.keys import KeyRing
from chairlift.api.replies import ChatReply, CompletionReply, Reply
from chairlift.api.wire import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    SamplingRequest,
    TokenizeReply,
    TokenizeRequest,
)
from chairlift.engine.async_llm import AsyncLLM
from chairlift.engine.inputs import Generation, Prompt
from chairlift.errors import EngineClosed, EngineDead, InvalidRequest, ModelNotFound
from chairlift.params import SamplingParams

MAX_BODY_BYTES = 10 * 2**20
_JSON = "application/json"


class Api:
    """The handlers. One model, one engine."""

    def __init__(self, llm: AsyncLLM, model_name: str, api_keys: Sequence[str] = ()) -> None:
        self._llm = llm
        self._model_name = model_name
        self._keys = KeyRing(api_keys)
        self._created = int(time.time())
        self.is_draining = False
        self.num_active = 0  # requests from their headers to the last byte of their replies

    def make_app(self) -> web.Application:
        """The application, ready for a runner with `handler_cancellation=True`: who leaves must be noticed."""
        middlewares = [error_middleware, self._keys.middleware, self._refuse_when_draining]
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/health", self.health)
        app.router.add_get("/version", self.version)
        return app

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`"""
        body = CompletionRequest.model_validate_json(await request.read())
        self._check_model(body.model)
        params = body.sampling_params(self._llm.inputs.default_params)
        reply = CompletionReply(self._model_name)
        return await self._answer(request, body, reply, list(body.prompts()), params)

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`"""
        body = ChatCompletionRequest.model_validate_json(await request.read())
        self._check_model(body.model)
        params = body.sampling_params(self._llm.inputs.default_chat_params)
        messages = [message.as_template_input() for message in body.messages]
        token_ids = await asyncio.to_thread(self._llm.inputs.encode_chat, messages)
        return await self._answer(request, body, ChatReply(self._model_name), [token_ids], params)

    async def tokenize(self, request: web.Request) -> web.Response:
        """`POST /tokenize`"""
        body = TokenizeRequest.model_validate_json(await request.read())
        self._check_model(body.model)
        inputs = self._llm.inputs
        if body.messages is not None:
            messages = [message.as_template_input() for message in body.messages]
            tokens = await asyncio.to_thread(inputs.encode_chat, messages)
        else:
            tokens = await asyncio.to_thread(inputs.tokenizer.encode, body.prompt or "", body.add_special_tokens)
        reply = TokenizeReply(tokens=tokens, count=len(tokens), max_model_len=self._llm.config.max_seq_len)
        return web.Response(text=reply.model_dump_json(), content_type=_JSON)

    async def detokenize(self, request: web.Request) -> web.Response:
        """`POST /detokenize`"""
        body = DetokenizeRequest.model_validate_json(await request.read())
        self._check_model(body.model)
        text = await asyncio.to_thread(self._llm.inputs.decode, body.tokens)
        return web.Response(text=DetokenizeReply(prompt=text).model_dump_json(), content_type=_JSON)

    async def models(self, _: web.Request) -> web.Response:
        """`GET /v1/models`"""
        return web.Response(text=ModelList(data=[self._card()]).model_dump_json(), content_type=_JSON)

    async def model(self, request: web.Request) -> web.Response:
        """`GET /v1/models/{id}`"""
        self._check_model(request.match_info["model"])
        return web.Response(text=self._card().model_dump_json(), content_type=_JSON)

    async def health(self, _: web.Request) -> web.Response:
        """`GET /health`: 200 while new requests are served, 503 when the engine is dead or draining."""
        if self._llm.death is not None:
            raise EngineClosed(f"the engine died: {self._llm.death}")
        if self.is_draining:
            raise EngineClosed("the server is going down")
        return web.json_response({"status": "ok"})

    async def version(self, _: web.Request) -> web.Response:
        """`GET /version`"""
        return web.json_response({"version": chairlift.__version__})

    async def _answer(
        self, request: web.Request, body: SamplingRequest, reply: Reply, prompts: list[Prompt], params: SamplingParams
    ) -> web.StreamResponse:
        capacity = self._llm.config.max_batch_size + self._llm.config.max_queue_size
        if len(prompts) > 1 and len(prompts) * params.n > capacity:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n {params.n} are more than the {capacity} requests that can run and wait"
                " here; send fewer at once",
                "prompt",
            )
        generations: list[Generation] = [
            await self._llm.prepare(prompt, params, f"{reply.id}-{index}") for index, prompt in enumerate(prompts)
        ]
        if body.stream:
            return await answer_stream(request, self._llm, generations, reply, body.has_usage_chunk)
        return await answer_whole(self._llm, generations, reply)

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
            raise EngineDead(f"the engine died: {self._llm.death}")
        if self.is_draining:
            raise EngineClosed("the server is going down; try another one, or later")
        self.num_active += 1
        try:
            return await handler(request)
        finally:
            self.num_active -= 1
