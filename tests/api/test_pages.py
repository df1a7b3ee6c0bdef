"""/ and /docs: pages that need nothing from anywhere else and let the browser run nothing else."""

import gzip
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import aiohttp
from aiohttp import web

from chairlift.api import pages
from chairlift.api.app import ROUTES
from chairlift.api.description import fields_of
from chairlift.api.errors import error_middleware
from chairlift.api.pages import PAGE_PATHS, SnapshotFeed, add_page_routes
from tests.api.conftest import Server, in_loop, serving_app
from tests.support.fake_batch import FakeBatch

FOLDER = Path(pages.__file__).parent / "page_files"

SCRIPT = "text/javascript", "application/javascript"  # Python's table was changed in 3.12
KINDS = {".html": "text/html", ".css": "text/css", ".js": SCRIPT, ".svg": "image/svg+xml", ".txt": "text/plain"}
OWN = [path for path in sorted(FOLDER.iterdir()) if path.is_file()]
MAX_BYTES = 300_000  # of all files, compressed: what a phone has to load
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


def policy_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    return dict(part.strip().partition(" ")[::2] for part in response.headers["Content-Security-Policy"].split(";"))


async def test_every_file_is_served_as_what_it_is_and_may_load_from_here_only(
    url: str, http: aiohttp.ClientSession
) -> None:
    nothing = dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    own = dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'")
    no_markup = {"require-trusted-types-for": "'script'", "trusted-types": "'none'"}
    assert {"/", "/page/style.css", "/page/page.js", "/page/icon.svg"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        async with http.get(url + path) as response:
            file = FOLDER / (path.removeprefix("/page/").removeprefix("/") or "index.html")
            assert response.status == 200
            assert response.content_type in KINDS[file.suffix]
            assert await response.read() == file.read_bytes()
            assert policy_of(response) == {**nothing, **own, **no_markup}
            assert response.headers["Referrer-Policy"] == "no-referrer"


async def test_nothing_else_is_served(url: str, http: aiohttp.ClientSession) -> None:
    for path in ("", "/", "/index.html", "/nothing.js", "/..%252fhome.py", "/%2e%2e/home.py"):
        async with http.get(f"{url}/page{path}") as response:
            assert response.status == 404


async def test_a_browser_that_has_a_file_is_told_so(url: str, http: aiohttp.ClientSession) -> None:
    async with http.get(url) as response:
        assert response.headers["Cache-Control"] == "no-cache"
        tag = response.headers["ETag"]
    async with http.get(url, headers={"If-None-Match": tag}) as response:
        assert response.status == 304


def test_what_the_files_refer_to_is_there_and_relative() -> None:
    markup = Page((FOLDER / "index.html").read_text(encoding="utf-8"))
    loaded = {value for value in markup.of("src") + markup.of("href") if value != "docs"}
    texts = {path.name: path.read_text(encoding="utf-8") for path in OWN}
    scripts = [text for name, text in texts.items() if name.endswith(".js")]
    imported = {name for text in scripts for name in re.findall(r'(?:from|import) "\./([\w./-]+)"', text)}
    licenses = "/page/vendor/LICENSES.txt"
    assert {f"/{value}" for value in loaded} | {f"/page/{name}" for name in imported} == PAGE_PATHS - {"/", licenses}
    for name, text in texts.items():
        of_svg = text.replace("http://www.w3.org/2000/svg", "")
        assert re.search(r"https?://\w|[\"' ]//\w+\.|url\(|@import", of_svg) is None, name


def test_libraries_are_the_files_that_the_tool_takes_from_their_packages() -> None:
    tool = Path(__file__).parents[2] / "tools" / "vendor_page_libraries.py"
    checked = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_page_is_small() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < MAX_BYTES


def test_no_script_or_style_stands_in_the_page_and_no_script_reads_text_as_markup() -> None:
    source = (FOLDER / "index.html").read_text(encoding="utf-8")
    markup = Page(source)
    assert [name for _, name, _ in markup.attributes if name == "style" or name.startswith("on")] == []
    assert "style" not in markup.tags
    assert re.findall(r"<script[^>]*>(.*?)</script>", source) == [""]
    for path in FOLDER.glob("*.js"):  # those of others get nothing from the browser that would let them
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


async def test_every_endpoint_and_every_field_is_on_the_page_which_loads_and_runs_nothing(
    server: Server, http: aiohttp.ClientSession
) -> None:
    async with http.get(f"{server.url}/docs") as response:
        assert (response.status, response.content_type, response.charset) == (200, "text/html", "utf-8")
        page, policy = Page(await response.text()), policy_of(response)
    shown = set(page.text.split("\n"))
    for route in ROUTES:
        assert f"{route.method} {route.path}" in shown
        for row in fields_of(route.body) if route.body is not None else []:
            assert row.name in shown
            assert not row.description or any(row.description in line for line in shown), row.name
    assert page.tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base"})
    assert [name for _, name, _ in page.attributes if name.startswith("on") or name in ("src", "srcset")] == []
    targets = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    assert all(target is not None and re.match(r"^(openapi\.json|#[\w.-]*)$", target) for target in targets)
    assert re.search(r"@import|url\(|https?:", page.text) is None
    assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
    assert set(policy) <= {"default-src", "style-src", "frame-ancestors", "base-uri", "form-action"}
