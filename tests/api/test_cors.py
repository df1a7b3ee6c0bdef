"""Cross-origin requests: what a browser is told, on every kind of reply, and that others notice nothing."""

from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from chairlift.api.app import Api, ApiOptions
from chairlift.api.config import ServerConfig
from chairlift.api.cors import Cors, normalize_origin
from chairlift.api.server import make_runner
from chairlift.engine.async_llm import AsyncLLM
from chairlift.errors import ConfigurationError

PAGE = "https://app.example.org"
STRANGER = "https://evil.example.org"
KEY = {"Authorization": "Bearer secret"}
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}


@pytest.fixture
def origins() -> list[str]:
    """Those that the server allows."""
    return ["http://localhost:3000", PAGE]


@pytest_asyncio.fixture
async def http(origins: list[str]) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that asks for a key and allows those origins."""
    llm = AsyncLLM(max_batch_size=1, max_seq_len=64, num_threads=1)
    runner = make_runner(Api(llm, "bundled", ApiOptions(api_keys=["secret"])), ServerConfig(allowed_origin=origins))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}") as session:
        yield session
    await llm.close()
    await runner.cleanup()


def cors_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("Access-Control-")}


@pytest.mark.asyncio
@pytest.mark.parametrize("origin", ["http://localhost:3000", PAGE])
async def test_a_preflight_needs_no_key_and_says_what_is_allowed(http: aiohttp.ClientSession, origin: str) -> None:
    async with http.options("/v1/chat/completions", headers={"Origin": origin, **PREFLIGHT}) as response:
        assert response.status == 204
        assert cors_headers(response.headers) == {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "POST",
            "Access-Control-Allow-Headers": "authorization,content-type,x-stainless-lang",
            "Access-Control-Max-Age": "3600",
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
        }
        assert response.headers["Vary"] == "Origin"


@pytest.mark.asyncio
async def test_every_route_answers_preflights(http: aiohttp.ClientSession) -> None:
    wanted = {
        "/v1/completions": "POST",
        "/tokenize": "POST",
        "/v1/models": "GET",
        "/v1/models/bundled": "GET",
        "/health": "GET",
        "/nowhere": "GET",
    }
    for path, method in wanted.items():
        async with http.options(path, headers={"Origin": PAGE, **PREFLIGHT}) as response:
            assert response.status == 204
            assert method in response.headers["Access-Control-Allow-Methods"].split(", ")


@pytest.mark.asyncio
async def test_a_preflight_of_a_stranger_is_a_403_in_the_usual_form(http: aiohttp.ClientSession) -> None:
    async with http.options("/v1/models", headers={"Origin": STRANGER, **PREFLIGHT}) as response:
        assert response.status == 403
        assert cors_headers(response.headers) == {}
        assert response.headers["Vary"] == "Origin"
        error = (await response.json())["error"]
    assert error["message"] == f"pages of {STRANGER} may not use this server; --allowed-origin would let them"
    assert error["type"] == "invalid_request_error"


@pytest.mark.asyncio
async def test_replies_and_errors_can_be_read_by_the_page(http: aiohttp.ClientSession) -> None:
    expected = {
        "Access-Control-Allow-Origin": PAGE,
        "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
    }
    for path, headers, status in (
        ("/v1/models", KEY, 200),
        ("/v1/models", {}, 401),
        ("/v1/models/other", KEY, 404),
        ("/nowhere", KEY, 404),
        ("/v1/completions", KEY, 405),
    ):
        async with http.get(path, headers={"Origin": PAGE, **headers}) as response:
            assert response.status == status
            assert cors_headers(response.headers) == expected
            assert response.headers["Vary"] == "Origin"


@pytest.mark.asyncio
async def test_a_stream_can_be_read_by_the_page(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "stream": True}
    async with http.post("/v1/completions", json=body, headers={"Origin": PAGE, **KEY}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Vary"] == "Origin"
        assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [{"Origin": STRANGER}, {"Origin": "null"}, {}])
async def test_strangers_and_plain_clients_get_replies_without_cors_headers(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with http.get("/health", headers=headers) as response:
        assert response.status == 200
        assert cors_headers(response.headers) == {}
        assert response.headers["Vary"] == "Origin"


@pytest.mark.asyncio
@pytest.mark.parametrize("headers", [{"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}])
async def test_options_that_are_no_preflight_stay_what_they_were(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with http.options("/v1/completions", headers={**headers, **KEY}) as response:
        assert response.status == 405


@pytest.mark.asyncio
@pytest.mark.parametrize("origins", [["*"]])
async def test_a_star_allows_every_origin(http: aiohttp.ClientSession) -> None:
    for origin in (STRANGER, "null"):
        async with http.options("/v1/models", headers={"Origin": origin, **PREFLIGHT}) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "*"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type,x-stainless-lang"
    async with http.get("/v1/models", headers={"Origin": STRANGER}) as response:
        assert response.status == 401
        assert response.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.asyncio
@pytest.mark.parametrize("origins", [[]])
async def test_without_allowed_origins_nothing_changes(http: aiohttp.ClientSession) -> None:
    async with http.options("/v1/models", headers={"Origin": PAGE, **PREFLIGHT}) as response:
        assert response.status == 401
        assert cors_headers(response.headers) == {}
        assert "Vary" not in response.headers


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("*", "*"),
        ("https://app.example.org", "https://app.example.org"),
        ("HTTPS://App.Example.org:443", "https://app.example.org"),
        ("http://localhost:80", "http://localhost"),
        ("http://localhost:443", "http://localhost:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("chrome-extension://abcdefgh", "chrome-extension://abcdefgh"),
    ],
)
def test_origins_are_compared_as_browsers_write_them(written: str, normal: str) -> None:
    assert normalize_origin(written) == normal


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "example.org",
        "localhost:3000",
        "https://example.org/",
        "https://example.org/app",
        "https://example.org:70000",
        "https://example.org:",
        "https://me@example.org",
        "https://*.example.org",
        "https://bücher.example",
        "https://a.example https://b.example",
    ],
)
def test_what_is_no_origin_is_refused_with_the_form_it_must_have(origin: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is no origin: write scheme://host or scheme://host:port"):
        Cors([PAGE, origin])
