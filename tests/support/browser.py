"""A real browser, and the page's site without an engine."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from aiohttp import web

from chairlift.api.errors import error_middleware
from chairlift.api.pages import SnapshotFeed, add_page_routes
from tests.support.fake_batch import FakeBatch

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
DEADLINE_S = 20.0
DESKTOP, PHONE = (1440, 900), (390, 844)

# The contrast of two custom properties, as WCAG 2 defines it. A canvas brings whatever notation a colour has to bytes.
_CONTRAST = """(([a, b]) => {
  const probe = document.body.appendChild(document.createElement("i"));
  const context = document.createElement("canvas").getContext("2d");
  const luminance = (name) => {
    probe.style.color = `var(${name})`;
    context.fillStyle = getComputedStyle(probe).color;
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue] = [...context.getImageData(0, 0, 1, 1).data].map((byte) => byte / 255)
      .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
  probe.remove();
  return (light + 0.05) / (dark + 0.05);
})(arguments)"""


class Page:
    """One tab, and what a person would do in it."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def open(self, url: str, size: tuple[int, int] = DESKTOP, **media: str) -> None:
        """Loads an address. `media`: features that the system has, such as `prefers_color_scheme="dark"`."""
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        self._driver.get(url)

    def run(self, script: str, *args: Any) -> Any:
        """The value of an expression in JavaScript; `arguments` holds the others."""
        return self._driver.execute_script(f"return {script}", *args)

    def text(self, selector: str) -> str:
        return str(self.run("document.querySelector(arguments[0]).innerText", selector))

    def count(self, selector: str) -> int:
        return int(self.run("document.querySelectorAll(arguments[0]).length", selector))

    def is_visible(self, selector: str) -> bool:
        return bool(self.run("document.querySelector(arguments[0]).checkVisibility()", selector))

    def contrast(self, one: str, other: str) -> float:
        """The contrast ratio of two colours, which are named by their custom properties: 1 to 21."""
        return float(self.run(_CONTRAST, one, other))

    def picture(self, path: Path) -> None:
        """Writes what is seen as a PNG file."""
        self._driver.save_screenshot(str(path))

    def click(self, selector: str) -> None:
        self._driver.find_element("css selector", selector).click()

    def type(self, selector: str, text: str) -> None:
        """The keys of `selenium.webdriver.Keys` are characters as well."""
        self._driver.find_element("css selector", selector).send_keys(text)

    def press(self, key: str) -> None:
        """On whatever has the focus."""
        self._driver.switch_to.active_element.send_keys(key)

    def wait_for(self, script: str, *args: Any) -> None:
        """Until the expression is true. Asks often, since what is awaited may not last."""
        deadline = time.monotonic() + DEADLINE_S
        while not self.run(script, *args):
            assert time.monotonic() < deadline, f"not so: {script}; the page: {self.run('document.body.innerText')}"

    def wait_for_text(self, selector: str, text: str) -> None:
        """Until the element's text holds this."""
        self.wait_for("document.querySelector(arguments[0])?.innerText.includes(arguments[1])", selector, text)

    def complaints(self) -> list[str]:
        """Errors of scripts and refusals by the page's policy since the last call. What servers answer is no error."""
        entries = self._driver.get_log("browser")
        return [str(entry["message"]) for entry in entries if entry["source"] != "network"]


@contextmanager
def browsing() -> Iterator[Page]:
    """A fresh browser; skips the test where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("there is no chromium with chromedriver here (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Chromium's own sandbox refuses to run as root, which containers are.
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield Page(browser)
    finally:
        browser.quit()


T = TypeVar("T")


@dataclass
class FakeSite:
    """Lives in a thread of its own while it is `online`."""

    batch: FakeBatch
    pieces: list[str] = field(default_factory=lambda: ["Hello", " there."])
    thoughts: list[str] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    is_held: bool = False  # answers do not end
    error: str | None = None
    was_left: threading.Event = field(default_factory=threading.Event)
    port: int = 0
    _loop: asyncio.AbstractEventLoop = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def do(self, call: Callable[[], T]) -> T:
        """On the thread that the batch is looked at from."""

        async def run() -> T:
            return call()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    @contextmanager
    def online(self) -> Iterator[None]:
        """Served on the same port each time."""
        started, over = threading.Event(), asyncio.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            runner = web.AppRunner(self._app(), handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True).start()
            self.port = runner.addresses[0][1]
            started.set()
            await over.wait()
            await runner.cleanup()

        thread = threading.Thread(target=asyncio.run, args=[serve()])
        thread.start()
        assert started.wait(10.0), "the site did not start"
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(over.set)
            thread.join()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[error_middleware])
        add_page_routes(app, SnapshotFeed(self.batch, interval_s=0.02))
        app.router.add_get("/v1/models", _models)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        if self.error is not None:
            raise web.HTTPBadRequest(text=self.error)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        thoughts = ({"reasoning_content": thought} for thought in self.thoughts)
        for delta in (*thoughts, *({"content": piece} for piece in self.pieces)):
            await response.write(_chunk([{"index": 0, "delta": delta, "finish_reason": None}]))
        try:
            if self.is_held:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
        await response.write(_chunk([{"index": 0, "delta": {}, "finish_reason": "stop"}]))
        await response.write(_chunk([], usage=usage) + b"data: [DONE]\n\n")
        return response


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake-model"}]})


def _chunk(choices: list[Any], **others: Any) -> bytes:
    return f"data: {json.dumps({'id': '123456789-0', 'choices': choices, **others})}\n\n".encode()
