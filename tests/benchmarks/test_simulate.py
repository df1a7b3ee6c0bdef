"""benchmarks/simulate.py and simulate_fleet.py from flags to table, JSON and picture; and their workloads."""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
import simulate
import simulate_fleet
from simulation import simulation
from simulation.costs import LinearCost
from simulation.workload import Conversation, Prefix, Synthetic, Turn, capacity, conversations, opening, read_workload
from simulation.workload import text as text_of

from chairlift.loadtest.records import BenchError
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


def drawn(**settings: Any) -> list[Conversation]:
    return list(conversations(Synthetic(**{"requests": 4_000, "slot_tokens": 2048, "rate": 10.0, **settings})))


def gaps(workload: list[Conversation]) -> list[float]:
    return [later.arrival - earlier.arrival for earlier, later in pairwise(workload)]


@pytest.mark.parametrize(
    ("settings", "spread", "tolerance"), [({}, 0.1, 0.03), ({"burstiness": 0.1}, 0.1 * 10**0.5, 0.1)]
)
def test_arrivals_are_poisson_by_default_and_bursts_have_the_same_rate_and_more_spread(
    settings: dict[str, float], spread: float, tolerance: float
) -> None:
    between = gaps(drawn(**settings))
    assert fmean(between) == pytest.approx(0.1, rel=tolerance)
    assert stdev(between) == pytest.approx(spread, rel=max(tolerance, 0.05))  # by default as the mean: exponential


def test_without_a_rate_all_are_there_from_the_start() -> None:
    assert {conversation.arrival for conversation in drawn(rate=None, requests=100)} == {0.0}


def test_lengths_are_heavy_tailed_and_end_with_the_slot() -> None:
    turns = [conversation.turns[0] for conversation in drawn(slot_tokens=600)]
    prompts = [turn.num_new_tokens for turn in turns]
    assert median(prompts) == pytest.approx(100, rel=0.05)
    assert max(prompts) > 5 * median(prompts)
    assert max(turn.num_new_tokens + turn.max_tokens for turn in turns) == 600
    assert all(1 <= turn.num_output_tokens <= turn.max_tokens for turn in turns)


def test_half_of_the_answers_end_before_they_must() -> None:
    turns = [conversation.turns[0] for conversation in drawn()]
    assert fmean(turn.num_output_tokens < turn.max_tokens for turn in turns) == pytest.approx(0.5, abs=0.02)


def test_more_requests_begin_with_the_same_ones() -> None:
    few, many = drawn(requests=100, families=3), drawn(requests=1000, families=3)
    assert many[:100] == few
    assert drawn(requests=100, seed=1) != drawn(requests=100, seed=2)


def test_one_tenant_floods_and_the_others_share_the_rest_or_all_are_alike_and_priorities_have_their_shares() -> None:
    flooded = Counter(conversation.tenant for conversation in drawn(tenants=4, flood=0.7))
    assert flooded["t0"] == pytest.approx(2800, rel=0.03)
    assert [flooded[f"t{i}"] for i in (1, 2, 3)] == pytest.approx([400] * 3, rel=0.1)
    alike = Counter(conversation.tenant for conversation in drawn(tenants=4))
    assert [alike[f"t{i}"] for i in range(4)] == pytest.approx([1000] * 4, rel=0.1)
    priorities = Counter(conversation.priority for conversation in drawn(priorities=(0.1, 0.9)))
    assert [priorities[0], priorities[1]] == [pytest.approx(400, rel=0.1), 4_000 - priorities[0]]


def test_families_are_as_popular_as_zipf_says() -> None:
    workload = drawn(families=3, family_share=0.55, zipf=1.0, family_tokens="50")
    counts = Counter(conversation.prefixes for conversation in workload)
    assert counts[()] == pytest.approx(1800, rel=0.05)
    popular = [counts[(Prefix(family, 50),)] for family in range(3)]
    assert popular == pytest.approx([1200, 600, 400], rel=0.1)  # 2,200 as 1 : 1/2 : 1/3


def test_a_family_leaves_room_in_the_slot() -> None:
    workload = drawn(families=1, family_share=1.0, family_tokens="5000", slot_tokens=100)
    assert {conversation.prefixes for conversation in workload} == {(Prefix(0, 50),)}
    assert max(conversation.turns[0].num_new_tokens for conversation in workload) <= 49


