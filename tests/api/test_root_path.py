"""A server that a proxy offers under a prefix, which the proxy takes out of the path or leaves in it."""

import aiohttp
import pytest
from pydantic import ValidationError

from chairlift.api import ServerConfig
from tests.api.conftest import serving


async def test_everything_is_served_with_the_prefix_and_without_it() -> None:
    async with serving(ServerConfig(root_path="/of/llm")) as server, aiohttp.ClientSession(server.url) as http:
        for path in ("/v1/models", "/", "/openapi.json", "/health?deep=1"):
            async with http.get(path) as plain, http.get(f"/of/llm{path}") as prefixed:
                assert (plain.status, prefixed.status) == (200, 200), path
                assert await plain.read() == await prefixed.read()
        async with http.get("/openapi.json") as reply:
            assert (await reply.json())["servers"] == [{"url": "/of/llm"}]
        async with http.get("/of/llm", allow_redirects=False) as reply:
            assert (reply.status, reply.headers["Location"]) == (308, "/of/llm/")
        for path in ("/of/llmv1/models", "/of/llm/of/llm/v1/models", "/of/llm//v1/models", "/of"):
            async with http.get(path) as reply:
                assert reply.status == 404, path
        body = {"model": "bundled", "prompt": "a", "max_tokens": 1}
        async with http.post("/of/llm/v1/completions", json=body) as reply:
            assert reply.status == 200


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "/l m", "/llm?x"])
def test_a_prefix_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(ValidationError, match="root_path"):
        ServerConfig(root_path=path)
