"""Cross-origin requests: what a browser is told, on every kind of reply, and that others notice nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from chairlift.api import ServerConfig
from chairlift.api.http.access import Cors, normalize_origin
from chairlift.errors import ConfigurationError
from tests.api.conftest import serving

PAGE, STRANGER = "https://app.example.org", "https://evil.example.org"
TINY: dict[str, Any] = {"max_batch_size": 1, "max_seq_len": 64}
KEY = {"Authorization": "Bearer secret"}
ASKED = "authorization,content-type,x-stainless-lang"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": ASKED}
READABLE = {"Access-Control-Allow-Origin": PAGE, "Access-Control-Expose-Headers": "X-Request-Id, Retry-After"}
NOT_ADMITTED = f"pages of {STRANGER} may not use this server; start it with --allowed-origin to let them"


ORIGINS = ["http://localhost:3000", PAGE]
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


async def asked(
    http: aiohttp.ClientSession, method: str, path: str, headers: Mapping[str, str]
) -> tuple[int, str | None, dict[str, str]]:
    """Status, `Vary` and the headers that are about origins."""
    async with http.request(method, path, headers=headers) as response:
        about = {name: value for name, value in response.headers.items() if name.startswith("Access-Control-")}
        return response.status, response.headers.get("Vary"), about


async def test_a_preflight_needs_no_key_and_says_what_is_allowed(visit: Visit) -> None:
    http = await visit(api_key=["secret"], allowed_origin=ORIGINS)
    paths = {**dict.fromkeys(("/v1/models", "/v1/models/bundled", "/health", "/nowhere"), "GET"), "/tokenize": "POST"}
    for path, methods in {"/v1/completions": "POST", **paths}.items():
        for origin in ORIGINS:
            status, vary, about = await asked(http, "OPTIONS", path, {"Origin": origin, **PREFLIGHT})
            assert (status, vary) == (204, "Origin")
            assert methods in about.pop("Access-Control-Allow-Methods").split(", ")
            allowed = {"Access-Control-Allow-Headers": ASKED, "Access-Control-Max-Age": "3600"}
            assert about == {**READABLE, **allowed, "Access-Control-Allow-Origin": origin}
    async with http.options("/v1/models", headers={"Origin": STRANGER, **PREFLIGHT}) as response:
        error = (await response.json())["error"]
    assert (error["message"], error["type"]) == (NOT_ADMITTED, "invalid_request_error")
    assert await asked(http, "OPTIONS", "/v1/models", {"Origin": STRANGER, **PREFLIGHT}) == (403, "Origin", {})
    for headers in ({"Origin": PAGE}, {"Access-Control-Request-Method": "POST"}):  # no preflight
        assert (await asked(http, "OPTIONS", "/v1/completions", {**headers, **KEY}))[0] == 405


async def test_replies_errors_and_streams_can_be_read_by_allowed_pages_only(visit: Visit) -> None:
    http = await visit(api_key=["secret"], allowed_origin=ORIGINS)
    paths = {"/v1/models": 200, "/v1/models/other": 404, "/nowhere": 404, "/v1/completions": 405}
    for path, status in paths.items():
        assert await asked(http, "GET", path, {"Origin": PAGE, **KEY}) == (status, "Origin", READABLE)
    assert await asked(http, "GET", "/v1/models", {"Origin": PAGE}) == (401, "Origin", READABLE)
    body = {"prompt": "Once", "max_tokens": 2, "stream": True}
    async with http.post("/v1/completions", json=body, headers={"Origin": PAGE, **KEY}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert {name: response.headers[name] for name in (*READABLE, "Vary")} == {**READABLE, "Vary": "Origin"}
        assert (await response.text()).endswith("data: [DONE]\n\n")
    plain: list[dict[str, str]] = [{"Origin": STRANGER}, {"Origin": "null"}, {}]
    assert [await asked(http, "GET", "/health", headers) for headers in plain] == [(200, "Origin", {})] * 3


async def test_a_star_allows_every_origin(visit: Visit) -> None:
    http = await visit(api_key=["secret"], allowed_origin=["*"])
    for origin in (STRANGER, "null"):
        status, _, about = await asked(http, "OPTIONS", "/v1/models", {"Origin": origin, **PREFLIGHT})
        assert (status, about["Access-Control-Allow-Origin"]) == (204, "*")
        assert about["Access-Control-Allow-Headers"] == ASKED
    status, _, about = await asked(http, "GET", "/v1/models", {"Origin": STRANGER})
    assert (status, about["Access-Control-Allow-Origin"]) == (401, "*")


async def test_without_allowed_origins_nothing_changes(visit: Visit) -> None:
    http = await visit(api_key=["secret"], allowed_origin=[])
    assert await asked(http, "OPTIONS", "/v1/models", {"Origin": PAGE, **PREFLIGHT}) == (401, None, {})


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
        *("", "null", "example.org", "localhost:3000", "https://example.org/", "https://example.org/app"),
        *("https://example.org:70000", "https://example.org:", "https://me@example.org", "https://*.example.org"),
        *("https://bücher.example", "https://a.example https://b.example"),
    ],
)
def test_what_is_no_origin_is_refused_with_the_form_it_must_have(origin: str) -> None:
    with pytest.raises(ConfigurationError, match=r"is not an origin: write scheme://host or scheme://host:port"):
        Cors([PAGE, origin])


async def statuses(http: aiohttp.ClientSession, **headers: str) -> list[int]:
    """Statuses of a few requests with these headers, whose names are written with underscores."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    found = []
    asked = [("GET", path) for path in ("/", "/health", "/v1/models", "/nowhere", "/watch")]
    for method, path in (*asked, ("POST", "/tokenize"), ("OPTIONS", "/v1/completions")):
        body = {"prompt": "a"} if method == "POST" else None
        async with http.request(method, path, headers=sent, json=body) as response:
            found.append(response.status)
            if response.status == 403:
                assert (await response.json())["error"]["type"] == "invalid_request_error"
    return found


