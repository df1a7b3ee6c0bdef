"""A minute of mixed load on a server of its own, and a little: all is right and nothing is left."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.soak import __main__ as soak_command
from tests.soak.__main__ import Load, Wave
from tests.soak.client import ClientLog, Ending, Entry
from tests.soak.server import State, soaked

ROOT = Path(__file__).parents[2]
MINUTES = 1
ANSWERED = {"JSON schema", "choice", "full slot", "known chat", "known completion", "long prompt", "only the prompt"}
ANSWERED |= {"regex", "response", "scored chat", "story", "tool call"}
REFUSED = {"huge body", "more than ever fits", "no HTTP", "no JSON", "nowhere", "other model", "withheld body"}
REFUSED |= {f"wrong {what}" for what in ("encoding", "field", "messages", "prompt", "response", "tools")}
MANNERS = {"patient", "leaves before the reply", "leaves within the reply", "reads slowly", "stops reading", "raw"}


def outcomes_of(report: dict[str, Any], kinds: set[str], ending: str) -> set[str]:
    """The kinds of request that ended so at least once."""
    return {kind for kind in kinds if report["endings"][kind].get(ending)}


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 240)
def test_after_a_minute_of_mixed_load_nothing_is_left_and_everything_was_right() -> None:
    command = [sys.executable, "-m", "tests.soak", "--minutes", str(MINUTES)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert result.returncode == 0, f"{result.stdout[-6000:]}\n{result.stderr[-6000:]}"
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["complaints"] == []
    assert set(report["manners"]) == MANNERS
    # No buffer takes all that "full slot" sends, and its clients do not read on.
    assert outcomes_of(report, ANSWERED, "finished") | {"full slot"} == ANSWERED
    assert outcomes_of(report, REFUSED, "refused") == REFUSED
    assert outcomes_of(report, {"full slot", "withheld headers"}, "cut off") == {"full slot", "withheld headers"}
    assert outcomes_of(report, {"leaves within its body"}, "left") == {"leaves within its body"}
    totals = sum((Counter(counts) for counts in report["endings"].values()), Counter())
    assert min(totals["finished"], totals["queue full"], totals["left"]) > 50  # a minute of waves of all strengths


SIZES = {"tasks": 5, "open files": 20, "threads": 9, "objects": 1000, "MB of memory": 300.0}
STATE = State({"slots taken": 0, "sequences": 0}, SIZES, [], {})


def test_a_soak_says_what_is_wrong_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"

    async def soak(url: str, seconds: float, seed: int) -> dict[str, Any]:
        assert (url, seconds, seed) == ("http://here", 120.0, 1)
        return {"complaints": ["a slot is lost"]}

    @contextmanager
    def soaked(is_forked: bool) -> Iterator[SimpleNamespace]:
        assert not is_forked
        yield SimpleNamespace(url="http://here", log=["12:00 INFO a\n", "12:00 ERROR b\n"])

    monkeypatch.setattr(soak_command, "soak", soak)
    monkeypatch.setattr(soak_command, "soaked", soaked)
    monkeypatch.setattr(sys, "argv", ["soak", "--seed", "1", "--json", str(path)])
    assert soak_command.main() == 1
    complaints = ["a slot is lost", "the server: 12:00 ERROR b"]
    assert capsys.readouterr().out.splitlines()[:2] == [f"WRONG (seed 1): {complaint}" for complaint in complaints]
    assert json.loads(path.read_text(encoding="utf-8"))["complaints"] == complaints


def test_what_is_left_or_has_grown_beyond_what_is_allowed_is_told() -> None:
    allowed = State(STATE.held, {**SIZES, "threads": 17, "objects": 6000, "MB of memory": 315.0}, [], {})
    assert Load("", 0).report(STATE, allowed)["complaints"] == []
    sizes = {**SIZES, "tasks": 6, "open files": 21, "threads": 18, "MB of memory": 316.0}
    assert Load("", 0, health_seconds=[0.1, 2.5]).report(STATE, State({"slots taken": 1}, sizes, [], {}))[
        "complaints"
    ] == [
        "there were 5 tasks, and now there are 6",
        "there were 20 open files, and now there are 21",
        "there were 9 threads, and now there are 18",
        "there were 300 MB of memory, and now there are 316",
        "at the end there are 1 slots taken",
        "/health took 2.5 s",
    ]


@pytest.mark.parametrize(
    ("ending", "told", "complaints"),
    [
        (Ending.FINISHED, {"0": ["200"]}, []),
        (Ending.FINISHED, {}, ["{}: the client saw 200, the server tells []"]),
        (
            Ending.FINISHED,
            {"0": ["left"]},
            ["{}: the client saw 200, the server tells ['left']"],
        ),
        (Ending.FINISHED, {"0": ["200"] * 2}, ["{} arrived 2 times: ['200', '200']"]),
        (Ending.FINISHED, {"0": ["200"], "7": [""]}, ["the server tells of requests that nobody sent: ['7']"]),
        (None, {}, ["{} did not end as it should: None"]),
        (Ending.FAILED, {"0": ["200"]}, ["{} did not end as it should: None"]),
        (Ending.LEFT, {}, []),  # it may have arrived or not, but not twice
        (Ending.LEFT, {"0": ["left"]}, []),
        (Ending.LEFT, {"0": ["200"]}, []),
        (Ending.LEFT, {"0": ["left", "200"]}, ["{} arrived 2 times: ['left', '200']"]),
    ],
)
def test_the_server_must_tell_the_same_of_a_request(
    ending: Ending | None, told: dict[str, list[str]], complaints: list[str]
) -> None:
    log = ClientLog([Entry(0, "story", "patient", ending, 200)])
    assert log.complaints(told) == [complaint.format("request 0 (story, patient)") for complaint in complaints]


@pytest.mark.slow
async def test_a_hundred_mixed_requests_are_all_accounted_for() -> None:
    with soaked(is_forked=True) as process:
        load = Load(process.url, seed=1)
        await load.put(Wave(num_clients=12, seconds=60.0, max_requests=70))
        await load.put(Wave(num_clients=30, seconds=2.0, is_cut=True, max_requests=40))
        after = await load.settle()
    assert load.report(after, after)["complaints"] == []
    assert [line for line in process.log if " ERROR " in line] == []
    assert len(load.client_log.entries) >= 100
    endings = {entry.ending for entry in load.client_log.entries}
    assert endings >= {Ending.FINISHED, Ending.QUEUE_FULL, Ending.REFUSED, Ending.LEFT}
