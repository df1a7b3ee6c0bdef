"""API keys: asked for where there are any, compared whole, and never needed for health."""

from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from aiohttp import ClientSession, web
from openai import AsyncOpenAI

from chairlift.api.app import Api
from chairlift.api.keys import KeyRing, read_keys
from chairlift.api.server import make_runner
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ConfigurationError


@pytest_asyncio.fixture
async def url() -> AsyncIterator[str]:
    """A server that knows two keys."""
    llm = AsyncLLM(max_batch_size=1, max_seq_len=64)
    runner = make_runner(Api(llm, "bundled", ["first key", "zweiter-Schlüssel"]))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await llm.close()
    await runner.cleanup()


@pytest.mark.asyncio
async def test_a_known_key_is_let_in_and_another_is_a_401(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="first key", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["bundled"]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="first", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert "first key" not in str(caught.value)


@pytest.mark.asyncio
async def test_every_path_asks_for_a_key_but_health_and_version(url: str) -> None:
    async with ClientSession() as http:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/nowhere"):
            async with http.get(url + path) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        for path in ("/health", "/version"):
            async with http.get(url + path) as response:
                assert response.status == 200


@pytest.mark.asyncio
@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic first key", "first key"])
async def test_a_header_that_is_no_bearer_key_is_a_401(url: str, header: str) -> None:
    async with ClientSession() as http, http.get(f"{url}/v1/models", headers={"Authorization": header}) as response:
        assert response.status == 401


def test_a_ring_knows_its_keys_whole() -> None:
    ring = KeyRing(["abc", "dé"])
    assert [ring.knows(key) for key in ("abc", "dé", "ab", "abcd", "", "ABC")] == [True, True] + [False] * 4


def test_keys_are_read_from_a_file_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n one \n\ntwo\n")
    assert read_keys(path) == ["one", "two"]
    path.write_text("# none\n")
    with pytest.raises(ConfigurationError, match="holds no key"):
        read_keys(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_keys(tmp_path / "nowhere")
