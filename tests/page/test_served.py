"""The page of the real server: the bundled model answers, and the load test fills the slots."""

import os
from collections.abc import Iterator

import pytest

from tests.page.page_support import NUM_SLOTS, SAID, SPENT, Keys, send
from tests.support.browser import Page
from tests.support.server_process import SERVE, Process, running, start_python

pytestmark = pytest.mark.slow  # they need a browser

KEY = "a key"


# Steps that one can watch: the bundled model is too quick for that.
SLOW_SERVE = f"""
import time
from chairlift.engine.core import EngineCore
step = EngineCore.step
EngineCore.step = lambda self: (time.sleep(0.02), step(self))[1]
{SERVE}
"""


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """The bundled model behind the real server."""
    flags = ("--max-batch-size", str(NUM_SLOTS), "--max-seq-len", "2048", "--api-key", KEY)
    with running(SLOW_SERVE, *flags) as process:
        yield process


def open_served(page: Page, process: Process) -> None:
    """With the key that the session was told before."""
    page.open(f"{process.url}/version")
    page.run("sessionStorage.setItem('chairlift-key', arguments[0])", KEY)
    page.open(process.url)
    page.wait_for_text("#link", "live")


def test_a_message_is_answered_by_the_model_and_stop_releases_the_slot(tab: Page, process: Process) -> None:
    open_served(tab, process)
    tab.wait_for_text("#model", "bundled")
    send(tab, "Tell me a story about a chairlift.")
    tab.wait_for_text(SPENT, "about")  # it streams
    tab.wait_for("document.querySelector('#slots li.own[data-state=decoding]') !== null")
    tab.click("#stop")
    tab.wait_for_text(SPENT, "stopped by you")
    tab.wait_for("document.querySelectorAll('[data-state=prefilling], [data-state=decoding]').length === 0")
    assert tab.text("#num-running") == "0"
    tab.click("#new-chat")
    tab.click("#openers li:nth-child(3) button")
    tab.wait_for_text(SPENT, "first after")
    assert tab.text("article.user .text") == "What is 17 + 25?"
    assert tab.text(SAID) == "17 + 25 = 42."


def test_requests_of_the_load_test_fill_slots_wait_and_leave(tab: Page, process: Process) -> None:
    open_served(tab, process)
    tab.wait_for_text("#batch-summary", "done")
    num_done = int(tab.text("#batch-summary").split()[0])
    load = ["--num-requests", "8", "--concurrency", "8", "--prompt-tokens", "300", "--output-tokens", "60"]
    arguments = ["bench", "--url", process.url, "--api-key", KEY, "--warmup", "0", *load]
    with open(os.devnull, "w") as nowhere:
        bench = start_python(SERVE, arguments, os.environ, nowhere.fileno())
    full = "document.querySelectorAll('#slots li[data-state=decoding]').length === 4"
    tab.wait_for(f"{full} && document.querySelectorAll('#queue li').length === 4")
    assert tab.text("#num-waiting") == "4"
    assert tab.text("#queue li:first-child").startswith("300 · ")
    assert bench.wait(60.0) == 0
    tab.wait_for_text("#batch-summary", f"{num_done + 8} requests done")
    assert tab.text("#num-running") == tab.text("#num-waiting") == "0"
    assert tab.count("#queue li") == 0


def test_a_server_with_a_key_asks_for_it(tab: Page, process: Process) -> None:
    tab.open(f"{process.url}/version")
    tab.run("sessionStorage.clear()")
    tab.open(process.url)
    tab.wait_for("document.getElementById('key-dialog').open")
    tab.type("#key", "another" + Keys.ENTER)
    tab.wait_for_text("#key-dialog", "That key is not one of this server's.")
    tab.type("#key", KEY + Keys.ENTER)
    tab.wait_for_text("#link", "live")
    tab.wait_for_text("#model", "bundled")
    assert tab.run("[sessionStorage.getItem('chairlift-key'), localStorage.length]") == [KEY, 0]
    tab.click("#openers li:nth-child(3) button")
    tab.wait_for_text(SAID, "17 + 25 = 42.")
