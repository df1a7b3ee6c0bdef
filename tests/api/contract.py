"""Holds what the contract tests share: servers with settings of their own, and the strictest reading of what they say.

The judge of shapes is the official client's own pydantic models, in strict mode and without unknown fields; that of
log-probabilities the bundled checkpoint through transformers, in float32, without a cache.
"""

import json
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, TypeVar

import aiohttp
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import BaseModel as ClientModel
from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from transformers import LlamaForCausalLM

from chairlift.api.app import ROUTES
from chairlift.models.checkpoint import find_model
from tests.api.conftest import ENGINE as ENGINE
from tests.api.conftest import Server
from tests.api.conftest import client_of as client_of
from tests.api.conftest import serving as serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
# vLLM's extensions: which stop string or token it was, and tokens where they are asked for.
_OUR_OWN_FIELDS = {"reasoning", "reasoning_content", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}
_Reply = TypeVar("_Reply", bound=ClientModel)


def body_of(path: str) -> Any:
    """The class of a path's bodies. Skips the test where the path's protocol was taken out."""
    for route in ROUTES:
        if (route.method, route.path) == ("POST", path):
            return route.body
    pytest.skip(f"{path} is not served")


def user(text: str) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


async def post(server: Server, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    """The reply, parsed. What was asked must fit the status."""
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}{path}", json=body) as response:
        reply: dict[str, Any] = await response.json()
        assert response.status == status, reply
    return reply


def anthropic_client(server: Server, key: str = "none", **options: Any) -> AsyncAnthropic:
    """The official client, without retries of its own."""
    return AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0, **options)


@asynccontextmanager
async def posted(
    server: Server, body: Any, path: str = MESSAGES, **headers: str
) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession() as http, http.post(server.url + path, json=body, headers=headers) as response:
        yield response


async def warning_of(server: Server, path: str, body: dict[str, Any]) -> str | None:
    """The `Warning` header of a reply that is no error."""
    async with aiohttp.ClientSession(server.url) as http, http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return response.headers.get("Warning")


async def text_of(server: Server, body: dict[str, Any]) -> str:
    """Returns what a completion says, in its first choice."""
    text: str = (await post(server, COMPLETIONS, body))["choices"][0]["text"]
    return text


async def get(server: Server, path: str) -> Any:
    async with aiohttp.ClientSession() as http, http.get(f"{server.url}{path}") as response:
        assert response.status == 200
        return await response.json()


async def error_of(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a request that must be refused with a 400."""
    reply = await post(server, path, body, status=400)
    error: dict[str, Any] = reply.pop("error")
    assert (reply, set(error)) == ({}, {"message", "type", "param", "code"})
    assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
    return error


async def chunks_of(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """A stream's chunks, raw. It must be nothing but `data:` events, and end with [DONE]."""
    body = {**body, "stream": True}
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}{path}", json=body) as response:
        raw = (await response.read()).decode()
        assert response.status == 200, raw
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    *events, last, rest = raw.split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def parts_of(choices: Iterable[dict[str, Any]], is_alone: bool = True) -> dict[int, dict[str, Any]]:
    """By index what choices say, of a whole reply or of chunks in order: texts, tokens, scores, and how each ended.

    Who is not alone has other last bits in its scores each time, so they are only counted.
    """
    found: dict[int, dict[str, Any]] = {}
    for choice in choices:
        part = found.setdefault(choice["index"], {"end": (None, None)})
        assert part["end"][0] is None, "nothing follows a choice's finish reason"
        message = choice.get("message") or choice.get("delta") or {}
        said = {"text": choice.get("text"), "token_ids": choice.get("token_ids")}
        said |= {name: message.get(name) for name in ("content", "reasoning", "reasoning_content")}
        scores = (choice["logprobs"] or {}).items()
        said |= {f"logprobs {name}": values if is_alone else [0] * len(values or ()) for name, values in scores}
        for name, value in said.items():
            if value:
                part[name] = part[name] + value if name in part else value
        part["end"] = (choice["finish_reason"], choice.get("stop_reason"))
    return found


