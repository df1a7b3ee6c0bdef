"""Two minutes of mixed load on a server of its own: nothing is wrong in the end, and everything was tried."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MINUTES = 2

ANSWERED = {
    "JSON schema",
    "choice",
    "full slot",
    "known chat",
    "known completion",
    "long prompt",
    "only the prompt",
    "regex",
    "response",
    "scored chat",
    "story",
    "tool call",
}
REFUSED = {
    "huge body",
    "more than ever fits",
    "no HTTP",
    "no JSON",
    "nowhere",
    "other model",
    "withheld body",
    "wrong encoding",
    "wrong field",
    "wrong messages",
    "wrong prompt",
    "wrong response",
    "wrong tools",
}
MANNERS = {"patient", "leaves before the reply", "leaves within the reply", "reads slowly", "stops reading", "raw"}


def run_soak(*flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.soak", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)


def outcomes_of(report: dict[str, Any], kinds: set[str], ending: str) -> set[str]:
    """The kinds of request that ended so at least once."""
    return {kind for kind in kinds if report["endings"][kind].get(ending)}


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 240)
def test_after_two_minutes_of_mixed_load_nothing_is_left_and_everything_was_right() -> None:
    result = run_soak("--minutes", str(MINUTES))
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
    assert min(totals["finished"], totals["queue full"], totals["left"]) > 100


def test_a_soak_says_what_is_wrong_and_fails(tmp_path: Path) -> None:
    """For instance of a server that is not there."""
    path = tmp_path / "report.json"
    result = run_soak("--minutes", "0.02", "--url", "http://127.0.0.1:9", "--seed", "1", "--json", str(path))
    assert result.returncode == 1
    assert "WRONG (seed 1): request 0 (" in result.stdout
    assert json.loads(path.read_text(encoding="utf-8"))["complaints"] != []