def test_turns_of_all_conversations_are_as_many_as_were_asked_for() -> None:
    workload = drawn(turns="uniform:1,5", slot_tokens=300)
    assert sum(len(conversation.turns) for conversation in workload) == 4_000
    for conversation in workload:
        *before, last = conversation.turns
        said = sum(turn.num_new_tokens + turn.num_output_tokens for turn in before)
        assert said + last.num_new_tokens + last.max_tokens <= 300


def test_some_clients_are_impatient_and_some_requests_have_timeouts() -> None:
    turns = [conversation.turns[0] for conversation in drawn(impatient=0.2, patience=4.0, timeouts=0.1, timeout=7.0)]
    patience = [turn.patience for turn in turns if turn.patience is not None]
    assert len(patience) == pytest.approx(800, rel=0.1)
    assert fmean(patience) == pytest.approx(4.0, rel=0.1)
    assert Counter(turn.timeout for turn in turns)[7.0] == pytest.approx(400, rel=0.1)


def test_texts_begin_alike_only_if_they_have_the_same_number() -> None:
    firsts = [text_of(number, 1)[0] for number in range(10_000)]
    families = [opening((Prefix(family, 1),))[0] for family in range(1000)]
    assert len({*firsts, *families}) == 11_000
    assert opening((Prefix(1, 2),))[:2] != text_of(1, 2)
    assert opening((Prefix(5, 2), Prefix(7, 1))) == [*opening((Prefix(5, 2),)), *opening((Prefix(7, 1),))]


def test_capacity_is_what_slots_and_prompts_allow() -> None:
    cost = LinearCost(step=0.0, prompt_token=0.01, decode_row=0.001, context_token=0.0, copied_token=0.0)
    settings = Synthetic(2048, 10, prompt_tokens="50", output_tokens="500")
    # 50 tokens of prompt for 0.01 s, and 500 of output for 0.001 s each
    assert capacity(settings, num_slots=8, cost=cost) == pytest.approx(1.0)


def write(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


LINE: dict[str, object] = {"timestamp": 0, "input_length": 10, "output_length": 5}


def test_a_file_is_read_in_order_of_time_and_its_first_requests_can_be_taken(tmp_path: Path) -> None:
    last = {**LINE, "timestamp": 3000, "tenant": "a", "priority": -1, "timeout": 2.5}
    second = {**LINE, "timestamp": 2000, "input_length": 600, "hash_ids": [7, 8]}
    path = write(tmp_path / "trace.jsonl", last, {**LINE, "timestamp": 1000}, second)
    conversations = [
        Conversation(0.0, (Turn(10, 5, 5),)),
        Conversation(0.5, (Turn(0, 5, 5),), prefixes=(Prefix(7, 512), Prefix(8, 88))),
        Conversation(1.0, (Turn(10, 5, 5, timeout=2.5),), "a", -1),
    ]
    assert read_workload(path, 1000, num_requests=None, speedup=2.0) == conversations
    assert read_workload(path, 1000, num_requests=2, speedup=2.0) == conversations[:2]


def test_a_bad_line_is_told_by_its_number_and_text_and_what_does_not_fit_into_a_slot_is_refused(tmp_path: Path) -> None:
    bad = {**LINE, "priority": "high"}
    path = write(tmp_path / "trace.jsonl", LINE, bad)
    with pytest.raises(BenchError) as refusal:
        read_workload(path, 100, num_requests=None, speedup=1.0)
    said = "line 2: priority: Input should be a valid integer: "
    assert str(refusal.value).startswith(f"{path}, {said}")
    assert str(refusal.value).endswith(json.dumps(bad))
    write(path, LINE)
    with pytest.raises(ValueError, match="has a request of 15 tokens: raise --slot-tokens, which is 14"):
        read_workload(path, 14, num_requests=None, speedup=1.0)
    with pytest.raises(ValueError, match="--speedup must be above 0, not 0"):
        read_workload(path, 15, num_requests=None, speedup=0.0)


def test_an_endless_draw_is_lazy() -> None:
    assert len(list(islice(conversations(Synthetic(2048, 10**12, rate=1.0)), 3))) == 3
