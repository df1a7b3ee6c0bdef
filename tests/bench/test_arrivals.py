"""When requests are sent."""

import asyncio
import statistics
import time
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import numpy as np
import pytest

from chairlift.bench.arrivals import closed_loop, open_loop, ramp_offsets, random_offsets


class Moment(NamedTuple):
    """When a request was meant to be sent, and when it was."""

    intended: float
    sent: float


class Flights:
    """A stand-in for the client: counts what is in flight; a request ends when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.intended: dict[int, float] = {}
        self.num_in_flight = 0
        self.peak = 0

    async def send(self, index: int, intended_at: float) -> None:
        self.intended[index] = intended_at
        self.num_in_flight += 1
        self.peak = max(self.peak, self.num_in_flight)
        await self.gate.wait()
        # Let the others see it before it lands.
        await asyncio.sleep(0)
        self.num_in_flight -= 1


def poisson_offsets(count: int, rate: float, seed: int = 0) -> list[float]:
    return random_offsets(count, rate, 1.0, np.random.default_rng(seed))


def gaps(offsets: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(offsets)]


def test_offsets_begin_at_once_and_never_go_back() -> None:
    offsets = poisson_offsets(1000, rate=50.0)
    assert len(offsets) == 1000
    assert offsets[0] == 0.0
    assert min(gaps(offsets)) >= 0.0


def test_a_single_request_is_due_at_once() -> None:
    assert poisson_offsets(1, rate=0.001) == [0.0]
    assert ramp_offsets(1, 1.0, 2.0, 1.0, np.random.default_rng(0)) == [0.0]


def test_gaps_are_those_of_the_generator() -> None:
    assert poisson_offsets(5, 2.0, seed=4) == poisson_offsets(5, 2.0, seed=4)
    assert poisson_offsets(5, 2.0, seed=4) != poisson_offsets(5, 2.0, seed=5)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_add_up_to_what_the_rate_says_whatever_the_seed(seed: int) -> None:
    assert poisson_offsets(21, rate=4.0, seed=seed)[-1] == pytest.approx(5.0)


def test_poisson_gaps_have_the_spread_of_an_exponential() -> None:
    spaces = gaps(poisson_offsets(40_001, rate=20.0))
    assert statistics.mean(spaces) == pytest.approx(0.05)
    assert statistics.stdev(spaces) == pytest.approx(0.05, rel=0.02)
    # P(gap > mean) = 1/e
    assert sum(gap > 0.05 for gap in spaces) / len(spaces) == pytest.approx(0.368, abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    spaces = gaps(random_offsets(40_001, 20.0, burstiness, np.random.default_rng(0)))
    assert statistics.mean(spaces) == pytest.approx(0.05)
    assert statistics.stdev(spaces) == pytest.approx(0.05 / burstiness**0.5, rel=0.05)


def test_a_ramp_goes_from_the_first_rate_to_the_last() -> None:
    spaces = gaps(ramp_offsets(30_001, 10.0, 30.0, 1.0, np.random.default_rng(0)))
    assert statistics.mean(spaces[:1000]) == pytest.approx(1 / 10, rel=0.1)
    assert statistics.mean(spaces[14_500:15_500]) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.mean(spaces[-1000:]) == pytest.approx(1 / 30, rel=0.1)


@pytest.mark.asyncio
async def test_closed_loop_reaches_its_concurrency_and_never_exceeds_it() -> None:
    flights = Flights()
    flights.gate.set()
    await closed_loop(20, 3, flights.send)
    assert flights.peak == 3
    assert sorted(flights.intended) == list(range(20))


@pytest.mark.asyncio
async def test_closed_loop_sends_nothing_more_until_a_reply_has_ended() -> None:
    flights = Flights()
    loop = asyncio.create_task(closed_loop(5, 2, flights.send))
    for _ in range(10):
        await asyncio.sleep(0)
    assert sorted(flights.intended) == [0, 1]
    flights.gate.set()
    await loop
    assert sorted(flights.intended) == [0, 1, 2, 3, 4]


@pytest.mark.asyncio
async def test_closed_loop_needs_no_more_lanes_than_requests() -> None:
    flights = Flights()
    flights.gate.set()
    await closed_loop(2, 100, flights.send)
    assert flights.peak == 2


@pytest.mark.asyncio
async def test_closed_loop_of_nothing_ends_at_once() -> None:
    flights = Flights()
    await closed_loop(0, 8, flights.send)
    assert flights.intended == {}


@pytest.mark.asyncio
async def test_closed_loop_intends_each_request_when_it_sends_it() -> None:
    moments: list[Moment] = []

    async def send(_index: int, intended_at: float) -> None:
        moments.append(Moment(intended_at, perf_counter()))
        await asyncio.sleep(0.002)

    before = perf_counter()
    await closed_loop(3, 1, send)
    assert moments[0].intended >= before
    assert all(moment.intended <= moment.sent for moment in moments)
    assert all(later.intended - earlier.sent >= 0.0015 for earlier, later in pairwise(moments))


@pytest.mark.asyncio
async def test_open_loop_sends_all_though_none_has_ended() -> None:
    flights = Flights()
    loop = asyncio.create_task(open_loop([0.0, 0.001, 0.002, 0.003], flights.send))
    while flights.num_in_flight < 4:
        await asyncio.sleep(0.001)
    assert not loop.done()
    flights.gate.set()
    await loop
    assert flights.num_in_flight == 0


@pytest.mark.asyncio
async def test_open_loop_never_sends_early() -> None:
    sent_early_by: list[float] = []

    async def send(_index: int, intended_at: float) -> None:
        sent_early_by.append(intended_at - perf_counter())

    await open_loop([0.0, 0.004, 0.008], send)
    assert max(sent_early_by) <= 0.0


@pytest.mark.asyncio
async def test_a_late_open_loop_keeps_to_the_schedule_it_was_given() -> None:
    """Coordinated omission: the stall shifts when requests are sent, not when they were meant to be."""
    moments: list[Moment] = []

    async def send(index: int, intended_at: float) -> None:
        moments.append(Moment(intended_at, perf_counter()))
        if index == 0:
            time.sleep(0.02)

    await open_loop([0.0, 0.005, 0.010], send)
    start = moments[0].intended
    assert [moment.intended - start for moment in moments] == pytest.approx([0.0, 0.005, 0.010])
    assert moments[1].sent - moments[1].intended >= 0.014
    assert moments[2].sent - moments[2].intended >= 0.009


@pytest.mark.asyncio
async def test_an_open_loop_that_lags_still_sends_while_it_catches_up() -> None:
    order: list[str] = []

    async def send(index: int, _intended_at: float) -> None:
        order.append(f"sent {index}")
        await asyncio.sleep(0)
        order.append(f"ended {index}")

    await open_loop([-1.0] * 50, send)
    assert order.index("ended 0") < order.index("sent 49")
