"""A minute of mixed load on a server of its own, and a little in this process: all is right and nothing is left."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.soak import __main__ as soak_command
from tests.soak.client import ClientLog, Ending
from tests.soak.load import Load, Verdict, Wave, growth, judge
from tests.soak.server import ServerState, Target, serving

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
    assert report["after"]["num_free_slots"] == report["after"]["num_slots"] == 8

    assert set(report["manners"]) == MANNERS
    # No buffer takes all that "full slot" sends, and its clients do not read on.
    assert outcomes_of(report, ANSWERED, "finished") | {"full slot"} == ANSWERED
    assert outcomes_of(report, REFUSED, "refused") == REFUSED
    assert outcomes_of(report, {"full slot", "withheld headers"}, "cut off") == {"full slot", "withheld headers"}
    assert outcomes_of(report, {"leaves within its body"}, "left") == {"leaves within its body"}
    totals = sum((Counter(counts) for counts in report["endings"].values()), Counter())
    assert min(totals["finished"], totals["queue full"], totals["left"]) > 50  # a minute of waves of all strengths


STATE = ServerState(8, 8, 0, 0, 0, 0, 0, num_tasks=5, num_threads=9, num_fds=20, num_objects=1000, rss_mb=300.0)


def test_a_soak_says_what_is_wrong_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"

    async def soak(seconds: float, seed: int) -> Verdict:
        assert (seconds, seed) == (120.0, 1)
        return Verdict({}, Counter(), {}, STATE, STATE, ["a slot is lost"])

    monkeypatch.setattr(soak_command, "soak", soak)
    monkeypatch.setattr(sys, "argv", ["soak", "--seed", "1", "--json", str(path)])
    assert soak_command.main() == 1
    assert "WRONG (seed 1): a slot is lost" in capsys.readouterr().out
    assert json.loads(path.read_text(encoding="utf-8"))["complaints"] == ["a slot is lost"]


def test_what_has_grown_beyond_what_is_allowed_is_told() -> None:
    assert growth(STATE, replace(STATE, num_threads=17, num_objects=6000, rss_mb=315.0)) == []
    assert growth(STATE, replace(STATE, num_tasks=6, num_fds=21, num_threads=18, rss_mb=316.0)) == [
        "there were 5 tasks, and now there are 6",
        "there were 20 open files, and now there are 21",
        "there were 9 threads, and now there are 18",
        "there were 300 MB of memory, and now there are 316",
    ]


# --- in small


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
