"""The load test's watch over itself."""

import asyncio
import time

import pytest

from chairlift.bench.own_load import OwnLoadWatch


@pytest.mark.asyncio
async def test_a_blocked_event_loop_is_seen_as_lag() -> None:
    async with OwnLoadWatch() as watch:
        await asyncio.sleep(0.005)
        time.sleep(0.08)
        await asyncio.sleep(0.015)
        load = watch.read()
    # The timer was due 10 ms after the start, at the earliest.
    assert max(load.lags) >= 0.07


@pytest.mark.asyncio
async def test_lag_is_sampled_again_and_again() -> None:
    async with OwnLoadWatch() as watch:
        while len(watch.read().lags) < 3:
            await asyncio.sleep(0.005)
        assert min(watch.read().lags) >= 0.0


@pytest.mark.asyncio
async def test_only_the_time_that_the_thread_computed_counts_as_busy() -> None:
    async with OwnLoadWatch() as watch:
        await asyncio.sleep(0.05)
        idle = watch.read().busy_share
        until = time.thread_time() + 0.2
        while time.thread_time() < until:
            pass
        busy = watch.read().busy_share
    assert 0.0 <= idle < busy <= 1.01


@pytest.mark.asyncio
async def test_nothing_runs_on_after_the_end() -> None:
    before = len(asyncio.all_tasks())
    async with OwnLoadWatch():
        assert len(asyncio.all_tasks()) == before + 1
    assert len(asyncio.all_tasks()) == before
