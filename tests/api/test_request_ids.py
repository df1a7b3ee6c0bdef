"""X-Request-Id: the client's if it is sane, and on every reply."""

import re

import aiohttp
import pytest

from chairlift.api.config import ServerConfig
from chairlift.api.pages import WATCH_PATH
from tests.api.conftest import Server
from tests.api.contract import COMPLETIONS
from tests.api.fault_support import serving

HEADER = "X-Request-Id"
FRESH = re.compile(r"[0-9a-f]{32}")
BODY = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    ("method", "path", "arguments"),
    [
        ("POST", COMPLETIONS, {"json": BODY}),
        ("POST", COMPLETIONS, {"json": {**BODY, "stream": True}}),
        ("POST", COMPLETIONS, {"data": b"no json"}),
        ("POST", COMPLETIONS, {"json": BODY, "headers": {"Expect": "miracles"}}),
        ("POST", "/nowhere", {}),
        ("GET", COMPLETIONS, {}),
        ("GET", "/", {}),
        ("GET", "/page/page.js", {}),
        ("GET", "/health", {}),
        ("HEAD", "/version", {}),
        ("GET", "/metrics", {}),
        ("GET", WATCH_PATH, {}),
    ],
)
async def test_every_kind_of_reply_carries_the_id_that_was_sent_or_a_new_one(
    server: Server, http: aiohttp.ClientSession, method: str, path: str, arguments: dict[str, dict[str, str]]
) -> None:
    async with http.request(method, server.url + path, **arguments) as response:  # type: ignore[arg-type]
        assert FRESH.fullmatch(response.headers[HEADER])
    sent = {**arguments, "headers": {**arguments.get("headers", {}), HEADER: "my id/42"}}
    async with http.request(method, server.url + path, **sent) as response:  # type: ignore[arg-type]
        assert response.headers.getall(HEADER) == ["my id/42"]


async def test_refusals_carry_it_too() -> None:
    config = ServerConfig.model_validate({"api_key": ["key"], "allowed_origin": ["https://a.example"]})
    origin = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    async with serving(config) as server, aiohttp.ClientSession() as http:
        async with http.post(server.url + COMPLETIONS, json=BODY, headers={HEADER: "mine"}) as refused:
            assert (refused.status, refused.headers[HEADER]) == (401, "mine")
        async with http.options(server.url + COMPLETIONS, headers={**origin, HEADER: "mine"}) as preflight:
            assert (preflight.status, preflight.headers[HEADER]) == (403, "mine")


@pytest.mark.parametrize("insane", ["", "a" * 129, "tab\there", "ümlaut"])
async def test_an_id_that_is_not_sane_is_replaced(server: Server, http: aiohttp.ClientSession, insane: str) -> None:
    async with http.get(server.url + "/health", headers={HEADER: insane}) as response:
        assert FRESH.fullmatch(response.headers[HEADER])


async def test_the_longest_sane_id_comes_back_whole(server: Server, http: aiohttp.ClientSession) -> None:
    sent = "".join(chr(code) for code in range(0x21, 0x7F)) + "x" * 34
    async with http.get(server.url + "/health", headers={HEADER: sent}) as response:
        assert response.headers[HEADER] == sent
    assert len(sent) == 128
