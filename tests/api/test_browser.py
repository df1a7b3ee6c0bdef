"""The page in a real browser: a chat that streams and stops, and slots that fill and empty as they do in the engine."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.browser import DESKTOP, PHONE, FakeSite, Page, browsing
from tests.support.fake_batch import FakeBatch
from tests.support.server_process import SERVE, Process, running

Keys = pytest.importorskip("selenium.webdriver", reason="selenium is not installed").Keys

NUM_SLOTS = 4
SLOT_LEN = 2048
KEY = "a key"


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


def parts_of(page: Page, slot: int) -> dict[str, int]:
    """Where each part of a slot's row ends, in tokens. All begin at 0, shorter ones over longer ones."""
    script = """((row, end) => [...row.querySelectorAll(".part")].map((part) =>
        [part.classList[1], Math.round((1 + parseFloat(part.style.translate) / 100) * end)]))(
            document.querySelectorAll("#slots li")[arguments[0]],
            Number(document.querySelector("#ticks span:last-child").textContent.replace(",", "")))"""
    return {name: end for name, end in page.run(script, slot) if end}


def test_a_slots_row_shows_what_is_reused_computed_still_to_do_generated_and_warm(page: Page, site: FakeSite) -> None:
    assert page.count("#slots li") == NUM_SLOTS
    assert parts_of(page, 0) == {}

    site.do(lambda: site.batch.add(num_prompt_tokens=900, num_output_tokens=60, num_reused=200))
    site.do(site.batch.step)
    page.wait_for_text("#slots li:first-child", "712 / 900")
    assert parts_of(page, 0) == {"reused": 200, "prefilled": 712, "todo": 900}

    site.do(lambda: site.batch.run(41))
    page.wait_for_text("#slots li:first-child", "900 + 41")
    assert parts_of(page, 0) == {"reused": 200, "prefilled": 900, "generated": 941}
    assert page.text("#num-running") == "1"

    site.do(lambda: site.batch.run(19))
    page.wait_for_text("#slots li:first-child", "959 warm")
    assert parts_of(page, 0) == {"warm": 959}
    assert page.text("#num-running") == "0"
    assert "1 request done" in page.text("#batch-summary")


def test_tokens_that_were_guessed_rightly_have_a_tone_of_their_own_where_some_were(page: Page, site: FakeSite) -> None:
    is_hidden = "document.getElementById('accepted-key').hidden"
    assert page.run(is_hidden)
    request = site.batch.add(num_prompt_tokens=100, num_output_tokens=60)
    request.num_guessed = 3
    site.do(lambda: site.batch.run(11))
    page.wait_for_text("#slots li:first-child", "100 + 41")
    assert parts_of(page, 0) == {"prefilled": 100, "accepted": 130, "generated": 141}
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
    newest = "The newest step decoded 3 rows and prefilled 0 tokens"
    assert page.run("document.querySelector('#steps svg').getAttribute('aria-label')") == newest
    site.batch.time += 1.0
    site.do(site.batch.step)
    page.wait_for("/^Lately [0-9.]+ tokens per second$/.test(document.querySelector('#throughput svg').ariaLabel)")
    page.wait_for(
        "/^Lately [67]\\.[0-9] milliseconds per token$/.test(document.querySelector('#latency svg').ariaLabel)"
    )
    assert page.text("#first-token").startswith("first token after ")


@pytest.mark.parametrize(("num_slots", "density"), [(1, "roomy"), (4, "roomy"), (32, "compact"), (256, "dense")])
@pytest.mark.parametrize("size", [DESKTOP, PHONE])
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
        sizes = "[document.documentElement.scrollWidth, document.documentElement.scrollHeight]"
        assert tab.run(sizes) == list(size)
        assert tab.run("document.getElementById('batch').scrollWidth <= innerWidth")


