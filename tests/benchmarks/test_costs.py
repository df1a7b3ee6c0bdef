"""The benchmarks of the host's own costs, in the small: every figure is there, whatever it is."""

import json
import sys
from pathlib import Path

import host_path
import pytest
import scheduler_cost
from harness import StepTimes, make_request, medians, timed_step

from chairlift.cache.ledger import SlotLedger
from chairlift.params import RequestOptions
from chairlift.scheduler import Scheduler
from tests.benchmarks.fakes import RunScript

# --- the scheduler


VERBS = ["schedule", "reserve", "advance", "update", "scheduler", "total"]


def test_all_parts_are_measured_and_the_last_line_is_json(run_script: RunScript, tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    small = ["--rows", "1", "4", "--waiting", "0", "10", "--prefix-slots", "3", "--prefix-tokens", "200"]
    ran = run_script(scheduler_cost, *small, "--steps", "60", "--rounds", "1", "--json", str(path))
    lines, report = ran.out.splitlines(), ran.report
    assert ran.code == 0
    assert json.loads(path.read_text(encoding="utf-8")) == report
    costs = report["microseconds"]
    assert list(costs["rows"]) == [
        "1 decode rows",
        "4 decode rows",
        "4 rows, half of them new",
        "4 rows, all of them new",
    ]
    assert len(costs["waiting"]) == 5 * 2
    assert list(costs["queue"]) == ["10 waiting"]
    verbs = ["add", "abort", "expire none", "expire each of many", "refuse", "displace"]
    assert list(costs["queue"]["10 waiting"]) == verbs
    assert len(costs["prefixes"]) == 5
    assert all(list(figures) == VERBS for part in ("rows", "waiting") for figures in costs[part].values())
    assert all(value > 0 for figures in costs["rows"].values() for value in figures.values())
    assert lines[0].startswith("1 decode rows ")
    assert list(costs["journal"]["4 rows"]) == ["note a step", "read", *VERBS]
    assert len(lines) == 4 + 10 + 1 + 1 + 5 + 1


def test_medians_are_of_each_verb_and_of_their_sums() -> None:
    times = [StepTimes(1e-6, 2e-6, 3e-6, 4e-6), StepTimes(3e-6, 2e-6, 1e-6, 0.0), StepTimes(2e-6, 9e-6, 2e-6, 2e-6)]
    assert medians(times) == {
        "schedule": 2.0,
        "reserve": 2.0,
        "advance": 2.0,
        "update": 2.0,
        "scheduler": 6.0,
        "total": 10.0,
    }


def test_a_timed_step_is_a_whole_step() -> None:
    slots = SlotLedger(2, 20)
    scheduler = Scheduler(slots, 8, 1, max_queue_size=0)
    requests = [make_request(3, 2, RequestOptions(tenant="a")), make_request(3, 1, opening=[7, 8])]
    assert requests[1].prompt_token_ids[:2] == [7, 8]
    scheduler.add(*requests)
    states = list(scheduler.waiting)
    timed_step(scheduler, slots)
    assert [state.num_output_tokens for state in states] == [1, 1]
    timed_step(scheduler, slots)
    assert not scheduler.has_work
    assert [state.num_output_tokens for state in states] == [2, 1]


# --- a server with all but a model


def test_a_small_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = ["--cases", "3x4", "--seconds", "1", "--output-tokens", "9", "--json", str(tmp_path / "report.json")]
    monkeypatch.setattr(sys, "argv", ["host_path.py", *flags])
    assert host_path.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("3 streams, 4 ms")
    report = json.loads(lines[-1])
    assert report == json.loads((tmp_path / "report.json").read_text())
    (figures,) = report["cases"]
    assert figures["ideal"] == 750
    assert figures["tokens_per_s"] > 0
    assert figures["idle"] < 1.0
    assert figures["ttft_ms"]["p50"] > 4.0  # the step that makes it
    assert figures["cpu_us"].pop("workers") == 0.0
    assert min(figures["cpu_us"].values()) > 0.0
