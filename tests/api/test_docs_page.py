"""/docs: one page that needs nothing else, and tells of every endpoint and every field."""

import re
from html.parser import HTMLParser

import aiohttp

from chairlift.api.pages import fields_of
from chairlift.api.routes import ROUTES
from tests.api.conftest import Server

_VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The page's text, its tags and attributes; every tag must be closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


async def fetch(http: aiohttp.ClientSession, server: Server) -> tuple[Page, aiohttp.ClientResponse]:
    async with http.get(f"{server.url}/docs") as response:
        assert response.status == 200
        return Page(await response.text()), response


async def test_every_endpoint_and_every_field_is_on_the_page(server: Server, http: aiohttp.ClientSession) -> None:
    page, _ = await fetch(http, server)
    shown = set(page.text.split("\n"))
    for route in ROUTES:
        assert f"{route.method} {route.path}" in shown
        for row in fields_of(route.body) if route.body is not None else []:
            assert row.name in shown
            assert not row.description or any(row.description in line for line in shown), row.name


async def test_the_page_needs_nothing_else_and_runs_nothing(server: Server, http: aiohttp.ClientSession) -> None:
    page, response = await fetch(http, server)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    assert [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset")] == []
    targets = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert all(target is not None and re.match(r"^(openapi\.json|#[\w.-]*)$", target) for target in targets)
    assert re.search(r"@import|url\(|https?:", page.text) is None
    assert response.content_type == "text/html"
    assert response.charset == "utf-8"


async def test_the_browser_is_told_to_load_and_run_nothing(server: Server, http: aiohttp.ClientSession) -> None:
    _, response = await fetch(http, server)
    policy = dict(part.strip().partition(" ")[::2] for part in response.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert set(policy) <= {"default-src", "style-src", "frame-ancestors", "base-uri", "form-action"}
    assert response.headers["X-Content-Type-Options"] == "nosniff"