def test_the_arrow_keys_move_between_slots_and_tell_of_each(page: Page, site: FakeSite) -> None:
    site.do(lambda: site.batch.add(num_prompt_tokens=50, num_output_tokens=60, num_reused=20))
    site.do(lambda: site.batch.run(3))
    page.wait_for_text("#slots li:first-child", "50 + 3")
    page.run("document.querySelector('#slots li').focus()")
    described = "Slot 0, request [0-9a-f]{8}: prompt of 50 tokens, 20 of them reused; 3 generated\\."
    page.wait_for(f"/^{described}$/.test(document.getElementById('slot-detail').textContent)")
    page.press(Keys.ARROW_DOWN)
    page.wait_for_text("#slot-detail", "Slot 1 is free.")
    page.press(Keys.END)
    page.wait_for_text("#slot-detail", "Slot 3 is free.")
    page.press(Keys.ARROW_DOWN)
    assert page.text("#slot-detail") == "Slot 3 is free."
    assert page.count("#slots li[tabindex='0']") == 1


def test_everything_that_can_be_used_is_reached_by_tab_and_has_a_name(page: Page) -> None:
    seen: list[int] = []
    reached: set[str] = set()
    while (index := page.run("[...document.querySelectorAll('*')].indexOf(document.activeElement)")) not in seen:
        seen.append(index)
        page.press(Keys.TAB)
        name = page.run("document.activeElement.ariaLabel || document.activeElement.innerText")
        assert name or page.run("document.activeElement.labels?.length"), page.run("document.activeElement.outerHTML")
        reached.add(page.run("document.activeElement.id || document.activeElement.localName"))
    assert reached >= {"a", "theme", "log", "button", "summary", "message", "send", "li"}


def test_a_message_is_streamed_into_the_log_and_its_figures_follow(page: Page, site: FakeSite) -> None:
    page.click("#settings summary")
    page.type("#system", "Be brief.")
    page.type("[name=temperature]", "0.5")
    page.type("[name=max_tokens]", "7")
    page.type("#message", "Hi," + Keys.SHIFT + Keys.ENTER + Keys.NULL + "you!")
    assert site.requests == []
    page.type("#message", Keys.ENTER)
    page.wait_for_text("article.assistant .spent", "5 tokens")
    assert page.text("article.user .text") == "Hi,\nyou!"
    assert page.text("article.assistant .text") == "Hello there."
    assert page.text("article.assistant .spent").endswith("4 of 9 prompt tokens reused")
    assert "tokens/s" in page.text("article.assistant .spent")
    assert page.text("#announcer") == "Hello there."
    assert page.text("#settings-brief") == "system message, Temperature 0.5, Most tokens 7"

    page.type("#message", "And?" + Keys.ENTER)
    page.wait_for("document.querySelectorAll('article.assistant .spent').length === 2")
    first, second = site.requests
    assert first == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi,\nyou!"}],
        "temperature": 0.5,
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "Hi,\nyou!", "Hello there.", "And?"]

    page.click("#new-chat")
    assert page.count("article") == 0
    assert page.is_visible("#welcome")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop_leaves_the_stream_and_keeps_what_came(page: Page, site: FakeSite, way: str) -> None:
    site.is_held = True
    page.type("#message", "Hi!" + Keys.ENTER)
    page.wait_for_text("article.assistant .text", "Hello there.")
    assert not page.is_visible("#send")
    page.click("#stop") if way == "button" else page.press(Keys.ESCAPE)
    assert site.was_left.wait(10.0), "the server was not told"
    page.wait_for_text("article.assistant .spent", "stopped by you")
    assert page.text("article.assistant .text") == "Hello there."
    assert page.is_visible("#send")
    assert not page.is_visible("#stop")


def test_thoughts_stand_above_the_answer_and_fold_when_it_begins(page: Page, site: FakeSite) -> None:
    site.thoughts, site.pieces, site.is_held = ["<b>Someone", " greets."], [], True
    page.type("#message", "Hi!" + Keys.ENTER)
    page.wait_for_text("article .thoughts[open] .text", "<b>Someone greets.")
    assert page.text("article .thoughts summary") == "Thinking"
    page.click("#stop")

    site.pieces, site.is_held = ["Hello."], False
    page.type("#message", Keys.ENTER)
    page.wait_for_text("article:last-child .spent", "5 tokens")
    assert page.text("article:last-child .thoughts:not([open]) summary").startswith("Thought for ")
    assert page.text("article:last-child > .text") == "Hello."
    page.type("#message", "And?" + Keys.ENTER)
    page.wait_for("document.querySelectorAll('article.assistant').length === 3")
    assert [message["content"] for message in site.requests[2]["messages"]] == ["Hi!", "Hello.", "And?"]


