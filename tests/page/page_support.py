"""Holds what tests of the page share: the sizes of its batch, where things are, and how to begin."""

import pytest

from tests.support.browser import DESKTOP, Page
from tests.support.fake_site import FakeSite

Keys = pytest.importorskip("selenium.webdriver", reason="selenium is not installed").Keys

NUM_SLOTS, SLOT_LEN = 4, 4096
SPENT, SAID = "article.assistant .spent", "article.assistant > .text"
LAST_SPENT, LAST_SAID = "article:last-child .spent", "article:last-child > .text"


def open_live(page: Page, site: FakeSite, size: tuple[int, int] = DESKTOP, **media: str) -> None:
    page.open(site.url, size, **media)
    page.wait_for_text("#link", "live")
    page.wait_for("document.querySelectorAll('#slots li').length > 0")


def send(page: Page, text: str) -> None:
    page.type("#message", text + Keys.ENTER)


def ask(page: Page, text: str) -> None:
    """Sends a message, and waits for the end of the answer."""
    send(page, text)
    wait_for_answer(page)


def wait_for_answer(page: Page) -> None:
    page.wait_for_text(LAST_SPENT, "5 tokens")
    page.wait_for("document.getElementById('stop').hidden")


def press(page: Page, label: str) -> None:
    """Presses the last button in the log that has this label."""
    page.click_last("#log button", label)
