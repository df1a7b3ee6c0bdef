"""Tests what a test will send, and when, from its settings alone, and the files that it is made from."""

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chairlift.loadtest import BenchConfig
from chairlift.loadtest.recordings import TraceLine, read_conversations, read_trace
from chairlift.loadtest.records import BenchError
from chairlift.loadtest.workload import WORDS, Workload, build_workload, distinct_draws, draw_one, random_offsets


def write(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def trace_line(timestamp: float, input_length: object = 6, output_length: int = 3, **others: object) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length} | others


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def chat_line(*texts: str, **fields: object) -> dict[str, object]:
    return {"messages": [message("user", text) for text in texts]} | fields


def workload(**settings: object) -> Workload:
    return build_workload(BenchConfig.model_validate(settings))


def refusal(path: Path, *lines: object, **settings: object) -> str:
    """Returns what is said against this file, of a trace or of conversations as its name says, and the settings."""
    with pytest.raises(BenchError) as caught:
        workload(**{path.stem: write(path, *lines) if lines else path}, **settings)
    return str(caught.value)


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    lines = [trace_line(2000, type="text", chat_id=[]), "", trace_line(500, hash_ids=[1, 2]), trace_line(1000.5)]
    path = write(tmp_path / "trace", *lines)
    found = read_trace(path, None)
    assert found[0] == TraceLine(timestamp=500, input_length=6, output_length=3, hash_ids=(1, 2))
    assert [line.timestamp for line in found] == [500, 1000.5, 2000]
    assert [line.timestamp for line in read_trace(path, 1)] == [500]
    told = f"{path} has 3 requests, not 4: lower --num-requests or leave it out"
    assert refusal(path, num_requests=4) == told


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{oops", "Invalid JSON: key must be a string at line 1 column 2"),
        ("3", "Input should be an object"),
        ('{"timestamp": 1, "output_length": 3}', "input_length: Field required"),
        (json.dumps(trace_line(1, "6")), "input_length: Input should be a valid integer"),
        (json.dumps(trace_line(1, 0)), "input_length: Input should be greater than or equal to 1"),
        (json.dumps(trace_line(-1)), "timestamp: Input should be greater than or equal to 0"),
        (json.dumps(trace_line(1, hash_ids=[1, -2])), "hash_ids: 1: Input should be greater than or equal to 0"),
    ],
)
def test_a_bad_line_is_told_by_its_number_and_text(tmp_path: Path, bad: str, said: str) -> None:
    path = tmp_path / "trace"
    assert refusal(path, trace_line(1), "", bad, trace_line(2)) == f"{path}, line 3: {said}: {bad}"


def test_a_long_bad_line_is_cut(tmp_path: Path) -> None:
    assert len(refusal(tmp_path / "trace", "x" * 10_000)) < 400


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    assert refusal(path) == f"cannot read {path}: No such file or directory"
    assert refusal(path, "", "  ") == f"{path} is empty: it must have one JSON object per line"
    path.write_bytes(b"\xff\xfe\x00")
    assert refusal(path) == f"cannot read {path}: it must be text in UTF-8, one JSON object per line"
    path.unlink()
    path.mkdir()
    assert refusal(path) == f"cannot read {path}: Is a directory"


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"prompt": "a"}, "messages: Field required"),
        ({"messages": ["a"]}, "messages: 0: Input should be an object"),
        (chat_line("a", output_tokens=0), "output_tokens: Input should be greater than 0"),
    ],
)
def test_bad_messages_are_told_by_their_line(tmp_path: Path, bad: object, said: str) -> None:
    path = tmp_path / "conversations"
    assert refusal(path, bad) == f"{path}, line 1: {said}: {json.dumps(bad)}"


def test_a_conversation_has_a_turn_for_each_message_of_the_user_which_keeps_all_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "conversations"
    system, answer, end = message("system", "be kind"), message("assistant", "1"), message("assistant", "2")
    first = {"role": "user", "content": [{"type": "text", "text": "a\u2028b"}], "name": "ann"}
    second = message("user", "two")
    messages = [system, first, answer, second, end]
    [line] = read_conversations(write(path, {"messages": messages, "output_tokens": 9, "id": 4}))
    assert (line.turns, line.output_tokens) == ([[system, first], [second]], 9)
    userless = f"{path}, conversation 2 has no message of role user, so it has no turn"
    assert refusal(path, {"messages": [second]}, {"messages": [system]}) == userless


