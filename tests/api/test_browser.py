"""The page in a real browser: a chat that streams and stops, and slots that fill and empty as they do in the engine."""

import itertools
import os
from collections.abc import Iterator

import pytest

from tests.support.browser import DESKTOP, PHONE, FakeSite, Page, browsing
from tests.support.fake_batch import FakeBatch
from tests.support.server_process import SERVE, Process, running, start_python

Keys = pytest.importorskip("selenium.webdriver", reason="selenium is not installed").Keys

pytestmark = pytest.mark.slow  # what the page shows comes from the stream of test_watch.py

NUM_SLOTS, SLOT_LEN, KEY = 4, 2048, "a key"
SPENT, SAID = "article.assistant .spent", "article.assistant .text"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browsing() as page:
        yield page


@pytest.fixture
def tab(browser: Page) -> Iterator[Page]:
    """Nothing that goes wrong in the browser goes unnoticed."""
    browser.complaints()
    yield browser
    assert browser.complaints() == []
    browser.open("about:blank")


@pytest.fixture
def site() -> Iterator[FakeSite]:
    site = FakeSite(FakeBatch(NUM_SLOTS, SLOT_LEN))
    with site.online():
        yield site


def open_live(page: Page, site: FakeSite, size: tuple[int, int] = DESKTOP, **media: str) -> None:
    page.open(site.url, size, **media)
    page.wait_for_text("#link", "live")
    page.wait_for("document.querySelectorAll('#slots li').length > 0")


@pytest.fixture
def page(tab: Page, site: FakeSite) -> Page:
    """Which shows the site."""
    open_live(tab, site)
    return tab


def send(page: Page, text: str) -> None:
    page.type("#message", text + Keys.ENTER)


def parts_of(page: Page) -> dict[str, int]:
    """Where each part of the first slot's row ends, in tokens. All begin at 0, shorter ones over longer ones."""
    script = """((row, end) => [...row.querySelectorAll(".part")].map((part) =>
        [part.classList[1], Math.round((1 + parseFloat(part.style.translate) / 100) * end)]))(
            document.querySelector("#slots li"),
            Number(document.querySelector("#ticks span:last-child").textContent.replace(",", "")))"""
    return {name: end for name, end in page.run(script) if end}


def test_a_slots_row_shows_what_is_reused_computed_still_to_do_generated_and_warm(page: Page, site: FakeSite) -> None:
    assert page.count("#slots li") == NUM_SLOTS
    assert parts_of(page) == {}

    site.do(lambda: site.batch.add(num_prompt_tokens=900, num_output_tokens=60, num_reused=200))
    site.do(site.batch.step)
    page.wait_for_text("#slots li:first-child", "712 / 900")
    assert parts_of(page) == {"reused": 200, "prefilled": 712, "todo": 900}

    site.do(lambda: site.batch.run(41))
    page.wait_for_text("#slots li:first-child", "900 + 41")
    assert parts_of(page) == {"reused": 200, "prefilled": 900, "generated": 941}
    assert page.text("#num-running") == "1"

    site.do(lambda: site.batch.run(19))
    page.wait_for_text("#slots li:first-child", "959 warm")
    assert parts_of(page) == {"warm": 959}
    assert page.text("#num-running") == "0"
    assert "1 request done" in page.text("#batch-summary")


def test_tokens_that_were_guessed_rightly_have_a_tone_of_their_own_where_some_were(page: Page, site: FakeSite) -> None:
    is_hidden = "document.getElementById('accepted-key').hidden"
    assert page.run(is_hidden)
    site.batch.add(num_prompt_tokens=100, num_output_tokens=60).num_guessed = 3
    site.do(lambda: site.batch.run(11))
    page.wait_for_text("#slots li:first-child", "100 + 41")
    assert parts_of(page) == {"prefilled": 100, "accepted": 130, "generated": 141}
    assert not page.run(is_hidden)
    page.run("document.querySelector('#slots li').focus()")
    assert page.text("#slot-detail").endswith("prompt of 100 tokens; 41 generated, 30 of them guessed rightly.")


def test_who_waits_is_listed_in_order_and_counted_beyond_the_first_twenty(page: Page, site: FakeSite) -> None:
    assert page.text("#queue-words") == "nobody"
    site.do(lambda: [site.batch.add(100 + index, 50) for index in range(30)])
    page.wait_for_text("#num-waiting", "30")
    assert page.count("#queue li") == 20
    assert page.text("#queue li:first-child") == "100 · 0 ms"
    assert page.text("#queue-rest") == "and 10 more"
    site.do(site.batch.step)
    page.wait_for_text("#queue li:first-child", "104 · ")
    assert page.text("#num-waiting") == "26"


