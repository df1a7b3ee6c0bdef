"""Tests what everybody can see and use of the page: colours, sizes, the keyboard, narrow screens, less motion."""

import itertools

import pytest

from tests.page.page_support import SAID, SLOT_LEN, Keys, ask, open_live, send
from tests.support.browser import DESKTOP, PHONE, Page
from tests.support.fake_batch import FakeBatch
from tests.support.fake_site import FakeSite

pytestmark = pytest.mark.slow  # they need a browser


def test_everything_that_can_be_used_is_reached_by_tab_and_has_a_name(page: Page) -> None:
    seen: list[int] = []
    reached: set[str] = set()
    active = "document.activeElement"
    while (index := page.run(f"[...document.querySelectorAll('*')].indexOf({active})")) not in seen:
        seen.append(index)
        page.press(Keys.TAB)
        assert page.run(f"{active}.ariaLabel || {active}.innerText || {active}.labels?.length"), page.run(
            f"{active}.outerHTML"
        )
        reached.add(page.run(f"{active}.id || {active}.localName"))
    assert reached >= {"a", "theme", "log", "button", "summary", "message", "send", "li"}


@pytest.mark.parametrize(("system", "other"), [("light", "dark"), ("dark", "light")])
def test_colours_are_the_systems_until_the_button_says_otherwise_and_have_contrast(
    tab: Page, site: FakeSite, system: str, other: str
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    papers = {"light": "rgb(251, 252, 252)", "dark": "rgb(17, 23, 28)"}
    open_live(tab, site, prefers_color_scheme=system)
    assert tab.run(paper) == papers[system]
    texts = itertools.product(("--ink", "--muted", "--accent", "--bad"), ("--paper", "--raised", "--sunken"))
    code = itertools.product(("--keyword", "--string", "--literal", "--title"), ("--sunken",))
    shapes = ("--edge", "--reused", "--prefilled", "--generated", "--good", "--accent")
    faint = [pair for pair in [*texts, *code, ("--on-accent", "--accent")] if tab.contrast(*pair) < 4.5]
    assert faint + [(shape, "--paper") for shape in shapes if tab.contrast(shape, "--paper") < 3.0] == []
    assert tab.contrast("--paper", "--paper") == 1.0
    tab.click("#theme")
    assert tab.run("document.getElementById('theme').ariaPressed") == str(other == "dark").lower()
    assert tab.run(paper) == papers[other]
    open_live(tab, site, prefers_color_scheme=system)
    assert tab.run(paper) == papers[other]


def test_nothing_moves_for_who_wants_less_motion(tab: Page, site: FakeSite) -> None:
    site.is_held = True
    open_live(tab, site, prefers_reduced_motion="reduce")
    send(tab, "Hi!")
    tab.wait_for_text(SAID, "Hello there.")
    moving = """[...document.querySelectorAll("*")].flatMap((each) => [null, "::after"].map((pseudo) =>
        getComputedStyle(each, pseudo))).filter((style) => style.animationName !== "none"
        || style.transitionDuration !== "0s").length"""
    assert tab.run(moving) == 0
    tab.click("#stop")


def test_a_phone_shows_one_half_at_a_time(tab: Page, site: FakeSite) -> None:
    open_live(tab, site, PHONE)
    assert (tab.is_visible("#message"), tab.is_visible("#slots")) == (True, False)
    tab.wait_for_text(".views", "Batch 0/4")
    tab.click("[data-shows=batch]")
    assert (tab.is_visible("#message"), tab.is_visible("#slots")) == (False, True)
    assert tab.run("document.querySelector('[data-shows=batch]').ariaPressed") == "true"
    tab.click("[data-shows=chat]")
    tab.type("#message", "Hi!")
    tab.click("#send")
    tab.wait_for_text(SAID, "Hello there.")


# Texts below twelve pixels, and what is used with less than 24 pixels (WCAG 2.2), links in sentences apart.
SMALL = """[...document.querySelectorAll("body *")].filter((each) => each.checkVisibility()).flatMap((each) => {
  const hasText = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim() !== "");
  const isTarget = each.matches("button, input, textarea, summary, [tabindex], a:not(.text a)");
  return [
    ...(hasText && parseFloat(getComputedStyle(each).fontSize) < 12 ? [`text: ${each.outerHTML}`] : []),
    ...(isTarget && Math.min(each.offsetWidth, each.offsetHeight) < 24 ? [`target: ${each.outerHTML}`] : []),
  ];
})"""


@pytest.mark.parametrize(("num_slots", "size"), [(12, PHONE), (48, DESKTOP), (256, PHONE)])
def test_no_text_is_small_and_nothing_is_hard_to_hit(tab: Page, num_slots: int, size: tuple[int, int]) -> None:
    site = FakeSite(
        FakeBatch(num_slots, SLOT_LEN), thoughts=["Hm."], pieces=["# a\n`b`\n```c\nd\n```\n[e](https://e.com)"]
    )
    site.batch.crowd(num_slots + 4)
    site.calls = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    with site.online():
        open_live(tab, site, size)
        ask(tab, "Hi!")
        tab.click("article.user .actions button")
        tab.click("#settings summary")
        tab.click("#chats-button")
        assert tab.run(SMALL) == []
        if size == PHONE:
            tab.run("document.getElementById('chats').hidePopover()")
            tab.click("[data-shows=batch]")
            assert tab.run(SMALL) == []