SERVED = [200, 200, 200, 404, 200, 200, 405]
REFUSED = [403] * 7


async def test_strangers_are_turned_away_by_host_and_by_origin_and_told_the_flag(visit: Visit) -> None:
    """Leaves to tests/attacks which names and pages are strangers'."""
    private = await visit(is_strict=True)
    own = "localhost:8000"
    assert await statuses(private, Host=own) == SERVED
    for host in ("evil.example", "a:b:c"):
        assert await statuses(private, Host=host) == REFUSED
    assert await statuses(private, Host=own, Origin=STRANGER) == REFUSED
    assert await statuses(private, Host=own, Origin=f"http://{own}") == SERVED
    unknown = "this server does not answer to the name other.lan; start it with --allowed-host to let that name in"
    for headers, message in (({"Host": "other.lan"}, unknown), ({"Origin": STRANGER}, NOT_ADMITTED)):
        async with private.get("/health", headers=headers) as response:
            assert (await response.json())["error"]["message"] == message


async def test_names_and_pages_that_are_allowed_are_served(visit: Visit) -> None:
    assert await statuses(await visit(is_strict=True, allowed_host=["*"]), Host="evil.example") == SERVED
    assert await statuses(await visit(is_strict=True, allowed_host=["box.lan"]), Host="Box.LAN:8000") == SERVED
    http = await visit(is_strict=True, allowed_origin=[PAGE])
    assert await statuses(http, Origin=PAGE) == SERVED
    assert await statuses(http, Origin=STRANGER) == REFUSED
    async with http.options("/v1/completions", headers={"Origin": PAGE, **PREFLIGHT}) as response:
        assert response.status == 204


async def test_an_image_in_a_foreign_page_is_turned_away_and_a_link_is_not(visit: Visit) -> None:
    private = await visit(is_strict=True)
    for site in ("cross-site", "same-site"):
        assert await statuses(private, Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors") == REFUSED
        assert await statuses(private, Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate") == SERVED
    assert await statuses(private, Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors") == SERVED