def test_the_strip_and_the_charts_tell_of_the_last_steps(page: Page, site: FakeSite) -> None:
    bars = "document.querySelector(arguments[0]).getAttribute('d').split('z').length - 1"
    site.do(lambda: [site.batch.add(10, 100) for _ in range(3)])
    site.do(lambda: site.batch.run(5))
    page.wait_for(f"{bars} === 4", "#steps path.generated")
    assert page.run(bars, "#steps path.prefilled") == 1
    label = "document.querySelector(arguments[0]).ariaLabel"
    assert page.run(label, "#steps svg") == "The newest step decoded 3 rows and prefilled 0 tokens"
    site.batch.time += 1.0
    site.do(site.batch.step)
    page.wait_for(f"/^Lately [0-9.]+ tokens per second$/.test({label})", "#throughput svg")
    page.wait_for(f"/^Lately [67]\\.[0-9] milliseconds per token$/.test({label})", "#latency svg")
    assert page.text("#first-token").startswith("first token after ")


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize(("num_slots", "density"), [(4, "roomy"), (32, "compact"), (256, "dense")])
def test_all_slots_fit_whatever_their_number(tab: Page, num_slots: int, density: str, size: tuple[int, int]) -> None:
    site = FakeSite(FakeBatch(num_slots, SLOT_LEN))
    site.batch.crowd(num_slots)
    with site.online():
        open_live(tab, site, size)
        if size == PHONE:
            tab.click("[data-shows=batch]")
        site.do(lambda: site.batch.run(8))
        tab.wait_for("Number(document.getElementById('num-running').textContent) > 0")
        assert tab.run("document.getElementById('slots').dataset.density") == density
        assert tab.count("#slots li") == num_slots
        assert tab.run("Math.min(...[...document.querySelectorAll('.track')].map((each) => each.offsetWidth))") > 30
        root = "document.documentElement"
        assert tab.run(f"[{root}.scrollWidth, {root}.scrollHeight]") == list(size)
        assert tab.run("document.getElementById('batch').scrollWidth <= innerWidth")


def test_the_arrow_keys_move_between_slots_and_tell_of_each(page: Page, site: FakeSite) -> None:
    site.do(lambda: site.batch.add(num_prompt_tokens=50, num_output_tokens=60, num_reused=20))
    site.do(lambda: site.batch.run(3))
    page.wait_for_text("#slots li:first-child", "50 + 3")
    page.run("document.querySelector('#slots li').focus()")
    described = "Slot 0, request [0-9a-f]{8}: prompt of 50 tokens, 20 of them reused; 3 generated\\."
    page.wait_for(f"/^{described}$/.test(document.getElementById('slot-detail').textContent)")
    for key, slot in ((Keys.ARROW_DOWN, 1), (Keys.END, 3), (Keys.ARROW_DOWN, 3)):
        page.press(key)
        page.wait_for_text("#slot-detail", f"Slot {slot} is free.")
    assert page.count("#slots li[tabindex='0']") == 1


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
    site.error, site.pieces = f"{evil} does not fit", [evil[:9], evil[9:]]
    send(page, evil)
    page.wait_for_text("article.assistant .error", site.error)
    assert page.run("document.getElementById('message').value") == evil
    site.error = None
    send(page, "")
    page.wait_for_text("article:last-child .text", "</script>")
    assert site.requests[1]["messages"] == [{"role": "user", "content": evil}]
    assert page.text("article:last-child .text") == page.text("article.user .text") == evil
    assert page.count("article img, article script") == 0  # text is never read as markup


def test_the_own_request_is_marked_in_the_batch(page: Page, site: FakeSite) -> None:
    send(page, "Hi!")
    page.wait_for_text(SPENT, "5 tokens")
    site.do(lambda: site.batch.add(20, 30))
    site.do(lambda: setattr(site.batch.waiting[0], "request_id", "123456789-0-0-17-0"))
    site.do(lambda: site.batch.add(40, 30))
    site.do(site.batch.step)
    page.wait_for_text("#slots li.own", "you: 20 + 1")
    assert page.count("#slots li.own") == 1


def test_the_page_says_when_the_server_is_gone_and_comes_back_with_it(tab: Page) -> None:
    site = FakeSite(FakeBatch(NUM_SLOTS, SLOT_LEN))
    with site.online():
        open_live(tab, site)
    tab.wait_for_text("#link", "the server is gone; trying again")
    assert tab.run("document.body.dataset.link") == "gone"
    site.batch.add(10, 100)
    site.batch.step()
    with site.online():
        tab.wait_for_text("#link", "live")
        tab.wait_for_text("#num-running", "1")
        assert tab.run("document.body.dataset.link") == "live"


@pytest.mark.parametrize(("system", "other"), [("light", "dark"), ("dark", "light")])
def test_colours_are_the_systems_until_the_button_says_otherwise_and_have_contrast(
    tab: Page, site: FakeSite, system: str, other: str
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    papers = {"light": "rgb(251, 252, 252)", "dark": "rgb(17, 23, 28)"}
    open_live(tab, site, prefers_color_scheme=system)
    assert tab.run(paper) == papers[system]
    texts = itertools.product(("--ink", "--muted", "--accent", "--bad"), ("--paper", "--raised", "--sunken"))
    shapes = ("--edge", "--reused", "--prefilled", "--generated", "--good", "--accent")
    faint = [pair for pair in [*texts, ("--on-accent", "--accent")] if tab.contrast(*pair) < 4.5]
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
    targets = "[...document.querySelectorAll('button, summary')].filter((each) => each.checkVisibility())"
    least = tab.run(f"Math.min(...{targets}.map((each) => each.offsetHeight))")
    assert least >= 24  # WCAG 2.2's least size of a target


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
    flags = ("--max-batch-size", str(NUM_SLOTS), "--max-seq-len", str(SLOT_LEN), "--api-key", KEY)
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
