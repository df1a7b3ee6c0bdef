"""Mixed load in this process, the soak's in small: every request ends once, as it should, and every slot is free."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, which are not installed

from soaking.ledger import Ledger, Outcome
from soaking.load import Load, Wave
from soaking.observer import Insider
from soaking.server import serving
from soaking.verdict import judge


@pytest.mark.asyncio
async def test_two_hundred_mixed_requests_are_all_accounted_for() -> None:
    async with serving() as served:
        load = Load(Insider(served), seed=1)
        await load.put(Wave(num_clients=12, seconds=60.0, max_requests=150))
        await load.put(Wave(num_clients=30, seconds=1.0, is_cut=True, max_requests=50))
        after = await load.read_final_books()
        assert after is not None
        assert after.leftovers == {}
        assert after.num_free_slots == 8
    assert judge(load, None, after).complaints == []
    assert len(load.ledger.entries) >= 200
    outcomes = {entry.outcome for entry in load.ledger.entries}
    assert outcomes >= {Outcome.FINISHED, Outcome.QUEUE_FULL, Outcome.REFUSED, Outcome.LEFT}


def test_an_ending_twice_is_an_error() -> None:
    ledger = Ledger()
    entry = ledger.open("story", "patient")
    ledger.close(entry, Outcome.FINISHED)
    with pytest.raises(ValueError, match="request 0 ended twice: finished, then left"):
        ledger.close(entry, Outcome.LEFT)


def test_a_request_that_never_ends_is_a_complaint() -> None:
    ledger = Ledger()
    ledger.open("story", "patient")
    assert ledger.complaints() == ["request 0 was never closed"]


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (["200"], None),
        ([], "request 0 (story): the client saw 200, the server tells []"),
        (["left"], "request 0 (story): the client saw 200, the server tells ['left']"),
        (["200", "200"], "request 0 (story) arrived 2 times: ['200', '200']"),
    ],
)
def test_the_server_must_tell_the_same_of_a_request(told: list[str], complaint: str | None) -> None:
    ledger = Ledger()
    entry = ledger.open("story", "patient")
    entry.status = 200
    ledger.close(entry, Outcome.FINISHED)
    complaints = ledger.compare({"0": told} if told else {})
    assert complaints[:1] == ([] if complaint is None else [complaint])


def test_who_left_may_have_arrived_or_not_but_not_twice() -> None:
    ledger = Ledger()
    ledger.close(ledger.open("story", "leaves before the reply"), Outcome.LEFT)
    assert ledger.compare({}) == []
    assert ledger.compare({"0": ["left"]}) == []
    assert ledger.compare({"0": ["200"]}) == []
    assert ledger.compare({"0": ["left", "200"]}) == ["request 0 (story) arrived 2 times: ['left', '200']"]


def test_a_request_that_nobody_sent_is_a_complaint() -> None:
    assert Ledger().compare({"7": ["200"]}) == ["the server tells of requests that nobody sent: ['7']"]


@pytest.mark.asyncio
async def test_a_slot_that_stays_taken_is_a_complaint() -> None:
    async with serving() as served:
        load = Load(Insider(served), seed=0)
        served.llm._core.cache.ledger.claim(1)
        after = await served.read(is_thorough=True)
    complaints = judge(load, None, after).complaints
    assert "at the end there are 1 slots taken" in complaints
