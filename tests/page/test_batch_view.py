"""The batch in a browser: slots that fill and empty as they do in the engine, who waits, and the charts."""

import pytest

from tests.page.page_support import NUM_SLOTS, SLOT_LEN, SPENT, Keys, open_live, send
from tests.support.browser import DESKTOP, PHONE, Page
from tests.support.fake_batch import FakeBatch
from tests.support.fake_site import FakeSite

pytestmark = pytest.mark.slow  # what the page shows comes from the stream of test_watch.py


def parts_of(page: Page) -> dict[str, int]:
    """Returns where each part of the first slot's row ends, in tokens. All begin at 0, shorter ones over longer
    ones.
    """
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


def test_what_came_from_disk_is_marked_while_a_slot_works_and_while_it_is_warm(page: Page, site: FakeSite) -> None:
    is_hidden = "document.getElementById('restored-key').hidden"
    assert page.run(is_hidden)
    site.batch.add(num_prompt_tokens=300, num_output_tokens=20, num_reused=256).num_restored = 192
    site.do(lambda: site.batch.run(11))
    page.wait_for_text("#slots li:first-child", "300 + 11")
    assert parts_of(page) == {"restored": 192, "reused": 256, "prefilled": 300, "generated": 311}
    assert not page.run(is_hidden)
    site.do(lambda: site.batch.run(9))
    page.wait_for_text("#slots li:first-child", "319 warm, disk")
    assert parts_of(page) == {"restored": 192, "warm": 319}
    page.run("document.querySelector('#slots li').focus()")
    assert page.text("#slot-detail").endswith("; 192 of its first tokens were filled in from disk.")


def test_recurrent_states_along_a_slots_tokens_are_told(page: Page, site: FakeSite) -> None:
    site.batch.add(num_prompt_tokens=300, num_output_tokens=20).num_states = 2
    site.do(lambda: site.batch.run(11))
    page.wait_for_text("#slots li:first-child", "300 + 11")
    page.run("document.querySelector('#slots li').focus()")
    assert page.text("#slot-detail").endswith("; 2 recurrent states kept along them.")
    site.do(lambda: site.batch.run(9))
    page.wait_for_text("#slots li:first-child", "319 warm")
    assert page.text("#slot-detail").endswith("begins with them; 2 recurrent states kept along them.")


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
