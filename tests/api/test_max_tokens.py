"""Tests what becomes of a max_tokens that does not fit beside the prompt, as the server is set."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from chairlift.api import ServerConfig
from tests.api.conftest import MAX_SEQ_LEN, Server, client_of, serving

LONG = "a" * 400
TURNS: Any = [{"role": "user", "content": LONG}]
ENDLESS: Any = {"extra_body": {"ignore_eos": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def clamping() -> AsyncIterator[Server]:
    async with serving(ServerConfig(clamp_max_tokens=True)) as server:
        yield server


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_chat_ends_where_the_room_does(clamping: Server, name: str) -> None:
    async with client_of(clamping) as client:
        create: Any = client.chat.completions.create
        reply, short = [
            await create(model="bundled", messages=TURNS, **{name: limit}, **ENDLESS) for limit in (8192, 3)
        ]
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.total_tokens == MAX_SEQ_LEN
    assert short.usage.completion_tokens == 3


async def test_a_response_ends_where_the_room_does(clamping: Server) -> None:
    async with client_of(clamping) as client:
        reply = await client.responses.create(model="bundled", input=LONG, max_output_tokens=8192, **ENDLESS)
    assert (reply.status, reply.max_output_tokens) == ("incomplete", 8192)
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage is not None
    assert reply.usage.total_tokens == MAX_SEQ_LEN


async def test_a_conversation_is_shortened_and_its_answer_ends_where_the_room_does(clamping: Server) -> None:
    turns: Any = [{"role": "user", "content": "a" * (MAX_SEQ_LEN // 2)} for _ in range(3)]
    async with client_of(clamping) as client:
        reply = await client.responses.create(
            model="bundled", input=turns, max_output_tokens=8192, truncation="auto", **ENDLESS
        )
    assert reply.usage is not None
    assert reply.usage.total_tokens == MAX_SEQ_LEN


async def test_a_completion_of_each_prompt_ends_where_its_room_does(clamping: Server) -> None:
    async with client_of(clamping) as client:
        reply = await client.completions.create(model="bundled", prompt=[LONG, "a"], max_tokens=500, **ENDLESS)
    assert [choice.finish_reason for choice in reply.choices] == ["length", "length"]
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (401, MAX_SEQ_LEN - 400 + 500)


async def test_a_prompt_that_is_too_long_is_refused_all_the_same(clamping: Server) -> None:
    async with client_of(clamping) as client:
        with pytest.raises(openai.BadRequestError, match="1 too many beside at least 1 for the answer") as caught:
            await client.completions.create(model="bundled", prompt="a" * MAX_SEQ_LEN, max_tokens=8192)
        assert caught.value.code == "context_length_exceeded"
        options: Any = {"extra_body": {"truncate_prompt_tokens": -1}}  # keeps nothing beside so many tokens
        with pytest.raises(openai.BadRequestError, match="max_tokens 8192 does not fit"):
            await client.completions.create(model="bundled", prompt=LONG, max_tokens=8192, **options)


async def test_more_than_the_room_is_an_error_by_default(server: Server) -> None:
    async with client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens 8192 does not fit") as caught:
            await client.chat.completions.create(model="bundled", messages=TURNS, max_completion_tokens=8192)
    assert (caught.value.param, caught.value.code) == ("max_completion_tokens", "context_length_exceeded")
