"""`/tokenize` and `/detokenize`, in the shapes that vLLM made known."""

from typing import Any

import aiohttp
import pytest

from tests.api.conftest import MAX_SEQ_LEN, Server


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        assert response.status == status
        reply: dict[str, Any] = await response.json()
    return reply


@pytest.mark.asyncio
async def test_a_text_becomes_tokens_and_back(server: Server, http: aiohttp.ClientSession) -> None:
    reply = await post(http, f"{server.url}/tokenize", {"model": "bundled", "prompt": "Hé!"})
    assert reply == {"tokens": [72, 195, 169, 33], "count": 4, "max_model_len": MAX_SEQ_LEN}
    back = await post(http, f"{server.url}/detokenize", {"model": "bundled", "tokens": reply["tokens"]})
    assert back == {"prompt": "Hé!"}


@pytest.mark.asyncio
async def test_a_conversation_is_counted_as_chat_completions_count_it(
    server: Server, http: aiohttp.ClientSession
) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    reply = await post(http, f"{server.url}/tokenize", {"messages": messages})
    chat = await post(http, f"{server.url}/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert reply["count"] == len(reply["tokens"]) == chat["usage"]["prompt_tokens"]
    text = await post(http, f"{server.url}/detokenize", {"tokens": reply["tokens"]})
    assert text["prompt"] == "<|user|>Hello!<|im_end|><|assistant|>"


@pytest.mark.asyncio
async def test_an_empty_text_has_no_tokens(server: Server, http: aiohttp.ClientSession) -> None:
    assert (await post(http, f"{server.url}/tokenize", {"prompt": ""}))["tokens"] == []
    assert await post(http, f"{server.url}/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("tokenize", {}, "prompt", "give either prompt or messages"),
        ("tokenize", {"prompt": "a", "messages": []}, "prompt", "give either prompt or messages"),
        ("tokenize", {"messages": []}, "messages", "messages is empty"),
        ("tokenize", {"prompt": "a", "foo": 1}, "foo", "unknown"),
        ("detokenize", {"tokens": [1, 99_999]}, "tokens", "token id 99999"),
        ("detokenize", {"tokens": "a"}, "tokens", "valid array"),
    ],
)
async def test_bad_input_is_refused_by_name(
    server: Server, http: aiohttp.ClientSession, path: str, body: dict[str, Any], param: str, words: str
) -> None:
    error = (await post(http, f"{server.url}/{path}", body, status=400))["error"]
    assert error["param"] == param
    assert words in error["message"]