def test_draws_are_uniform_over_every_choice_and_distinct_even_when_every_possible_one_is_needed() -> None:
    prompt = draw_one(40_000, 4, np.random.default_rng(3))
    assert len(prompt) == 40_000
    assert [prompt.count(choice) for choice in range(4)] == pytest.approx([10_000] * 4, rel=0.05)
    assert len(set(distinct_draws([2] * 16, 4, np.random.default_rng(0)))) == 16


def test_too_few_possible_prompts_are_refused_with_the_way_out() -> None:
    with pytest.raises(BenchError) as caught:
        workload(num_requests=96, prompt_tokens=1)
    assert str(caught.value) == (
        "96 prompts of 1 tokens cannot all differ: 95 choices for each token allow only 95; raise --prompt-tokens or "
        "lower --num-requests"
    )
    assert workload(num_requests=95, prompt_tokens=1, warmup=0).num_requests == 95


def offsets(count: int, rate: float, last_rate: float | None = None, burstiness: float = 1.0, seed: int = 0) -> Any:
    return random_offsets(count, rate, last_rate or rate, burstiness, np.random.default_rng(seed))


def gaps(*arguments: float, **settings: float) -> list[float]:
    return [later - earlier for earlier, later in pairwise(offsets(*arguments, **settings))]  # type: ignore[arg-type]


def test_offsets_begin_at_once_and_never_go_back() -> None:
    assert (len(offsets(1000, 50.0)), offsets(1000, 50.0)[0]) == (1000, 0.0)
    assert min(gaps(1000, 50.0)) >= 0.0
    assert offsets(1, 0.001) == offsets(1, 1.0, 2.0) == [0.0]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gaps_add_up_to_what_the_rate_says_whatever_the_seed(seed: int) -> None:
    assert offsets(21, 4.0, seed=seed)[-1] == pytest.approx(5.0)
    assert offsets(5, 2.0, seed=seed) == offsets(5, 2.0, seed=seed) != offsets(5, 2.0, seed=seed + 1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    spaces = gaps(40_001, 20.0, burstiness=burstiness)
    assert statistics.mean(spaces) == pytest.approx(0.05)
    assert statistics.stdev(spaces) == pytest.approx(0.05 / burstiness**0.5, rel=0.05)
    if burstiness == 1.0:  # exponential: P(gap > mean) = 1/e
        assert sum(gap > 0.05 for gap in spaces) / len(spaces) == pytest.approx(0.368, abs=0.01)


def test_a_ramp_goes_from_the_first_rate_to_the_last() -> None:
    spaces = gaps(30_001, 10.0, 30.0)
    parts = (spaces[:1000], spaces[14_500:15_500], spaces[-1000:])
    assert [statistics.mean(part) for part in parts] == pytest.approx([1 / 10, 1 / 20, 1 / 30], rel=0.1)


def prompts(found: Workload) -> list[list[int]]:
    return [turn.prompt["prompt"] for conversation in found.conversations for turn in conversation]


def contents(conversation: Any) -> list[list[str]]:
    return [[message["content"] for message in turn.prompt["messages"]] for turn in conversation]


def lengths(conversations: Any) -> list[tuple[int, int]]:
    """Returns the lengths of the prompt and the output of each conversation's only turn."""
    return [(turn.prompt_tokens, turn.output_tokens) for [turn] in conversations]


def test_words_are_distinct_and_single() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isalpha() and len(word) <= 6 for word in WORDS)


def test_a_hundred_random_requests_of_one_turn_in_a_closed_loop_are_the_default() -> None:
    found = workload()
    assert (found.num_requests, found.offsets) == (100, None)
    assert lengths(found.conversations) == [(128, 128)] * 100


