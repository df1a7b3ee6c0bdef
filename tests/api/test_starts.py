"""Requests that begin in turns: a burst keeps no request of others waiting for all of it."""

import asyncio
from functools import partial

from chairlift.api.http.connections import StartLimiter


async def test_a_burst_buries_no_request_of_a_connection_that_was_answered_before() -> None:
    starts, begun = StartLimiter(), list[str]()
    while starts.try_acquire():
        pass
    for number in range(100):
        starts.wait(partial(begun.append, f"new {number}"), is_known=False)
    starts.wait(partial(begun.append, "known"), is_known=True)
    for number in range(100, 200):
        starts.wait(partial(begun.append, f"new {number}"), is_known=False)
    await asyncio.sleep(0)
    assert len(begun) == 16
    assert {"known", "new 0", "new 199"} <= set(begun)


async def test_all_places_go_to_whoever_waits() -> None:
    for is_known in (False, True):
        starts, begun = StartLimiter(), list[int]()
        while starts.try_acquire():
            pass
        for number in range(20):
            starts.wait(partial(begun.append, number), is_known=is_known)
        await asyncio.sleep(0)
        assert sorted(begun) == [*range(8), *range(12, 20)]
