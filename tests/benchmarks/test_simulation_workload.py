"""Synthetic workloads have the statistics that were asked for; files are read, and bad lines told."""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import pytest
from simulation.costs import LinearCost
from simulation.workload import (
    Conversation,
    Prefix,
    Synthetic,
    Turn,
    capacity,
    conversations,
    opening,
    read_workload,
    text,
)

from chairlift.loadtest.summary import BenchError


def drawn(**settings: Any) -> list[Conversation]:
    return list(conversations(Synthetic(**{"requests": 10_000, "slot_tokens": 2048, "rate": 10.0, **settings})))


def gaps(workload: list[Conversation]) -> list[float]:
    return [later.arrival - earlier.arrival for earlier, later in pairwise(workload)]


def test_arrivals_are_poisson_by_default() -> None:
    between = gaps(drawn())
    assert fmean(between) == pytest.approx(0.1, rel=0.03)
    assert stdev(between) == pytest.approx(0.1, rel=0.05)  # as the mean: exponential


def test_bursts_have_the_same_rate_and_more_spread() -> None:
    between = gaps(drawn(burstiness=0.1))
    assert fmean(between) == pytest.approx(0.1, rel=0.1)
    assert stdev(between) == pytest.approx(0.1 * 10**0.5, rel=0.1)


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


def test_one_tenant_floods_and_the_others_share_the_rest() -> None:
    counts = Counter(conversation.tenant for conversation in drawn(tenants=4, flood=0.7))
    assert counts["t0"] == pytest.approx(7000, rel=0.03)
    assert [counts[f"t{i}"] for i in (1, 2, 3)] == pytest.approx([1000] * 3, rel=0.1)


def test_tenants_are_alike_where_nobody_floods() -> None:
    counts = Counter(conversation.tenant for conversation in drawn(tenants=4))
    assert [counts[f"t{i}"] for i in range(4)] == pytest.approx([2500] * 4, rel=0.1)


def test_priorities_have_their_shares() -> None:
    counts = Counter(conversation.priority for conversation in drawn(priorities=(0.1, 0.9)))
    assert counts[0] == pytest.approx(1000, rel=0.1)
    assert counts[1] == 10_000 - counts[0]


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


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"requests": 0}, "a workload needs at least 1 request, not 0"),
        ({"flood": 1.5}, "a share must be between 0 and 1"),
        ({"priorities": (0.5, 0.6)}, "the shares of the priorities must add up to 1, not 1.1"),
        ({"tenants": 0}, "a workload needs at least 1 tenant, not 0"),
        ({"rate": 0.0}, "the rate must be above 0 requests a second, not 0"),
        ({"burstiness": 0.0}, "burstiness must be above 0, not 0"),
        ({"slot_tokens": 1}, "a slot must hold a prompt token and an output token, not 1 tokens"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        drawn(**settings)


def test_texts_begin_alike_only_if_they_have_the_same_number() -> None:
    firsts = [text(number, 1)[0] for number in range(100_000)]
    families = [opening((Prefix(family, 1),))[0] for family in range(1000)]
    assert len({*firsts, *families}) == 101_000
    assert opening((Prefix(5, 2), Prefix(7, 1))) == [*opening((Prefix(5, 2),)), *opening((Prefix(7, 1),))]


def test_capacity_is_what_slots_and_prompts_allow() -> None:
    cost = LinearCost(step=0.0, prompt_token=0.01, decode_row=0.001, context_token=0.0, copied_token=0.0)
    settings = Synthetic(2048, 10, prompt_tokens="50", output_tokens="500")
    # 50 tokens of prompt for 0.01 s, and 500 of output for 0.001 s each
    assert capacity(settings, num_slots=8, cost=cost) == pytest.approx(1.0)


def write(path: Path, *lines: dict[str, object] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


LINE: dict[str, object] = {"timestamp": 0, "input_length": 10, "output_length": 5}


def test_a_file_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.jsonl",
        {**LINE, "timestamp": 3000, "tenant": "a", "priority": -1, "timeout": 2.5},
        {**LINE, "timestamp": 1000},
        {**LINE, "timestamp": 2000, "input_length": 600, "hash_ids": [7, 8]},
    )
    assert read_workload(path, 1000, num_requests=None, speedup=2.0) == [
        Conversation(0.0, (Turn(10, 5, 5),)),
        Conversation(0.5, (Turn(0, 5, 5),), prefixes=(Prefix(7, 512), Prefix(8, 88))),
        Conversation(1.0, (Turn(10, 5, 5, timeout=2.5),), "a", -1),
    ]


def test_the_first_requests_of_a_file_can_be_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", *[{**LINE, "timestamp": time} for time in (2, 1, 3)])
    assert [each.arrival for each in read_workload(path, 100, num_requests=2, speedup=1.0)] == [0.0, 0.001]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Invalid JSON: EOF while parsing an object at line 1 column 1: {"),
        ({**LINE, "output_length": 0}, "line 2: output_length: Input should be greater than or equal to 1: "),
        ({**LINE, "priority": "high"}, "line 2: priority: Input should be a valid integer: "),
    ],
)
def test_a_bad_line_is_told_by_its_number_and_text(
    tmp_path: Path, line: dict[str, object] | str, complaint: str
) -> None:
    path = write(tmp_path / "trace.jsonl", LINE, line)
    with pytest.raises(BenchError) as refusal:
        read_workload(path, 100, num_requests=None, speedup=1.0)
    assert str(refusal.value).startswith(f"{path}, {complaint}")
    assert str(refusal.value).endswith(line if isinstance(line, str) else json.dumps(line))


def test_what_does_not_fit_into_a_slot_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", LINE)
    with pytest.raises(ValueError, match="has a request of 15 tokens: raise --slot-tokens, which is 14"):
        read_workload(path, 14, num_requests=None, speedup=1.0)
    with pytest.raises(ValueError, match="--speedup must be above 0, not 0"):
        read_workload(path, 15, num_requests=None, speedup=0.0)


def test_an_endless_draw_is_lazy() -> None:
    settings = Synthetic(2048, 10**12, rate=1.0)
    assert len(list(islice(conversations(settings), 3))) == 3
