"""One request against a real socket: what is sent and what is seen; and which model is asked for."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from chairlift.bench import BenchConfig
from chairlift.bench.client import first_model, open_session
from chairlift.bench.failures import BenchError

from .null_server import (
    DONE,
    Answer,
    NullServer,
    chat_token,
    event,
    open_stream,
    status,
    stream,
    token,
    usage,
)
from .one_request import send_one


@pytest.mark.asyncio
async def test_a_request_that_succeeds(server: NullServer) -> None:
    record = await send_one(server.url)
    assert record.failure is None
    assert (record.index, record.turn) == (0, 0)
    assert (record.asked_prompt_tokens, record.asked_output_tokens) == (5, 4)
    assert len(record.chunk_times) == 4
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (5, 4)
    assert record.sent_at < record.chunk_times[0]
    assert list(record.chunk_times) == sorted(record.chunk_times)
    assert record.ended_at == record.chunk_times[-1]


@pytest.mark.asyncio
async def test_the_intended_time_is_kept_beside_the_actual_one(server: NullServer) -> None:
    record = await send_one(server.url)
    assert record.intended_at == 1.5
    assert record.queue_time == record.sent_at - 1.5


@pytest.mark.asyncio
async def test_the_body_of_a_completion(server: NullServer) -> None:
    await send_one(server.url)
    [body] = server.bodies
    prompt = body.pop("prompt")
    assert len(prompt) == 5
    assert all(32 <= token_id < 127 for token_id in prompt)
    assert body == {
        "model": "null",
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


@pytest.mark.asyncio
async def test_what_a_server_had_computed_before_is_kept(server: NullServer) -> None:
    counts = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 3}}
    server.answer = stream(token("a", "length"), event(choices=[], usage=counts), DONE)
    record = await send_one(server.url)
    assert (record.usage_prompt_tokens, record.usage_cached_tokens) == (5, 3)


@pytest.mark.asyncio
async def test_the_body_of_a_chat(server: NullServer) -> None:
    record = await send_one(server.url, endpoint="chat")
    [body] = server.bodies
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split()) == 5
    assert "prompt" not in body
    assert (record.usage_prompt_tokens, record.usage_output_tokens) == (999, 4)


@pytest.mark.asyncio
async def test_settings_reach_the_body(server: NullServer) -> None:
    await send_one(server.url, ignore_eos=False, temperature=0.7)
    assert "ignore_eos" not in server.bodies[0]
    assert server.bodies[0]["temperature"] == 0.7


@pytest.mark.asyncio
async def test_the_api_key_is_sent_as_a_bearer(server: NullServer) -> None:
    await send_one(server.url, api_key="sk-1")
    await send_one(server.url)
    assert server.authorizations == ["Bearer sk-1", None]


@pytest.mark.asyncio
async def test_without_usage_the_record_has_chunks_alone(server: NullServer) -> None:
    server.answer = stream(token(), token(), token("x", "length"), DONE)
    record = await send_one(server.url)
    assert record.failure is None
    assert record.usage_output_tokens is None
    assert record.output_tokens == 3


@pytest.mark.asyncio
async def test_chunks_cut_anywhere_and_comments_between_them(server: NullServer) -> None:
    whole = b": ping\n\n" + token("é") + b": ping\r\n\r\n" + token("b", "stop") + usage(5, 2) + DONE
    server.answer = stream(*(whole[start : start + 9] for start in range(0, len(whole), 9)))
    record = await send_one(server.url)
    assert record.failure is None
    assert (len(record.chunk_times), record.usage_output_tokens) == (2, 2)


@pytest.mark.asyncio
async def test_the_role_of_a_chat_is_not_its_first_token(server: NullServer) -> None:
    server.answer = stream(
        chat_token(role="assistant", content=""),
        chat_token(content="a"),
        chat_token("stop"),
        DONE,
    )
    record = await send_one(server.url, endpoint="chat")
    assert (record.failure, len(record.chunk_times)) == (None, 1)


@pytest.mark.asyncio
async def test_chunks_are_stamped_as_they_arrive(server: NullServer) -> None:
    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(token())
        await asyncio.sleep(0.02)
        await response.write(token("x", "length") + usage(5, 2) + DONE)
        return response

    server.answer = answer
    record = await send_one(server.url)
    [gap] = record.inter_token_latencies
    assert gap >= 0.015


@pytest.mark.asyncio
async def test_the_time_after_the_last_token_does_not_count(server: NullServer) -> None:
    async def answer(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = await open_stream(request)
        await response.write(token("x", "length"))
        await asyncio.sleep(0.02)
        await response.write(usage(5, 1) + DONE)
        return response

    server.answer = answer
    record = await send_one(server.url)
    assert record.usage_output_tokens == 1
    assert record.ended_at == record.chunk_times[0]


async def ask_for_model(url: str, **settings: object) -> str:
    config = BenchConfig.model_validate({"url": url} | settings)
    async with open_session(config) as session:
        return await first_model(session, config.url)


@pytest.mark.asyncio
async def test_the_model_is_the_first_that_the_server_lists(server: NullServer) -> None:
    server.models = status(200, '{"data": [{"id": "a/b"}, {"id": "c"}]}', "application/json")
    assert await ask_for_model(server.url) == "a/b"


@pytest.mark.asyncio
async def test_no_server_to_ask_for_models(dead_url: str) -> None:
    with pytest.raises(BenchError, match=f"cannot reach {dead_url}: Cannot connect to host"):
        await ask_for_model(dead_url)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(404, "Not Found"), r"HTTP 404 and no list of models \(text/plain\)"),
        (status(200, "<html></html>", "text/html"), r"HTTP 200 and no list of models \(text/html\)"),
        (status(200, '{"data": []}', "application/json"), "HTTP 200 and no list of models"),
        (status(200, "[]", "application/json"), "HTTP 200 and no list of models"),
        (status(401, "{}"), "HTTP 401: give the server's --api-key"),
    ],
)
async def test_a_server_that_lists_no_models(server: NullServer, answer: Answer, said: str) -> None:
    server.models = answer
    with pytest.raises(BenchError, match=said):
        await ask_for_model(server.url)


@pytest.mark.asyncio
async def test_a_server_that_never_lists_its_models(server: NullServer) -> None:
    async def answer(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.Event().wait()
        return web.Response()

    server.models = answer
    with pytest.raises(BenchError, match="/v1/models did not answer in time"):
        await ask_for_model(server.url, timeout=0.05)
