"""What tests of the page share: the sizes of its batch, where things are, and how to begin."""

import pytest

from tests.support.browser import DESKTOP, Page
from tests.support.fake_site import FakeSite

Keys = pytest.importorskip("selenium.webdriver", reason="selenium is not installed").Keys

NUM_SLOTS, SLOT_LEN = 4, 2048
SPENT, SAID = "article.assistant .spent", "article.assistant > .text"


def open_live(page: Page, site: FakeSite, size: tuple[int, int] = DESKTOP, **media: str) -> None:
    page.open(site.url, size, **media)
    page.wait_for_text("#link", "live")
    page.wait_for("document.querySelectorAll('#slots li').length > 0")


def send(page: Page, text: str) -> None:
    page.type("#message", text + Keys.ENTER)
