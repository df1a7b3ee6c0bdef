"""Cross-origin requests: what a browser is told, on every kind of reply, and that others notice nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

import aiohttp
import pytest
import pytest_asyncio

from chairlift.api import ServerConfig
from chairlift.api.http.access import Cors, normalize_origin
from chairlift.errors import ConfigurationError
from tests.api.conftest import in_loop, serving

PAGE = "https://app.example.org"
TINY = {"max_batch_size": 1, "max_seq_len": 64}
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


Visit = Callable[..., Awaitable[aiohttp.ClientSession]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def visit() -> AsyncIterator[Visit]:
    """Gives a client of a server with such settings, the same one for the same; strict ones turn foreign pages away."""
    sessions: dict[str, aiohttp.ClientSession] = {}
    async with AsyncExitStack() as stack:

        async def begin(is_strict: bool = False, **settings: list[str]) -> aiohttp.ClientSession:
            name = f"{is_strict} {settings}"
            if name not in sessions:
                server = await stack.enter_async_context(serving(ServerConfig.model_validate(settings), **TINY))
                server.api.cors.is_strict = is_strict
                sessions[name] = await stack.enter_async_context(aiohttp.ClientSession(server.url))
            return sessions[name]

        yield begin


@in_loop
async def http(visit: Visit, origins: list[str]) -> aiohttp.ClientSession:
    """A client of a server that asks for a key and allows those origins."""
    return await visit(api_key=["secret"], allowed_origin=origins)


def cors_headers(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("Access-Control-")}


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


async def test_a_preflight_of_a_stranger_is_a_403_in_the_usual_form(http: aiohttp.ClientSession) -> None:
    async with http.options("/v1/models", headers={"Origin": STRANGER, **PREFLIGHT}) as response:
        assert response.status == 403
        assert cors_headers(response.headers) == {}
        assert response.headers["Vary"] == "Origin"
        error = (await response.json())["error"]
    assert (
        error["message"] == f"pages of {STRANGER} may not use this server; start it with --allowed-origin to let them"
    )
    assert error["type"] == "invalid_request_error"


async def test_replies_and_errors_can_be_read_by_the_page(http: aiohttp.ClientSession) -> None:
    expected = {"Access-Control-Allow-Origin": PAGE, "Access-Control-Expose-Headers": "X-Request-Id, Retry-After"}
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


async def test_a_stream_can_be_read_by_the_page(http: aiohttp.ClientSession) -> None:
    body = {"prompt": "Once", "max_tokens": 2, "stream": True}
    async with http.post("/v1/completions", json=body, headers={"Origin": PAGE, **KEY}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["Access-Control-Allow-Origin"] == PAGE
        assert response.headers["Vary"] == "Origin"
        assert (await response.text()).endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("headers", [{"Origin": STRANGER}, {"Origin": "null"}, {}])
async def test_strangers_and_plain_clients_get_replies_without_cors_headers(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with http.get("/health", headers=headers) as response:
        assert response.status == 200
        assert cors_headers(response.headers) == {}
        assert response.headers["Vary"] == "Origin"


@pytest.mark.parametrize("headers", [{"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}])
async def test_options_that_are_no_preflight_stay_what_they_were(
    http: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with http.options("/v1/completions", headers={**headers, **KEY}) as response:
        assert response.status == 405


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
    with pytest.raises(ConfigurationError, match=r"is not an origin: write scheme://host or scheme://host:port"):
        Cors([PAGE, origin])


# --- a server without keys on this machine


@in_loop
async def private(visit: Visit) -> aiohttp.ClientSession:
    """A client of a server that asks for no key and turns foreign pages away."""
    return await visit(is_strict=True)


REQUESTS = (("GET", "/"), ("GET", "/health"), ("GET", "/v1/models"), ("GET", "/nowhere"), ("POST", "/tokenize"))


async def statuses(http: aiohttp.ClientSession, **headers: str) -> list[int]:
    """Statuses of a few requests with these headers, whose names are written with underscores."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    found = []
    for method, path in (*REQUESTS, ("OPTIONS", "/v1/completions")):
        body = {"prompt": "a"} if method == "POST" else None
        async with http.request(method, path, headers=sent, json=body) as response:
            found.append(response.status)
            if response.status == 403:
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with http.get("/watch", headers=sent) as watching:
        found.append(watching.status)
    return found


SERVED = [200, 200, 200, 404, 200, 405, 200]
REFUSED = [403] * 7


async def test_strangers_are_turned_away_everywhere_by_host_and_by_origin(
    visit: Visit, private: aiohttp.ClientSession
) -> None:
    """Which names and pages are strangers': tests/attacks."""
    own = "localhost:8000"
    assert await statuses(private, Host=own) == SERVED
    for host in ("evil.example", "a:b:c"):
        assert await statuses(private, Host=host) == REFUSED
    assert await statuses(private, Host=own, Origin=STRANGER) == REFUSED
    assert await statuses(private, Host=own, Origin=f"http://{own}") == SERVED
    assert await statuses(await visit(is_strict=True, allowed_host=["*"]), Host="evil.example") == SERVED


async def test_the_refusal_names_the_flag(visit: Visit) -> None:
    http = await visit(is_strict=True, allowed_host=["box.lan"])
    assert await statuses(http, Host="Box.LAN:8000") == SERVED
    async with http.get("/health", headers={"Host": "other.lan"}) as response:
        message = (await response.json())["error"]["message"]
    assert (
        message == "this server does not answer to the name other.lan; start it with --allowed-host to let that name in"
    )
    async with http.get("/health", headers={"Origin": STRANGER}) as response:
        message = (await response.json())["error"]["message"]
    assert message == f"pages of {STRANGER} may not use this server; start it with --allowed-origin to let them"


async def test_pages_that_are_allowed_are_served(visit: Visit) -> None:
    http = await visit(is_strict=True, allowed_origin=[PAGE])
    assert await statuses(http, Origin=PAGE) == SERVED
    assert await statuses(http, Origin=STRANGER) == REFUSED
    async with http.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT}) as response:
        assert response.status == 204


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_an_image_in_a_foreign_page_is_turned_away_and_a_link_is_not(
    private: aiohttp.ClientSession, site: str
) -> None:
    assert await statuses(private, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors") == REFUSED
    assert await statuses(private, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate") == SERVED
    assert await statuses(private, Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors") == SERVED
