"""Synthetic workloads have the statistics that were asked for; files are read, and bad lines told."""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
from simulation.costs import LinearCost
from simulation.workload import Conversation, Prefix, Synthetic, Turn, capacity, conversations, opening, read_workload
from simulation.workload import text as text_of

from chairlift.loadtest.summary import BenchError


def drawn(**settings: Any) -> list[Conversation]:
    return list(conversations(Synthetic(**{"requests": 10_000, "slot_tokens": 2048, "rate": 10.0, **settings})))


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
    assert {conversation.arrival for conversation in drawn(rate=None)} == {0.0}


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
    few, many = drawn(requests=100, families=3), drawn(requests=5000, families=3)
    assert many[:100] == few
    assert drawn(requests=100, seed=1) != drawn(requests=100, seed=2)


def test_one_tenant_floods_and_the_others_share_the_rest_or_all_are_alike_and_priorities_have_their_shares() -> None:
    flooded = Counter(conversation.tenant for conversation in drawn(tenants=4, flood=0.7))
    assert flooded["t0"] == pytest.approx(7000, rel=0.03)
    assert [flooded[f"t{i}"] for i in (1, 2, 3)] == pytest.approx([1000] * 3, rel=0.1)
    alike = Counter(conversation.tenant for conversation in drawn(tenants=4))
    assert [alike[f"t{i}"] for i in range(4)] == pytest.approx([2500] * 4, rel=0.1)
    priorities = Counter(conversation.priority for conversation in drawn(priorities=(0.1, 0.9)))
    assert [priorities[0], priorities[1]] == [pytest.approx(1000, rel=0.1), 10_000 - priorities[0]]


def test_families_are_as_popular_as_zipf_says() -> None:
    workload = drawn(families=3, family_share=0.55, zipf=1.0, family_tokens="50")
    counts = Counter(conversation.prefixes for conversation in workload)
    assert counts[()] == pytest.approx(4500, rel=0.05)
    popular = [counts[(Prefix(family, 50),)] for family in range(3)]
    assert popular == pytest.approx([3000, 1500, 1000], rel=0.1)  # 5,500 as 1 : 1/2 : 1/3


def test_a_family_leaves_room_in_the_slot() -> None:
    workload = drawn(families=1, family_share=1.0, family_tokens="5000", slot_tokens=100)
    assert {conversation.prefixes for conversation in workload} == {(Prefix(0, 50),)}
    assert max(conversation.turns[0].num_new_tokens for conversation in workload) <= 49


def test_turns_of_all_conversations_are_as_many_as_were_asked_for() -> None:
    workload = drawn(turns="uniform:1,5", slot_tokens=300)
    assert sum(len(conversation.turns) for conversation in workload) == 10_000
    for conversation in workload:
        *before, last = conversation.turns
        said = sum(turn.num_new_tokens + turn.num_output_tokens for turn in before)
        assert said + last.num_new_tokens + last.max_tokens <= 300


def test_some_clients_are_impatient_and_some_requests_have_timeouts() -> None:
    turns = [conversation.turns[0] for conversation in drawn(impatient=0.2, patience=4.0, timeouts=0.1, timeout=7.0)]
    patience = [turn.patience for turn in turns if turn.patience is not None]
    assert len(patience) == pytest.approx(2000, rel=0.1)
    assert fmean(patience) == pytest.approx(4.0, rel=0.1)
    assert Counter(turn.timeout for turn in turns)[7.0] == pytest.approx(1000, rel=0.1)


def test_texts_begin_alike_only_if_they_have_the_same_number() -> None:
    firsts = [text_of(number, 1)[0] for number in range(100_000)]
    families = [opening((Prefix(family, 1),))[0] for family in range(1000)]
    assert len({*firsts, *families}) == 101_000
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
