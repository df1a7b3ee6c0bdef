"""Chats that the browser keeps: they are listed, opened, renamed and deleted, and are no more than fit."""

import pytest

from tests.page.page_support import LAST_SAID, SAID, Keys, ask, open_live, press, wait_for_answer
from tests.support.browser import Page
from tests.support.fake_site import FakeSite

pytestmark = pytest.mark.slow  # they need a browser

TITLES = "[...document.querySelectorAll('#chat-list .title')].map((each) => each.textContent)"


def open_list(page: Page) -> None:
    page.click("#chats-button")
    page.wait_for("document.querySelector('#chats').matches(':popover-open')")


def test_chats_are_listed_opened_renamed_and_deleted(page: Page, site: FakeSite) -> None:
    ask(page, "One")
    page.click("#new-chat")
    assert page.count("article") == 0
    site.pieces = ["It is *two*."]
    ask(page, "Two")
    open_list(page)
    page.wait_for(f"{TITLES}.join() === 'Two,One'")
    assert page.text("[aria-current]") == "Two"

    page.click("#chat-list li:last-child .title")
    page.wait_for_text("article.user .text", "One")
    assert page.text(SAID) == "Hello there."
    ask(page, "Three")
    assert [message["content"] for message in site.requests[2]["messages"]] == ["One", "Hello there.", "Three"]

    open_list(page)
    page.wait_for(f"{TITLES}.join() === 'One,Two'")
    page.click("[aria-label='Rename One']")
    page.type("#chat-list input", "Uno" + Keys.ENTER)
    page.wait_for(f"{TITLES}.join() === 'Uno,Two'")
    page.click("[aria-label='Delete Two']")
    page.press(Keys.TAB)  # another thought
    page.click("[aria-label='Delete Uno']")
    page.press(Keys.ENTER)
    page.wait_for(f"{TITLES}.join() === 'Two'")
    assert page.count("article") == 0  # it was the open one
    page.click("#delete-all")
    page.click("#delete-all")
    page.wait_for("localStorage.length === 0")
    assert page.is_visible("#no-chats")


def test_a_reload_brings_the_chat_and_its_settings_back_and_it_goes_on(page: Page, site: FakeSite) -> None:
    page.click("#settings summary")
    page.type("#system", "Be brief.")
    site.thoughts, site.pieces = ["Hm."], ["A **bold** answer."]
    ask(page, "Hi!")
    open_live(page, site)
    assert page.text(LAST_SAID) == "A bold answer."
    assert page.text(".thoughts summary").startswith("Thought for ")
    assert page.text("#settings-brief") == "system message"
    press(page, "Regenerate")
    wait_for_answer(page)
    assert site.requests[1] == site.requests[0]


def test_the_oldest_chats_make_room_and_one_that_is_too_long_is_not_kept(page: Page) -> None:
    keep = """import("/page/conversations.js").then((store) => {
      const [sizes, title] = arguments;
      const turns = (size) => [{ role: "user", content: "x".repeat(size) }];
      const keep = (size, index) => store.keepConversation(
        { id: `${index}`, title: `${title}${index}`, changed: index, turns: turns(size) });
      return [sizes.map(keep), store.listConversations().map((each) => each.title)];
    })"""
    kept, titles = page.run(keep, [900_000, 900_000, 900_000, 2_000_000], "a")
    assert (kept, titles) == ([True, True, True, False], ["a2", "a1"])
    kept, titles = page.run(keep, [1] * 103, "b")
    assert (all(kept), len(titles), titles[0], titles[-1]) == (True, 100, "b102", "b3")
    # What others keep for this site may leave less room than that.
    page.run("localStorage.clear()")
    page.run("localStorage.setItem('other', 'x'.repeat(4_200_000))")
    kept, titles = page.run(keep, [500_000, 500_000, 1_500_000], "c")
    assert (kept, titles) == ([True, True, False], [])


REFUSING = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new Error("refused"); } });
}"""


def test_a_browser_that_keeps_nothing_still_shows_the_page(tab: Page, site: FakeSite) -> None:
    with tab.beginning_with(REFUSING):
        open_live(tab, site)
        tab.click("#theme")
        ask(tab, "Hi!")
        assert tab.text(SAID) == "Hello there."
        open_list(tab)
        tab.wait_for(f"{TITLES}.join() === 'Hi!'")
    open_live(tab, site)  # so that it can be emptied
