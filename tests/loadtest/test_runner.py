"""The load test's watch over itself, and its live line."""

import asyncio
import sys
import time
from io import StringIO
from typing import cast

import pytest

from chairlift.loadtest.client import StreamClient
from chairlift.loadtest.runner import watching

from .samples import BUSY, failed, record


class Terminal(StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Counts:
    """The client as far as the watch looks at it."""

    num_running = 3
    num_chunks = 0


CLIENT = cast("StreamClient", Counts())


@pytest.mark.asyncio
async def test_a_blocked_event_loop_is_seen_as_lag() -> None:
    async with watching(CLIENT, 1) as watch:
        await asyncio.sleep(0.005)
        time.sleep(0.08)
        await asyncio.sleep(0.015)
    # The timer was due 10 ms after the start, at the earliest.
    assert max(watch.lags) >= 0.07


@pytest.mark.asyncio
async def test_lag_is_sampled_again_and_again_until_the_end() -> None:
    num_tasks = len(asyncio.all_tasks())
    async with watching(CLIENT, 1) as watch:
        while len(watch.lags) < 3:
            await asyncio.sleep(0.005)
    assert min(watch.lags) >= 0.0
    assert len(asyncio.all_tasks()) == num_tasks


@pytest.mark.asyncio
async def test_the_line_says_what_runs_what_came_and_what_failed() -> None:
    async with watching(CLIENT, 4) as watch:
        assert watch.status(1234.4) == "3 running, 1,234 tokens/s"
        watch.take(record(0))
        assert watch.status(0.0) == "3 running, 0 tokens/s, TTFT 1,000 ms"
        watch.take(failed(1, BUSY))
        assert watch.status(0.0) == "3 running, 0 tokens/s, TTFT 1,000 ms, 1 failed"


@pytest.mark.asyncio
async def test_a_terminal_sees_it_while_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("chairlift.loadtest.runner.TICKS_PER_REFRESH", 1)
    async with watching(CLIENT, 4):
        while "3 running" not in terminal.getvalue():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_file_sees_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.loadtest.runner.TICKS_PER_REFRESH", 1)
    async with watching(CLIENT, 1) as watch:
        await asyncio.sleep(0.02)
        watch.take(record(0))
    assert capsys.readouterr().err == ""