def test_text_is_never_read_as_markup(page: Page, site: FakeSite) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    site.pieces = [evil[:9], evil[9:]]
    page.type("#message", evil + Keys.ENTER)
    page.wait_for_text("article.assistant .text", "</script>")
    assert page.text("article.user .text") == page.text("article.assistant .text") == evil
    assert page.count("article img, article script") == 0


def test_a_refusal_is_shown_in_the_servers_words_and_the_message_can_be_sent_again(page: Page, site: FakeSite) -> None:
    site.error = "the prompt has 9,000 tokens, and 2,048 fit"
    page.type("#message", "Hi!" + Keys.ENTER)
    page.wait_for_text("article.assistant .error", "the prompt has 9,000 tokens, and 2,048 fit")
    assert page.run("document.getElementById('message').value") == "Hi!"
    site.error = None
    page.type("#message", Keys.ENTER)
    page.wait_for_text("article:last-child .text", "Hello there.")
    assert site.requests[1]["messages"] == [{"role": "user", "content": "Hi!"}]


def test_the_own_request_is_marked_in_the_batch(page: Page, site: FakeSite) -> None:
    page.type("#message", "Hi!" + Keys.ENTER)
    page.wait_for_text("article.assistant .spent", "5 tokens")
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
def test_colours_are_the_systems_until_the_button_says_otherwise(
    tab: Page, site: FakeSite, system: str, other: str
) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    papers = {"light": "rgb(251, 252, 252)", "dark": "rgb(17, 23, 28)"}
    open_live(tab, site, prefers_color_scheme=system)
    assert tab.run(paper) == papers[system]
    tab.click("#theme")
    assert tab.run(paper) == papers[other]
    assert tab.run("document.getElementById('theme').ariaPressed") == str(other == "dark").lower()
    open_live(tab, site, prefers_color_scheme=system)
    assert tab.run(paper) == papers[other]


@pytest.mark.parametrize("shade", ["light", "dark"])
def test_contrasts_are_those_of_wcag_aa(tab: Page, site: FakeSite, shade: str) -> None:
    open_live(tab, site, prefers_color_scheme=shade)
    grounds = ("--paper", "--raised", "--sunken")
    texts = [(text, ground) for text in ("--ink", "--muted", "--accent", "--bad") for ground in grounds]
    shapes = ("--edge", "--reused", "--prefilled", "--generated", "--good", "--accent")
    faint = [pair for pair in [*texts, ("--on-accent", "--accent")] if tab.contrast(*pair) < 4.5]
    faint += [(shape, "--paper") for shape in shapes if tab.contrast(shape, "--paper") < 3.0]
    assert faint == []
    assert tab.contrast("--paper", "--paper") == 1.0


def test_nothing_moves_for_who_wants_less_motion(tab: Page, site: FakeSite) -> None:
    site.is_held = True
    open_live(tab, site, prefers_reduced_motion="reduce")
    tab.type("#message", "Hi!" + Keys.ENTER)
    tab.wait_for_text("article.assistant .text", "Hello there.")
    moving = """[...document.querySelectorAll("*")].flatMap((each) => [null, "::after"].map((pseudo) =>
        getComputedStyle(each, pseudo))).filter((style) => style.animationName !== "none"
        || style.transitionDuration !== "0s").length"""
    assert tab.run(moving) == 0
    tab.click("#stop")


