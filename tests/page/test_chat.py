"""The chat in a browser: an answer that streams and stops, and what the person can do with it afterwards."""

import json

import pytest

from chairlift.errors import ContextLengthExceeded, InvalidRequest
from tests.page.page_support import (
    LAST_SAID,
    NUM_SLOTS,
    SAID,
    SLOT_LEN,
    SPENT,
    Keys,
    ask,
    open_live,
    press,
    send,
    wait_for_answer,
)
from tests.support.browser import Page
from tests.support.fake_batch import FakeBatch
from tests.support.fake_site import FakeSite

pytestmark = pytest.mark.slow  # they need a browser


def test_a_message_is_streamed_into_the_log_and_its_figures_follow(page: Page, site: FakeSite) -> None:
    page.click("#settings summary")
    for field, value in (("#system", "Be brief."), ("[name=temperature]", "0.5"), ("[name=max_tokens]", "7")):
        page.type(field, Keys.CONTROL + "a" + Keys.NULL + value)
    page.type("#message", "Hi," + Keys.SHIFT + Keys.ENTER + Keys.NULL + "you!")
    assert site.requests == []
    send(page, "")
    page.wait_for_text(SPENT, "5 tokens")
    assert page.text("article.user .text") == "Hi,\nyou!"
    assert page.text(SAID) == page.text("#announcer") == "Hello there."
    assert page.text(SPENT).endswith("4 of 9 prompt tokens reused")
    assert "tokens/s" in page.text(SPENT)
    assert page.text("#settings-brief") == "system message, Temperature 0.5, Max tokens 7"

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
    site.thoughts, site.pieces, site.is_held = ["<b>Someone", " *greets*."], [], True
    send(page, "Hi!")
    page.wait_for_text("article .thoughts[open] .text", "<b>Someone greets.")
    assert page.text("article .thoughts summary") == "Thinking"
    page.click("#stop")
    page.wait_for_text(SPENT, "stopped by you")

    site.pieces, site.is_held = ["Hello."], False
    press(page, "Try again")
    wait_for_answer(page)
    assert page.text("article:last-child .thoughts:not([open]) summary").startswith("Thought for ")
    assert page.text(LAST_SAID) == "Hello."
    ask(page, "And?")
    assert [message["content"] for message in site.requests[2]["messages"]] == ["Hi!", "Hello.", "And?"]
    assert site.requests[2]["messages"][1]["reasoning_content"] == "<b>Someone *greets*."


def test_a_refusal_is_shown_and_the_message_can_be_sent_again(page: Page, site: FakeSite) -> None:
    evil = "<img src=x onerror=alert(1)>"
    site.error = InvalidRequest(f"{evil} does not fit")
    send(page, evil)
    page.wait_for_text("article.assistant .error", f"{evil} does not fit")
    press(page, "Try again")
    wait_for_answer(page)
    assert page.count("article .error") == 0
    assert site.requests[0] == site.requests[1]
    assert site.requests[1]["messages"] == [{"role": "user", "content": evil}]
    assert page.text("article.user .text") == evil


def test_an_answer_is_made_anew_and_takes_the_place_of_the_last_one(page: Page, site: FakeSite) -> None:
    ask(page, "Hi!")
    site.pieces = ["Good day."]
    press(page, "Regenerate")
    page.wait_for_text(SAID, "Good day.")
    wait_for_answer(page)
    assert site.requests[1] == site.requests[0]
    assert page.count("article") == 2


def test_a_message_is_edited_and_what_stood_below_it_is_removed(page: Page, site: FakeSite) -> None:
    ask(page, "One")
    ask(page, "Two")
    page.click("article.user .actions button")
    page.type("article .edit textarea", "!" + Keys.ESCAPE)
    assert (page.text("article.user .text"), page.count("article")) == ("One", 4)
    page.click("article.user .actions button")
    page.type("article .edit textarea", " more" + Keys.ENTER)
    page.wait_for_text("article.user .text", "One more")
    wait_for_answer(page)
    assert page.count("article") == 2
    assert [message["content"] for message in site.requests[2]["messages"]] == ["One more"]


def test_answers_have_a_limit_which_gives_way_where_less_fits(page: Page, site: FakeSite) -> None:
    ask(page, "Hi!")
    site.error = ContextLengthExceeded("too long", "max_tokens")
    ask(page, "And?")
    site.error = ContextLengthExceeded("too long", "messages")
    send(page, "So?")
    page.wait_for_text("article.assistant .error", "too long")
    assert [request.get("max_tokens") for request in site.requests] == [2048, 2048, None, 2048]
    page.click("#settings summary")
    page.type("[name=max_tokens]", Keys.CONTROL + "a" + Keys.NULL + str(SLOT_LEN))
    ask(page, "Well?")
    assert "max_tokens" not in site.requests[-1]


def test_an_answer_that_ended_at_the_limit_goes_on(page: Page, site: FakeSite) -> None:
    site.pieces, site.finish = ["Once *upon"], "length"
    ask(page, "Hi!")
    assert page.text(SPENT).endswith("ended at the limit of tokens")
    assert page.text(SAID) == "Once *upon"
    site.pieces, site.finish = [" a* time."], "stop"
    press(page, "Continue")
    page.wait_for_text(SAID, "Once upon a time.")
    wait_for_answer(page)
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    assert site.requests[1].items() >= ends.items()
    assert site.requests[1]["messages"][-1] == {"role": "assistant", "content": "Once *upon"}
    assert page.count("article") == 2


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_calls_of_tools_are_shown_and_their_results_are_sent(page: Page, site: FakeSite) -> None:
    page.click("#settings summary")
    page.type("#tools", "no list")
    send(page, "What is 1 + 2?")
    page.click("#openers button")
    assert page.run("document.getElementById('tools').matches(':invalid')")
    assert page.count("article") == 0
    page.run("document.getElementById('tools').value = ''")
    page.type("#tools", json.dumps([TOOL]))
    page.click("#settings summary")
    called = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    begun = {**called, "index": 0, "function": {"name": "add", "arguments": ""}}
    site.pieces, site.calls = [], [begun, {"index": 0, "function": {"arguments": '{"a": 1, "b": 2}'}}]
    page.press(Keys.NULL)
    page.click("#send")
    wait_for_answer(page)
    assert page.text(".call-name") == "Calls add"
    assert page.text(".call pre") == '{\n  "a": 1,\n  "b": 2\n}'
    site.pieces, site.calls = ["It is 3."], []
    page.type(".call textarea", "3")
    press(page, "Send the result")
    page.wait_for_text(LAST_SAID, "It is 3.")
    wait_for_answer(page)
    assert site.requests[1]["tools"] == [TOOL]
    assert site.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    assert page.count(".call textarea") == 0


def test_the_page_works_behind_a_proxy_that_shows_it_under_a_path(tab: Page) -> None:
    site = FakeSite(FakeBatch(NUM_SLOTS, SLOT_LEN), path="/models/small/")
    with site.online():
        open_live(tab, site)
        tab.wait_for_text("#model", "fake-model")
        ask(tab, "Hi!")
        assert tab.text(SAID) == "Hello there."