async def whole_and_chunks(
    server: Server, path: str, body: dict[str, Any], *, is_alone: bool = True, **stream_options: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A reply, and the chunks of the same request, which must have one identity and come to the same."""
    options = {"stream_options": stream_options} if stream_options else {}
    whole, chunks = await post(server, path, body), await chunks_of(server, path, body | options)
    (check_chat if path == CHAT else check_completion)(whole)
    for chunk in chunks:
        (check_chat_chunk if path == CHAT else check_completion)(chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    streamed = parts_of((choice for chunk in chunks for choice in chunk["choices"]), is_alone)
    assert streamed == parts_of(whole["choices"], is_alone)
    return whole, chunks


def counts(usage: object) -> tuple[int, int, int]:
    """Tokens of the prompts, of the answers, and of both. What was reused depends on what had been asked before."""
    read = CompletionUsage.model_validate(usage)
    return read.prompt_tokens, read.completion_tokens, read.total_tokens


def check_chat(reply: dict[str, Any]) -> ChatCompletion:
    return _check(ChatCompletion, reply)


def check_chat_chunk(chunk: dict[str, Any]) -> ChatCompletionChunk:
    return _check(ChatCompletionChunk, chunk)


def check_completion(reply: dict[str, Any]) -> Completion:
    """Also of a chunk. The client's model denies the nulls that its own API sends: those are filled in here."""
    filled = json.loads(json.dumps(reply))
    for choice in filled["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name in ("token_logprobs", "top_logprobs") if choice["logprobs"] else ():
            first = choice["logprobs"][name][:1]
            choice["logprobs"][name][:1] = [{} if name == "top_logprobs" else 0.0] if first == [None] else first
    return _check(Completion, filled)


def _check(model: type[_Reply], payload: dict[str, Any]) -> _Reply:
    checked = model.model_validate_json(json.dumps(payload), strict=True)
    assert set(undeclared(checked)) <= _OUR_OWN_FIELDS
    return checked


def undeclared(value: object) -> Iterator[str]:
    """Names of fields that a client's models do not know, at any depth."""
    if isinstance(value, list):
        for each in value:
            yield from undeclared(each)
    elif isinstance(value, BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from undeclared(getattr(value, name))


_ADDED, _DONE = "response.output_item.added", "response.output_item.done"
MESSAGE_EVENTS = [
    *(_ADDED, "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", _DONE),
]
CALL_EVENTS = [_ADDED, *(f"response.function_call_arguments.{kind}" for kind in ("delta", "done")), _DONE]
_ANY_EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)  # which takes a while to make
OPENING, COMPLETED = ["response.created", "response.in_progress"], "response.completed"


@dataclass
class Events:
    """A stream's events in order."""

    all: list[dict[str, Any]]

    @classmethod
    def of(cls, raw: str) -> "Events":
        """Each event has its type for a name, its number, and a shape that the client's models read strictly."""
        *blocks, rest = raw.split("\n\n")
        assert rest == ""
        payloads = []
        for block in (each for each in blocks if not each.startswith(":")):
            name, data = block.split("\n")
            payloads.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {payloads[-1]['type']}"
            _ANY_EVENT.validate_json(json.dumps(payloads[-1]), strict=True)
        assert [each["sequence_number"] for each in payloads] == list(range(len(payloads)))
        return cls(payloads)

    @property
    def types(self) -> list[str]:
        """Deltas in a row count as one."""
        return [kind for kind, _ in groupby(each["type"] for each in self.all)]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.all if each["type"] == kind]

    def joined(self, kind: str, output_index: int = 0) -> str:
        return "".join(each["delta"] for each in self.of_type(kind) if each["output_index"] == output_index)

    @property
    def last_response(self) -> dict[str, Any]:
        response: dict[str, Any] = [each for each in self.all if "response" in each][-1]["response"]
        return response


def without_identity(response: dict[str, Any]) -> dict[str, Any]:
    """Returns what two answers to the same request have in common; the second may have reused the first one's
    prompt.
    """
    items = [{**item, "id": None, "call_id": None} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}
    return {**response, "id": None, "created_at": None, "completed_at": None, "output": items, "usage": usage}


@cache
def _model() -> Any:
    return LlamaForCausalLM.from_pretrained(find_model("bundled"), dtype=torch.float32)


@torch.inference_mode()
def reference_logprobs(prompt: list[int], answer: list[int]) -> torch.Tensor:
    """float32 `[len(answer), vocab]`: of what might stand at each position of the answer."""
    logits = _model()(torch.tensor([prompt + answer])).logits[0]
    rows: torch.Tensor = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
    return rows


def byte_ids(text: str) -> list[int]:
    """The bundled model has one token per byte, and its id is the byte."""
    return list(text.encode())
