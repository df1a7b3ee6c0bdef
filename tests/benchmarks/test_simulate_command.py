"""benchmarks/simulate.py and simulate_fleet.py from flags to table, JSON and picture."""

import json
from pathlib import Path
from typing import Any

import pytest
import simulate
import simulate_fleet
from simulation import simulation

from chairlift.scheduler import Scheduler

from .conftest import RunScript

SMALL = ["--requests", "60", "--slots", "4", "--slot-tokens", "200", "--budgets", "64"]


def test_every_setting_is_a_column_and_the_last_line_is_json(run_script: RunScript, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    flags = ["--backlog", "10", "--tenants", "3", "--families", "2", "--family-tokens", "30", "--json", str(path)]
    code, output, _ = ran = run_script(simulate, *SMALL, *flags)
    assert code == 0
    names = ["first-come", "prefixes", "fair", "priorities", "preemption"]
    assert output.splitlines()[0].split() == names
    assert output.splitlines()[1].split() == ["requests", *["60"] * 5]
    report = ran.report
    assert json.loads(path.read_text(encoding="utf-8")) == report
    assert [each["setting"] for each in report["results"]] == names
    first_come, prefixes = report["results"][:2]
    assert first_come["prefix_hit_rate"] == 0.0
    assert prefixes["prefix_hit_rate"] > 0.05
    assert first_come["num_checks"] == first_come["num_steps"] + 1  # small: at every step
    assert first_come["slot_use"] > 0.9


def test_each_budget_is_simulated(run_script: RunScript) -> None:
    flags = ["--settings", "fair", "--budgets", "8", "64", "--cost", "8b-h200", "--load", "0.5"]
    results = run_script(simulate, *SMALL[:-2], *flags).report["results"]
    assert [each["setting"] for each in results] == ["fair 8", "fair 64"]


def test_a_workload_file_is_replayed(run_script: RunScript, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 50, "output_length": 3}
    path.write_text("\n".join(json.dumps({**line, "timestamp": 5000 * i}) for i in range(5)), encoding="utf-8")
    flags = ["--workload", str(path), "--settings", "first-come"]
    (figures,) = run_script(simulate, *flags).report["results"]
    assert (figures["num_requests"], figures["ttft"]["p50"]) == (5, pytest.approx(8.4e-3 + 50 * 131e-6))


LENGTHS = "N, uniform:LOW,HIGH, normal:MEAN,STD[,MAX] or lognormal:MEDIAN,SIGMA[,MAX]"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--budgets", "63"], "a budget of 63 tokens cannot feed 64 slots: raise --budgets"),
        (["--backlog", "0"], "--backlog must be above 0 and at most --queue, not 0"),
        (["--backlog", "9", "--queue", "8"], "--backlog must be above 0 and at most --queue, not 9"),
        (["--requests", "0"], "a workload needs at least 1 request, not 0"),
        (["--priorities", "0.5"], "the shares of the priorities must add up to 1, not 0.5"),
        (["--load", "0"], "the rate must be above 0 requests a second, not 0"),
        (["--flood", "1.5"], "a share must be between 0 and 1"),
        (["--tenants", "0"], "a workload needs at least 1 tenant, not 0"),
        (["--burstiness", "0"], "burstiness must be above 0, not 0"),
        (["--slot-tokens", "1"], "a slot must hold a prompt token and an output token, not 1 tokens"),
        (["--window", "0"], "the window must be above 0 seconds, not 0"),
        (["--turns", "few"], f"cannot read the length 'few': it must be {LENGTHS}, in numbers above 0"),
        (["--workload", "nowhere.jsonl"], "cannot read nowhere.jsonl: No such file or directory"),
    ],
)
def test_unusable_flags_get_one_line(run_script: RunScript, flags: list[str], complaint: str) -> None:
    ran = run_script(simulate, *flags)
    assert (ran.code, ran.err) == (2, f"simulate.py: {complaint}\n")


def test_a_breach_is_reported_and_ends_the_run(monkeypatch: pytest.MonkeyPatch, run_script: RunScript) -> None:
    class Forgetful(Scheduler):
        """Checks what it should not: that nobody is here."""

        def check(self) -> None:
            super().check()
            if self.num_running:
                raise AssertionError("somebody is here")

    monkeypatch.setattr(simulation, "Scheduler", Forgetful)
    ran = run_script(simulate, *SMALL, "--settings", "fair")
    assert (ran.code, ran.err) == (1, "WRONG: step 1: somebody is here\n")


# --- a fleet


FLEET = ["--requests", "300", "--replicas", "3", "--load", "2", "--turns", "4", "--pause", "1", "--tenants", "30"]
SHARED = ["--families", "5", "--family-share", "1", "--family-tokens", "200"]


def fleet_figures(run_script: RunScript, *flags: str) -> dict[str, Any]:
    """The figures of each router."""
    results = run_script(simulate_fleet, *FLEET, *SHARED, *flags).report["results"]
    return {each["router"]: each for each in results}


def test_prefixes_are_reused_as_far_as_a_router_brings_them_together(run_script: RunScript, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "fleet.json"), "--plot", str(tmp_path / "fleet.png")]
    figures = fleet_figures(run_script, *files)
    assert list(figures) == ["round robin", "least loaded", "hash of tenant", "prefix-aware"]
    assert {each["num_requests"] for each in figures.values()} == {300}
    reused = {name: each["hit_rate"] / each["known_rate"] for name, each in figures.items()}
    assert reused["prefix-aware"] > 0.95
    assert reused["round robin"] < 0.8 * reused["prefix-aware"]
    assert figures["round robin"]["imbalance"] < figures["hash of tenant"]["imbalance"]
    assert figures["prefix-aware"]["ttft"]["p99"] < figures["round robin"]["ttft"]["p99"]
    assert json.loads((tmp_path / "fleet.json").read_text())["results"] == list(figures.values())
    assert (tmp_path / "fleet.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_lost_replica_was_asked_others_answer(run_script: RunScript) -> None:
    flags = ["--load", "8", "--routers", "hash of tenant", "prefix-aware"]
    whole = fleet_figures(run_script, *flags)
    lossy = fleet_figures(run_script, *flags, "--lose-at", "1", "--downtime", "2")
    for name, figures in lossy.items():
        assert figures["num_requests"] == 300
        assert figures["num_asked_again"] > 0
        assert figures["ttft_after_loss"] is not None
        assert figures["hit_rate"] < whole[name]["hit_rate"]


def test_settings_that_make_no_sense_are_refused(run_script: RunScript) -> None:
    ran = run_script(simulate_fleet, "--requests", "0")
    assert (ran.code, "a workload needs at least 1 request, not 0" in ran.err) == (2, True)
