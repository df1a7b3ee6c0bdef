"""A browser, and the page of a site without an engine in it. Without selenium the files that need it are skipped."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.fake_batch import FakeBatch
from tests.support.fake_site import FakeSite

if TYPE_CHECKING:
    from tests.support.browser import Page


@pytest.fixture(scope="session")
def browser() -> Iterator["Page"]:
    from tests.support.browser import browsing

    with browsing() as page:
        yield page


@pytest.fixture
def tab(browser: "Page") -> Iterator["Page"]:
    """Nothing that goes wrong in the browser goes unnoticed, and nothing is kept for the next test."""
    browser.complaints()
    yield browser
    assert browser.complaints() == []
    browser.forget()


@pytest.fixture
def site() -> Iterator[FakeSite]:
    from tests.page.page_support import NUM_SLOTS, SLOT_LEN

    site = FakeSite(FakeBatch(NUM_SLOTS, SLOT_LEN))
    with site.online():
        yield site


@pytest.fixture
def page(tab: "Page", site: FakeSite) -> "Page":
    """Yields a page that shows the site."""
    from tests.page.page_support import open_live

    open_live(tab, site)
    return tab