def test_a_phone_shows_one_half_at_a_time(tab: Page, site: FakeSite) -> None:
    open_live(tab, site, PHONE)
    assert tab.is_visible("#message")
    assert not tab.is_visible("#slots")
    tab.wait_for_text(".views", "Batch 0/4")
    tab.click("[data-shows=batch]")
    assert tab.is_visible("#slots")
    assert not tab.is_visible("#message")
    assert tab.run("document.querySelector('[data-shows=batch]').ariaPressed") == "true"
    tab.click("[data-shows=chat]")
    tab.type("#message", "Hi!")
    tab.click("#send")
    tab.wait_for_text("article.assistant .text", "Hello there.")
    targets = "[...document.querySelectorAll('button, summary')].filter((each) => each.checkVisibility())"
    assert (
        tab.run(f"Math.min(...{targets}.map((each) => each.offsetHeight))") >= 24
    )  # WCAG 2.2's least size of a target


# Steps that one can watch: the bundled model is too quick for that.
SLOW_SERVE = f"""
import time
from chairlift.engine.core import EngineCore
step = EngineCore.step
def slow_step(self):
    time.sleep(0.02)
    return step(self)
EngineCore.step = slow_step
{SERVE}
"""


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """The bundled model behind the real server."""
    with running(SLOW_SERVE, "--max-batch-size", str(NUM_SLOTS), "--max-seq-len", str(SLOT_LEN)) as process:
        yield process


def test_a_message_is_answered_by_the_model_and_stop_releases_the_slot(tab: Page, process: Process) -> None:
    tab.open(process.url)
    tab.wait_for_text("#link", "live")
    tab.wait_for_text("#model", "bundled")
    tab.type("#message", "Tell me a story about a chairlift." + Keys.ENTER)
    tab.wait_for_text("article.assistant .spent", "about")  # it streams
    tab.wait_for("document.querySelector('#slots li.own[data-state=decoding]') !== null")
    tab.click("#stop")
    tab.wait_for_text("article.assistant .spent", "stopped by you")
    tab.wait_for("document.querySelectorAll('[data-state=prefilling], [data-state=decoding]').length === 0")
    assert tab.text("#num-running") == "0"
    tab.click("#new-chat")
    tab.click("#openers li:nth-child(3) button")
    tab.wait_for_text("article.assistant .spent", "first after")
    assert tab.text("article.user .text") == "What is 17 + 25?"
    assert tab.text("article.assistant .text") == "17 + 25 = 42."


def test_requests_of_the_load_test_fill_slots_wait_and_leave(tab: Page, process: Process) -> None:
    tab.open(process.url)
    tab.wait_for_text("#link", "live")
    tab.wait_for_text("#batch-summary", "done")
    num_done = int(tab.text("#batch-summary").split()[0])
    load = ["--num-requests", "8", "--concurrency", "8", "--prompt-tokens", "300", "--output-tokens", "60"]
    command = [sys.executable, "-m", "chairlift", "bench", "--url", process.url, "--warmup", "0", *load]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    full = "document.querySelectorAll('#slots li[data-state=decoding]').length === 4"
    tab.wait_for(f"{full} && document.querySelectorAll('#queue li').length === 4")
    assert tab.text("#num-waiting") == "4"
    assert tab.text("#queue li:first-child").startswith("300 · ")
    assert bench.wait(60.0) == 0
    tab.wait_for_text("#batch-summary", f"{num_done + 8} requests done")
    assert tab.text("#num-running") == tab.text("#num-waiting") == "0"
    assert tab.count("#queue li") == 0


def test_a_server_with_a_key_asks_for_it(tab: Page) -> None:
    with running(SERVE, "--max-batch-size", "1", "--api-key", KEY) as process:
        tab.open(process.url)
        tab.wait_for("document.getElementById('key-dialog').open")
        tab.type("#key", "another" + Keys.ENTER)
        tab.wait_for_text("#key-dialog", "That key is not one of this server's.")
        tab.type("#key", KEY + Keys.ENTER)
        tab.wait_for_text("#link", "live")
        tab.wait_for_text("#model", "bundled")
        assert tab.run("[sessionStorage.getItem('chairlift-key'), localStorage.length]") == [KEY, 0]
        tab.click("#openers li:nth-child(3) button")
        tab.wait_for_text("article.assistant .text", "17 + 25 = 42.")
