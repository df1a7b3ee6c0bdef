"""What a test will send, and when, from its settings alone, and the files that it is made from."""

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.summary import BenchError
from chairlift.loadtest.workload import (
    WORDS,
    Draws,
    TraceLine,
    Workload,
    build_workload,
    distinct_draws,
    draw_one,
    random_offsets,
    read_conversations,
    read_trace,
)


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def trace_line(timestamp: float, **fields: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": 6, "output_length": 3} | fields


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        trace_line(2000, type="text", chat_id=[]),
        "",
        trace_line(500, hash_ids=[1, 2]),
        trace_line(1000.5),
    )
    lines = read_trace(path, None)
    assert lines[0] == TraceLine(timestamp=500, input_length=6, output_length=3, hash_ids=(1, 2))
    assert [line.timestamp for line in lines] == [500, 1000.5, 2000]


def test_only_the_first_requests_of_a_trace_may_be_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", trace_line(2), trace_line(1))
    assert [line.timestamp for line in read_trace(path, 1)] == [1]
    with pytest.raises(BenchError) as caught:
        read_trace(path, 3)
    assert str(caught.value) == f"{path} has 2 requests, not 3: lower --num-requests or leave it out"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{oops", "Invalid JSON: key must be a string at line 1 column 2"),
        ("3", "Input should be an object"),
        ('{"timestamp": 1, "output_length": 3}', "input_length: Field required"),
        (json.dumps(trace_line(1, input_length="6")), "input_length: Input should be a valid integer"),
        (json.dumps(trace_line(1, input_length=0)), "input_length: Input should be greater than or equal to 1"),
        (json.dumps(trace_line(-1)), "timestamp: Input should be greater than or equal to 0"),
        (json.dumps(trace_line(1, hash_ids=[1, -2])), "hash_ids: 1: Input should be greater than or equal to 0"),
    ],
)
def test_a_bad_line_is_told_by_its_number_and_text(tmp_path: Path, bad: str, said: str) -> None:
    path = write(tmp_path / "t.jsonl", trace_line(1), "", bad, trace_line(2))
    with pytest.raises(BenchError) as caught:
        read_trace(path, None)
    assert str(caught.value) == f"{path}, line 3: {said}: {bad}"


def test_a_long_bad_line_is_cut(tmp_path: Path) -> None:
    with pytest.raises(BenchError) as caught:
        read_trace(write(tmp_path / "t.jsonl", "x" * 10_000), None)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    missing, empty, binary = tmp_path / "missing", write(tmp_path / "empty", "", "  "), tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, said in [
        (missing, f"cannot read {missing}: No such file or directory"),
        (tmp_path, f"cannot read {tmp_path}: Is a directory"),
        (empty, f"{empty} is empty: it must have one JSON object per line"),
        (binary, f"cannot read {binary}: it must be text in UTF-8, one JSON object per line"),
    ]:
        with pytest.raises(BenchError) as caught:
            read_trace(path, None)
        assert str(caught.value) == said


def test_messages_are_kept_with_all_their_fields(tmp_path: Path) -> None:
    sent = {"role": "user", "content": [{"type": "text", "text": "a\u2028b"}], "name": "ann"}
    [line] = read_conversations(write(tmp_path / "c.jsonl", {"messages": [sent], "output_tokens": 9, "id": 4}))
    assert line.turns == [[sent]]
    assert line.output_tokens == 9


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompt": "a"}, "messages: Field required"),
        ({"messages": ["a"]}, "messages: 0: Input should be an object"),
        ({"messages": [message("user", "a")], "output_tokens": 0}, "output_tokens: Input should be greater than 0"),
    ],
)
def test_bad_messages_are_told_by_their_line(tmp_path: Path, bad: object, said: str) -> None:
    path = write(tmp_path / "c.jsonl", bad)
    with pytest.raises(BenchError) as caught:
        read_conversations(path)
    assert str(caught.value) == f"{path}, line 1: {said}: {json.dumps(bad)}"


def test_a_conversation_has_a_turn_for_each_message_of_the_user(tmp_path: Path) -> None:
    system, first = message("system", "be kind"), message("user", "one")
    answer, second = message("assistant", "1"), message("user", "two")
    path = write(tmp_path / "c.jsonl", {"messages": [system, first, answer, second, message("assistant", "2")]})
    [line] = read_conversations(path)
    assert line.turns == [[system, first], [second]]


def test_a_conversation_without_a_user_is_refused(tmp_path: Path) -> None:
    lines = [{"messages": [message(role, "a")]} for role in ("user", "system")]
    path = write(tmp_path / "c.jsonl", *lines)
    with pytest.raises(BenchError) as caught:
        read_conversations(path)
    assert str(caught.value) == f"{path}, conversation 2 has no message of role user, so it has no turn"


