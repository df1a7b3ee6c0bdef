"""The live line."""

import asyncio
import sys
from io import StringIO

import pytest

from chairlift.bench.client import LiveCounts
from chairlift.bench.progress import ProgressLine

from .samples import BUSY, failed, record


class Terminal(StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.asyncio
async def test_the_line_says_what_runs_what_came_and_what_failed() -> None:
    progress = ProgressLine(4, LiveCounts(num_running=2))
    assert progress.text(1234.4) == "2 running, 1,234 tokens/s"
    progress.take(record(0))
    assert progress.text(0.0) == "2 running, 0 tokens/s, TTFT 1,000 ms"
    progress.take(failed(1, BUSY))
    assert progress.text(0.0) == "2 running, 0 tokens/s, TTFT 1,000 ms, 1 failed"


@pytest.mark.asyncio
async def test_a_terminal_sees_it_while_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("chairlift.bench.progress.REFRESH_S", 0.01)
    async with ProgressLine(4, LiveCounts(num_running=3)):
        while "3 running" not in terminal.getvalue():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_a_file_sees_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.bench.progress.REFRESH_S", 0.001)
    async with ProgressLine(1, LiveCounts()) as progress:
        await asyncio.sleep(0.01)
        progress.take(record(0))
    assert capsys.readouterr().err == ""
