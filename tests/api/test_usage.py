"""What `usage` says of reuse: summed over prompts, always there, in the words of each endpoint."""

from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI
from openai.types.completion_usage import PromptTokensDetails

from chairlift.api import ServerConfig
from chairlift.api.wire import Usage
from chairlift.api.wire.response_object import ResponseUsage
from chairlift.params import CompletionOutput, RequestOutput
from tests.api.conftest import Server
from tests.api.contract import (
    CHAT,
    COMPLETIONS,
    check_chat,
    check_chat_chunk,
    check_completion,
    chunks_of,
    post,
    serving,
    user,
)


def output_of(num_prompt: int, num_cached: int, *num_generated: int) -> RequestOutput:
    choices = [CompletionOutput(index, token_ids=[7] * count) for index, count in enumerate(num_generated)]
    return RequestOutput("r", None, [5] * num_prompt, choices, num_cached_tokens=num_cached)


def test_reuse_is_summed_over_the_prompts_of_a_request() -> None:
    assert Usage.of([output_of(10, 8, 3, 4), output_of(5, 0, 1, 1)]).model_dump() == {
        "prompt_tokens": 15,
        "completion_tokens": 9,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 8},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def test_responses_have_their_own_words_for_it() -> None:
    assert ResponseUsage.of(Usage.of([output_of(10, 8, 3)])).model_dump() == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 13,
    }


# --- streams


@pytest.mark.parametrize("has_last", [False, True])
async def test_a_chat_tells_the_usage_so_far_with_every_chunk(server: Server, has_last: bool) -> None:
    body = {"messages": user("Hello!"), "n": 2, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    whole = await post(server, CHAT, body)
    options = {"include_usage": has_last, "continuous_usage_stats": True}
    chunks = await chunks_of(server, CHAT, {**body, "stream_options": options})
    usages = [check_chat_chunk(chunk).usage for chunk in chunks]
    assert all(usage is not None and usage.prompt_tokens == whole["usage"]["prompt_tokens"] for usage in usages)
    generated = [usage.completion_tokens for usage in usages if usage is not None]
    assert (generated[0], generated[-1], generated) == (0, 12, sorted(generated))
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(chunks) - has_last) + [0] * has_last


async def test_a_completion_tells_the_usage_so_far_with_every_chunk(server: Server) -> None:
    body = {"prompt": ["1 + 1 =", "Once"], "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await chunks_of(server, COMPLETIONS, {**body, "stream_options": options})
    usages = [check_completion(chunk).usage for chunk in chunks]
    generated = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(generated) == len(chunks)
    assert (generated[-2:], generated) == ([12, 12], sorted(generated))
    assert chunks[-2]["usage"] == chunks[-1]["usage"]


# --- an engine that reuses


async def test_what_was_computed_can_be_forgotten(server: Server, client: AsyncOpenAI) -> None:
    await cached(client)
    assert await cached(client) == len(STORY) - 1
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/reset_prefix_cache") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    assert await cached(client) == 0


async def test_one_of_several_keys_cannot_have_everybodys_prompts_forgotten() -> None:
    async with serving(ServerConfig(api_key=("a", "b"))) as server, aiohttp.ClientSession() as http:
        headers = {"Authorization": "Bearer a"}
        async with http.post(f"{server.url}/reset_prefix_cache", headers=headers) as response:
            assert response.status == 403
            assert "several API keys" in (await response.json())["error"]["message"]


STORY = "Once upon a time there was a little lift"  # a byte is a token
QUESTION = "What is 17 + 25?"


async def cached(client: AsyncOpenAI, prompt: str | list[str] = STORY, **extra: Any) -> int:
    """Tokens that a completion says it reused."""
    reply = await client.completions.create(
        model="bundled", prompt=prompt, temperature=0, max_tokens=3, extra_body=extra
    )
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens is not None
    return reply.usage.prompt_tokens_details.cached_tokens


async def test_a_prompt_that_comes_again_is_reused_but_for_its_last_token(client: AsyncOpenAI) -> None:
    assert await cached(client) == 0
    assert await cached(client) == len(STORY) - 1
    assert await cached(client, STORY + " that went up") == len(STORY)
    assert await cached(client, [STORY, "never seen", STORY]) == 2 * (len(STORY) - 1)


async def test_every_endpoint_and_both_kinds_of_replies_tell_of_it(server: Server) -> None:
    chat = {"messages": user(QUESTION), "temperature": 0}
    first = check_chat(await post(server, CHAT, chat))
    assert (first.usage and first.usage.prompt_tokens_details) == PromptTokensDetails(cached_tokens=0)
    second = check_chat(await post(server, CHAT, chat))
    assert second.usage is not None
    reused = PromptTokensDetails(cached_tokens=second.usage.prompt_tokens - 1)
    assert second.usage.prompt_tokens_details == reused
    assert second.choices == first.choices
    *_, last = await chunks_of(server, CHAT, {**chat, "stream_options": {"include_usage": True}})
    assert check_chat_chunk(last).usage == second.usage
    response = await post(server, "/v1/responses", {"input": QUESTION, "temperature": 0})
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": reused.cached_tokens, "cache_write_tokens": 0}
    continued = {"prompt": STORY, "max_tokens": 3}
    await post(server, COMPLETIONS, continued)
    *_, last = await chunks_of(server, COMPLETIONS, {**continued, "stream_options": {"include_usage": True}})
    usage = check_completion(last).usage
    assert (usage and usage.prompt_tokens_details) == PromptTokensDetails(cached_tokens=len(STORY) - 1)