def draws(lengths: list[int], num_choices: int = 95, seed: int = 0) -> list[Draws]:
    return distinct_draws(lengths, num_choices, np.random.default_rng(seed))


def test_draws_are_uniform_over_every_choice_and_no_other() -> None:
    prompt = draw_one(40_000, 4, np.random.default_rng(3))
    assert len(prompt) == 40_000
    assert [prompt.count(choice) for choice in range(4)] == pytest.approx([10_000] * 4, rel=0.05)


def test_prompts_are_distinct_even_when_every_possible_one_is_needed() -> None:
    assert len(set(draws([2] * 16, num_choices=4))) == 16


def test_too_few_possible_prompts_are_refused_with_the_way_out() -> None:
    with pytest.raises(BenchError) as caught:
        workload(num_requests=96, prompt_tokens=1)
    assert str(caught.value) == (
        "96 prompts of 1 tokens cannot all differ: 95 choices for each token allow only 95; raise --prompt-tokens or "
        "lower --num-requests"
    )
    assert workload(num_requests=95, prompt_tokens=1, warmup=0).num_requests == 95


def poisson_offsets(count: int, rate: float, seed: int = 0) -> list[float]:
    return random_offsets(count, rate, rate, 1.0, np.random.default_rng(seed))


def gaps(offsets: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(offsets)]


