"""Mixed load in this process, the soak's in small: every request ends once, as it should, and every slot is free."""

import pytest

from tests.soak.client_log import ClientLog, Ending
from tests.soak.load import Load, Wave
from tests.soak.server import serving
from tests.soak.state import Target
from tests.soak.verdict import judge


async def test_a_hundred_mixed_requests_are_all_accounted_for() -> None:
    async with serving() as served:
        load = Load(Target(served.url, served.read), seed=1)
        await load.put(Wave(num_clients=12, seconds=60.0, max_requests=70))
        await load.put(Wave(num_clients=30, seconds=2.0, is_cut=True, max_requests=40))
        after = await load.read_final_state()
        assert after is not None
        assert after.leftovers == {}
        assert after.num_free_slots == 8
    assert judge(load, after, after).complaints == []
    assert len(load.client_log.entries) >= 100
    endings = {entry.ending for entry in load.client_log.entries}
    assert endings >= {Ending.FINISHED, Ending.QUEUE_FULL, Ending.REFUSED, Ending.LEFT}


def test_an_ending_twice_is_an_error() -> None:
    client_log = ClientLog()
    entry = client_log.open("story", "patient")
    client_log.close(entry, Ending.FINISHED)
    with pytest.raises(ValueError, match="request 0 ended twice: finished, then left"):
        client_log.close(entry, Ending.LEFT)


def test_a_request_that_never_ends_is_a_complaint() -> None:
    client_log = ClientLog()
    client_log.open("story", "patient")
    assert client_log.complaints() == ["request 0 was never closed"]


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
    client_log = ClientLog()
    entry = client_log.open("story", "patient")
    entry.status = 200
    client_log.close(entry, Ending.FINISHED)
    complaints = client_log.compare({"0": told} if told else {})
    assert complaints[:1] == ([] if complaint is None else [complaint])


def test_who_left_may_have_arrived_or_not_but_not_twice() -> None:
    client_log = ClientLog()
    client_log.close(client_log.open("story", "leaves before the reply"), Ending.LEFT)
    assert client_log.compare({}) == []
    assert client_log.compare({"0": ["left"]}) == []
    assert client_log.compare({"0": ["200"]}) == []
    assert client_log.compare({"0": ["left", "200"]}) == ["request 0 (story) arrived 2 times: ['left', '200']"]


def test_a_request_that_nobody_sent_is_a_complaint() -> None:
    assert ClientLog().compare({"7": ["200"]}) == ["the server tells of requests that nobody sent: ['7']"]


async def test_a_slot_that_stays_taken_is_a_complaint() -> None:
    async with serving() as served:
        load = Load(Target(served.url, served.read), seed=0)
        served.llm._core.cache.claim(1)
        after = await served.read(True)
    complaints = judge(load, after, after).complaints
    assert "at the end there are 1 slots taken" in complaints
