"""benchmarks/simulate_fleet.py: four routers over real schedulers, from flags to table, JSON and picture."""

import json
from pathlib import Path
from typing import Any

import simulate_fleet

from .fakes import RunScript

SMALL = ["--requests", "300", "--replicas", "3", "--load", "2", "--turns", "4", "--pause", "1", "--tenants", "30"]
SHARED = ["--families", "5", "--family-share", "1", "--family-tokens", "200"]


def simulate(run_script: RunScript, *flags: str) -> dict[str, Any]:
    """The figures of each router."""
    results = run_script(simulate_fleet, *SMALL, *SHARED, *flags).report["results"]
    return {each["router"]: each for each in results}


def test_prefixes_are_reused_as_far_as_a_router_brings_them_together(run_script: RunScript, tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "fleet.json"), "--plot", str(tmp_path / "fleet.png")]
    figures = simulate(run_script, *files)
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
    whole = simulate(run_script, *flags)
    lossy = simulate(run_script, *flags, "--lose-at", "1", "--downtime", "2")
    for name, figures in lossy.items():
        assert figures["num_requests"] == 300
        assert figures["num_asked_again"] > 0
        assert figures["ttft_after_loss"] is not None
        assert figures["hit_rate"] < whole[name]["hit_rate"]


def test_settings_that_make_no_sense_are_refused(run_script: RunScript) -> None:
    ran = run_script(simulate_fleet, "--requests", "0")
    assert ran.code == 2
    assert "a workload needs at least 1 request, not 0" in ran.err