def test_offsets_begin_at_once_and_never_go_back() -> None:
    offsets = poisson_offsets(1000, rate=50.0)
    assert (len(offsets), offsets[0]) == (1000, 0.0)
    assert min(gaps(offsets)) >= 0.0
    assert poisson_offsets(1, rate=0.001) == [0.0]
    assert random_offsets(1, 1.0, 2.0, 1.0, np.random.default_rng(0)) == [0.0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_add_up_to_what_the_rate_says_whatever_the_seed(seed: int) -> None:
    assert poisson_offsets(21, rate=4.0, seed=seed)[-1] == pytest.approx(5.0)
    assert poisson_offsets(5, 2.0, seed=seed) == poisson_offsets(5, 2.0, seed=seed)
    assert poisson_offsets(5, 2.0, seed=seed) != poisson_offsets(5, 2.0, seed=seed + 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    spaces = gaps(random_offsets(40_001, 20.0, 20.0, burstiness, np.random.default_rng(0)))
    assert statistics.mean(spaces) == pytest.approx(0.05)
    assert statistics.stdev(spaces) == pytest.approx(0.05 / burstiness**0.5, rel=0.05)
    if burstiness == 1.0:  # exponential: P(gap > mean) = 1/e
        assert sum(gap > 0.05 for gap in spaces) / len(spaces) == pytest.approx(0.368, abs=0.01)


def test_a_ramp_goes_from_the_first_rate_to_the_last() -> None:
    spaces = gaps(random_offsets(30_001, 10.0, 30.0, 1.0, np.random.default_rng(0)))
    assert statistics.mean(spaces[:1000]) == pytest.approx(1 / 10, rel=0.1)
    assert statistics.mean(spaces[14_500:15_500]) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.mean(spaces[-1000:]) == pytest.approx(1 / 30, rel=0.1)


def test_words_are_distinct_and_single() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() and len(word) <= 6 for word in WORDS)


def workload(**settings: object) -> Workload:
    return build_workload(BenchConfig.model_validate(settings))


def prompts(found: Workload) -> list[list[int]]:
    return [turn.prompt["prompt"] for conversation in found.conversations for turn in conversation]


def contents(conversation: Any) -> list[list[str]]:
    return [[message["content"] for message in turn.prompt["messages"]] for turn in conversation]


def chat_line(*texts: str, **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": text} for text in texts]} | fields


def test_a_hundred_random_requests_of_one_turn_in_a_closed_loop_are_the_default() -> None:
    found = workload()
    assert found.num_requests == 100
    assert found.offsets is None
    assert {len(conversation) for conversation in found.conversations} == {1}
    assert {(turn.prompt_tokens, turn.output_tokens) for [turn] in found.conversations} == {(128, 128)}


def test_lengths_follow_their_distributions() -> None:
    found = workload(num_requests=300, prompt_tokens="uniform:2,4", output_tokens="uniform:5,6")
    assert {len(prompt) for prompt in prompts(found)} == {2, 3, 4}
    assert [turn.prompt_tokens for [turn] in found.conversations] == [len(prompt) for prompt in prompts(found)]
    assert {turn.output_tokens for [turn] in found.conversations} == {5, 6}


def test_measured_prompts_are_the_same_with_any_warm_up_or_rate_and_all_differ() -> None:
    bare = workload(num_requests=3, warmup=0)
    assert prompts(workload(num_requests=3, warmup=2, request_rate=5.0)) == prompts(bare)
    assert prompts(workload(num_requests=30, warmup=0))[:3] == prompts(bare)
    assert prompts(workload(num_requests=3, warmup=0, seed=1)) != prompts(bare)


def test_warm_up_is_as_long_as_what_is_measured_but_of_other_tokens() -> None:
    found = workload(num_requests=3, warmup=4, prompt_tokens="uniform:20,90", output_tokens="uniform:2,90")
    measured = [(turn.prompt_tokens, turn.output_tokens) for [turn] in found.conversations]
    assert [(turn.prompt_tokens, turn.output_tokens) for [turn] in found.warm_up] == [*measured, measured[0]]
    assert not {tuple(turn.prompt["prompt"]) for [turn] in found.warm_up} & {tuple(each) for each in prompts(found)}


def test_a_rate_or_a_ramp_gives_every_conversation_its_time() -> None:
    found = workload(num_requests=11, request_rate=5.0)
    assert found.offsets is not None
    assert (len(found.offsets), found.offsets[0]) == (11, 0.0)
    assert found.offsets[-1] == pytest.approx(2.0)
    assert workload(num_requests=11, request_rate=5.0, burstiness=0.5).offsets != found.offsets
    ramp = workload(num_requests=2001, ramp=(1, 100)).offsets
    assert ramp is not None
    assert ramp[1000] > 2 * (ramp[2000] - ramp[1000])


def test_families_share_their_prefixes() -> None:
    found = workload(num_requests=40, prefix_tokens=10, num_prefixes=3, prompt_tokens=4)
    assert {len(prompt) for prompt in prompts(found)} == {14}
    assert {turn.prompt_tokens for [turn] in found.conversations} == {14}
    assert len({tuple(prompt[:10]) for prompt in prompts(found)}) == 3
    assert len({tuple(prompt[10:]) for prompt in prompts(found)}) == 40


def test_a_prefix_of_a_chat_is_the_system_message_of_its_first_turn() -> None:
    found = workload(num_requests=4, turns=2, prefix_tokens=3, prompt_tokens=5)
    [first, _] = found.conversations[0]
    assert [message["role"] for message in first.prompt["messages"]] == ["system", "user"]
    assert len(found.conversations) == 2
    for conversation in found.conversations:
        [[system, question], [following]] = contents(conversation)
        assert [len(text.split()) for text in (system, question, following)] == [3, 5, 5]
        assert [turn.prompt_tokens for turn in conversation] == [8, None]


def test_the_last_conversation_is_cut_to_the_number_of_requests() -> None:
    found = workload(num_requests=7, turns=3)
    assert [len(conversation) for conversation in found.conversations] == [3, 3, 1]
    assert found.num_requests == 7


def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    lines = [{"timestamp": 500, "input_length": 4, "output_length": 2}]
    path = write(tmp_path / "t.jsonl", *lines, {"timestamp": 2000, "input_length": 9, "output_length": 3})
    found = workload(trace=path, trace_speedup=3.0)
    assert found.offsets == [0.0, 0.5]
    assert [len(prompt) for prompt in prompts(found)] == [4, 9]
    assert [turn.output_tokens for [turn] in found.conversations] == [2, 3]
    assert [turn.prompt_tokens for [turn] in found.warm_up] == [4]


def test_equal_block_ids_of_a_trace_are_equal_tokens(tmp_path: Path) -> None:
    blocks = {(7, 8, 9): 1100, (7, 8, 10): 1100, (7,): 600}
    lines = [
        {"timestamp": 0, "input_length": size, "output_length": 1, "hash_ids": ids} for ids, size in blocks.items()
    ]
    path = write(tmp_path / "t.jsonl", *lines)
    first, second, third = prompts(workload(trace=path))
    assert (len(first), len(second), len(third)) == (1100, 1100, 600)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    assert first[:512] == third[:512]
    assert first[512:600] != third[512:]


def test_conversations_of_a_file_are_cut_or_repeated_to_the_number_of_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", chat_line("a", "b"), chat_line("c"))

    def found(**settings: object) -> list[list[list[str]]]:
        return [contents(conversation) for conversation in workload(conversations=path, **settings).conversations]

    assert found() == [[["a"], ["b"]], [["c"]]]
    assert found(num_requests=1) == [[["a"]]]
    assert found(num_requests=5) == [[["a"], ["b"]], [["c"]], [["a"], ["b"]]]


def test_a_line_s_own_length_of_replies_counts_before_the_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", chat_line("a", "b"), chat_line("c", output_tokens=7))
    found = workload(conversations=path, output_tokens=5)
    assert [[turn.output_tokens for turn in conversation] for conversation in found.conversations] == [[5, 5], [7]]
    assert {turn.prompt_tokens for conversation in found.conversations for turn in conversation} == {None}
    assert len(contents(found.warm_up[0])[0][0].split()) == 128
