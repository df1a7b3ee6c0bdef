"""The chat in a browser: an answer that streams and stops, and what the person can do with it afterwards."""

import pytest

from chairlift.errors import InvalidRequest
from tests.page.page_support import SAID, SPENT, Keys, send
from tests.support.browser import Page
from tests.support.fake_site import FakeSite

pytestmark = pytest.mark.slow  # they need a browser


def test_a_message_is_streamed_into_the_log_and_its_figures_follow(page: Page, site: FakeSite) -> None:
    page.click("#settings summary")
    for field, value in (("#system", "Be brief."), ("[name=temperature]", "0.5"), ("[name=max_tokens]", "7")):
        page.type(field, value)
    page.type("#message", "Hi," + Keys.SHIFT + Keys.ENTER + Keys.NULL + "you!")
    assert site.requests == []
    send(page, "")
    page.wait_for_text(SPENT, "5 tokens")
    assert page.text("article.user .text") == "Hi,\nyou!"
    assert page.text(SAID) == page.text("#announcer") == "Hello there."
    assert page.text(SPENT).endswith("4 of 9 prompt tokens reused")
    assert "tokens/s" in page.text(SPENT)
    assert page.text("#settings-brief") == "system message, Temperature 0.5, Most tokens 7"

    send(page, "And?")
    page.wait_for(f"document.querySelectorAll('{SPENT}').length === 2")
    first, second = site.requests
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi,\nyou!"}]
    settings = {"temperature": 0.5, "max_tokens": 7, "stream": True, "stream_options": {"include_usage": True}}
    assert first == {"messages": messages, **settings}
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "Hi,\nyou!", "Hello there.", "And?"]

    page.click("#new-chat")
    assert page.count("article") == 0
    assert page.is_visible("#welcome")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_leaves_the_stream_and_keeps_what_came(page: Page, site: FakeSite, way: str) -> None:
    site.is_held = True
    send(page, "Hi!")
    page.wait_for_text(SAID, "Hello there.")
    assert not page.is_visible("#send")
    page.click("#stop") if way == "button" else page.press(Keys.ESCAPE)
    assert site.was_left.wait(10.0), "the server was not told"
    page.wait_for_text(SPENT, "stopped by you")
    assert page.text(SAID) == "Hello there."
    assert (page.is_visible("#send"), page.is_visible("#stop")) == (True, False)


def test_thoughts_stand_above_the_answer_and_fold_when_it_begins(page: Page, site: FakeSite) -> None:
    site.thoughts, site.pieces, site.is_held = ["<b>Someone", " greets."], [], True
    send(page, "Hi!")
    page.wait_for_text("article .thoughts[open] .text", "<b>Someone greets.")
    assert page.text("article .thoughts summary") == "Thinking"
    page.click("#stop")

    site.pieces, site.is_held = ["Hello."], False
    send(page, "")
    page.wait_for_text("article:last-child .spent", "5 tokens")
    assert page.text("article:last-child .thoughts:not([open]) summary").startswith("Thought for ")
    assert page.text("article:last-child > .text") == "Hello."
    send(page, "And?")
    page.wait_for("document.querySelectorAll('article.assistant').length === 3")
    assert [message["content"] for message in site.requests[2]["messages"]] == ["Hi!", "Hello.", "And?"]


def test_a_refusal_is_shown_and_can_be_sent_again_and_nothing_is_markup(page: Page, site: FakeSite) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    site.error, site.pieces = InvalidRequest(f"{evil} does not fit"), [evil[:9], evil[9:]]
    send(page, evil)
    page.wait_for_text("article.assistant .error", f"{evil} does not fit")
    assert page.run("document.getElementById('message').value") == evil
    send(page, "")
    page.wait_for_text("article:last-child .text", "</script>")
    assert site.requests[1]["messages"] == [{"role": "user", "content": evil}]
    assert page.text("article:last-child .text") == page.text("article.user .text") == evil
    assert page.count("article img, article script") == 0  # text is never read as markup