def test_lengths_follow_their_distributions() -> None:
    found = workload(num_requests=300, prompt_tokens="uniform:2,4", output_tokens="uniform:5,6")
    told, expected = zip(*lengths(found.conversations), strict=True)
    assert [*told] == [len(prompt) for prompt in prompts(found)]
    assert (set(told), set(expected)) == ({2, 3, 4}, {5, 6})


def test_measured_prompts_are_the_same_with_any_warm_up_or_rate_and_all_differ() -> None:
    bare = workload(num_requests=3, warmup=0)
    assert prompts(workload(num_requests=3, warmup=2, request_rate=5.0)) == prompts(bare)
    assert prompts(workload(num_requests=30, warmup=0))[:3] == prompts(bare)
    assert prompts(workload(num_requests=3, warmup=0, seed=1)) != prompts(bare)


def test_warm_up_is_as_long_as_what_is_measured_but_of_other_tokens() -> None:
    found = workload(num_requests=3, warmup=4, prompt_tokens="uniform:20,90", output_tokens="uniform:2,90")
    measured = lengths(found.conversations)
    assert lengths(found.warm_up) == [*measured, measured[0]]
    assert not {tuple(turn.prompt["prompt"]) for [turn] in found.warm_up} & {tuple(each) for each in prompts(found)}


def test_a_rate_or_a_ramp_gives_every_conversation_its_time() -> None:
    found = workload(num_requests=11, request_rate=5.0).offsets
    ramp = workload(num_requests=2001, ramp=(1, 100)).offsets
    assert found is not None
    assert ramp is not None
    assert (len(found), found[0]) == (11, 0.0)
    assert found[-1] == pytest.approx(2.0)
    assert workload(num_requests=11, request_rate=5.0, burstiness=0.5).offsets != found
    assert ramp[1000] > 2 * (ramp[2000] - ramp[1000])


def test_families_share_their_prefixes() -> None:
    found = workload(num_requests=40, prefix_tokens=10, num_prefixes=3, prompt_tokens=4)
    assert {len(prompt) for prompt in prompts(found)} == {prompt for prompt, _ in lengths(found.conversations)} == {14}
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
    assert ([len(conversation) for conversation in found.conversations], found.num_requests) == ([3, 3, 1], 7)


def test_a_trace_gives_times_and_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", trace_line(500, 4, 2), trace_line(2000, 9, 3))
    found = workload(trace=path, trace_speedup=3.0)
    assert found.offsets == [0.0, 0.5]
    assert [len(prompt) for prompt in prompts(found)] == [4, 9]
    assert [turn.output_tokens for [turn] in found.conversations] == [2, 3]
    assert [turn.prompt_tokens for [turn] in found.warm_up] == [4]


def test_equal_block_ids_of_a_trace_are_equal_tokens(tmp_path: Path) -> None:
    blocks = {(7, 8, 9): 1100, (7, 8, 10): 1100, (7,): 600}
    path = write(tmp_path / "trace", *(trace_line(0, size, hash_ids=ids) for ids, size in blocks.items()))
    first, second, third = prompts(workload(trace=path))
    assert (len(first), len(second), len(third)) == (1100, 1100, 600)
    assert (first[:1024], first[:512]) == (second[:1024], third[:512])
    assert first[1024:] != second[1024:]
    assert first[512:600] != third[512:]


def test_conversations_of_a_file_are_cut_or_repeated_to_the_number_of_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "conversations", chat_line("a", "b"), chat_line("c"))
    asked: list[dict[str, int]] = [{}, {"num_requests": 1}, {"num_requests": 5}]
    found = [workload(conversations=path, **settings).conversations for settings in asked]
    first, second = [["a"], ["b"]], [["c"]]
    wanted = [[first, second], [first[:1]], [first, second, first]]
    assert [[contents(conversation) for conversation in each] for each in found] == wanted


def test_a_line_s_own_length_of_replies_counts_before_the_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "conversations", chat_line("a", "b"), chat_line("c", output_tokens=7))
    found = workload(conversations=path, output_tokens=5)
    assert [[turn.output_tokens for turn in conversation] for conversation in found.conversations] == [[5, 5], [7]]
    assert {turn.prompt_tokens for conversation in found.conversations for turn in conversation} == {None}
    assert len(contents(found.warm_up[0])[0][0].split()) == 128
