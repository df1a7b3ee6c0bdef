"""/ and /docs: pages that need nothing from anywhere else and let the browser run nothing else."""

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
from aiohttp import web

from chairlift.api import pages
from chairlift.api.errors import error_middleware
from chairlift.api.pages import PAGE_PATHS, SnapshotFeed, add_page_routes, fields_of
from chairlift.api.routes import ROUTES
from tests.api.conftest import Server, in_loop, serving_app
from tests.support.fake_batch import FakeBatch

FOLDER = Path(pages.__file__).parent / "page_files"

KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": ("text/javascript", "application/javascript"),  # Python's table was changed in 3.12
    ".svg": "image/svg+xml",
}


_VOID = {"meta", "link", "img", "br", "hr", "input"}


class Page(HTMLParser):
    """The page's text, its tags and attributes; every tag must be closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.text = ""
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: set[str] = set()
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

    def of(self, name: str) -> list[str]:
        """The values of that attribute."""
        return [value or "" for _, each, value in self.attributes if each == name]


@in_loop
async def url() -> AsyncIterator[str]:
    app = web.Application(middlewares=[error_middleware])
    add_page_routes(app, SnapshotFeed(FakeBatch(num_slots=1, slot_len=64)))
    async with serving_app(app) as url:
        yield url


async def test_every_file_is_served_as_what_it_is(url: str, http: aiohttp.ClientSession) -> None:
    assert {"/", "/page/style.css", "/page/page.js", "/page/icon.svg"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        async with http.get(url + path) as response:
            file = FOLDER / (path.rpartition("/")[2] or "index.html")
            assert response.status == 200
            assert response.content_type in KINDS[file.suffix]
            assert await response.read() == file.read_bytes()


async def test_nothing_else_is_served(url: str, http: aiohttp.ClientSession) -> None:
    for path in (
        "/page",
        "/page/",
        "/page/index.html",
        "/page/nothing.js",
        "/page/..%252fhome.py",
        "/page/%2e%2e/home.py",
    ):
        async with http.get(url + path) as response:
            assert response.status == 404


async def test_a_browser_may_load_from_here_only_and_run_nothing_inline(url: str, http: aiohttp.ClientSession) -> None:
    for path in PAGE_PATHS:
        async with http.get(url + path) as response:
            header = response.headers["Content-Security-Policy"]
            policy = dict(part.strip().partition(" ")[::2] for part in header.split(";"))
            assert policy.pop("default-src") == policy.pop("base-uri") == policy.pop("form-action") == "'none'"
            assert policy.pop("frame-ancestors") == "'none'"
            assert policy.pop("require-trusted-types-for") == "'script'"
            assert policy == dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'")
            assert response.headers["X-Content-Type-Options"] == "nosniff"
            assert response.headers["Referrer-Policy"] == "no-referrer"


async def test_a_browser_that_has_a_file_is_told_so(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(url) as response:
        assert response.headers["Cache-Control"] == "no-cache"
        tag = response.headers["ETag"]
    async with http.get(url, headers={"If-None-Match": tag}) as response:
        assert response.status == 304


def test_what_the_files_refer_to_is_there_and_relative() -> None:
    markup = Page((FOLDER / "index.html").read_text(encoding="utf-8"))
    loaded = {value for value in markup.of("src") + markup.of("href") if value != "docs"}
    scripts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.js")}
    imported = {name for text in scripts.values() for name in re.findall(r'(?:from|import) "\./([\w.]+)"', text)}
    assert {f"/{value}" for value in loaded} | {f"/page/{name}" for name in imported} == PAGE_PATHS - {"/"}
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert re.search(r"https?:|//\w+\.|url\(|@import", text) is None, path.name


def test_no_script_or_style_stands_in_the_page() -> None:
    markup = Page((FOLDER / "index.html").read_text(encoding="utf-8"))
    names = {name for _, name, _ in markup.attributes}
    assert [name for name in names if name == "style" or name.startswith("on")] == []
    assert "style" not in markup.tags
    source = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script[^>]*>(.*?)</script>", source) == [""]


def test_no_script_reads_text_as_markup() -> None:
    for path in FOLDER.glob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert re.search(r"[iou]\w+HTML|document\.write|eval\(|new Function", text) is None, path.name


def test_every_element_that_a_script_asks_for_is_in_the_page() -> None:
    markup = Page((FOLDER / "index.html").read_text(encoding="utf-8"))
    there = set(markup.of("id"))
    for path in FOLDER.glob("*.js"):
        asked = re.findall(r'(?:\bat|\bsay|getElementById)\("([\w-]+)"', path.read_text(encoding="utf-8"))
        assert set(asked) <= there, path.name
    assert len(markup.of("id")) == len(there)
    assert {name for value in markup.of("aria-labelledby") for name in value.split()} <= there


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


async def test_the_page_loads_and_runs_nothing_and_tells_the_browser_so(
    server: Server, http: aiohttp.ClientSession
) -> None:
    page, response = await fetch(http, server)
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    assert [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset")] == []
    targets = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert all(target is not None and re.match(r"^(openapi\.json|#[\w.-]*)$", target) for target in targets)
    assert re.search(r"@import|url\(|https?:", page.text) is None
    assert response.content_type == "text/html"
    assert response.charset == "utf-8"
    policy = dict(part.strip().partition(" ")[::2] for part in response.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert set(policy) <= {"default-src", "style-src", "frame-ancestors", "base-uri", "form-action"}
    assert response.headers["X-Content-Type-Options"] == "nosniff"
