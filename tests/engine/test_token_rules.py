"""Words that are not written, tokens that are allowed, texts that repeat themselves: alone, together and in batches."""

import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift import LLM, SamplingParams
from chairlift.engine.sampling.drawing import prepare_graph_sampling
from chairlift.engine.sampling.token_rules import BadWords, PatternWatch, RuleFilter, TokenRules, compile_rules
from chairlift.errors import InvalidRequest
from chairlift.params import CompletionOutput, RepetitionDetection, StructuredOutputs
from tests.engine.support import END_TOKEN, GREEDY, PROMPTS, assert_idle, core_of, make_llm, make_request, tokens_of

STEPS = pytest.mark.parametrize("steps", [1, 4])
TOKENS = st.integers(0, 2)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=6)


def answer(llm: LLM, **fields: Any) -> CompletionOutput:
    return llm.generate("hi", SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields}))[0].outputs[0]


# --- bad words


@given(words=WORDS, text=st.lists(TOKENS, max_size=12))
@example(words=[[0, 1], [1, 2], [0, 1, 2], [2]], text=[0, 1])
def test_the_last_token_of_a_word_must_not_follow_the_others(words: list[list[int]], text: list[int]) -> None:
    followed = RuleFilter(TokenRules(BadWords(words), None))
    prompt = [0, 1, 2]  # does not count
    for size in range(len(text) + 1):
        generated = text[:size]
        expected = {word[-1] for word in words if ends_with(generated, word[:-1])}
        assert set(followed.forbidden_after(prompt + generated, 3).tolist()) == expected


def ends_with(tokens: list[int], end: list[int]) -> bool:
    return not end or tokens[-len(end) :] == end


@STEPS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_is_never_written(tiny: str, steps: int, temperature: float) -> None:
    words = ["ab", "ba", "aaa", " c"]
    fields: dict[str, Any] = {"allowed_token_ids": [*b"abc "], "temperature": temperature, "seed": 3}
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        text = answer(llm, bad_words=words, **fields).text
        assert any(word in answer(llm, **fields).text for word in words)
        assert_idle(llm)
    assert len(text) == 40
    assert not any(word in text for word in words)


def test_a_word_is_meant_at_the_beginning_and_behind_a_space() -> None:
    ids = {"word": [7], " word": [8], "two words": [1, 2], " two words": [3, 2], "same": [4], " same": [9, 4]}
    rules = compile_rules(SamplingParams(bad_words=["word", " two words", "same"]), ids.__getitem__, 10)
    assert rules is not None
    assert rules.bad_words is not None
    assert rules.bad_words.single.tolist() == [4, 7, 8]
    followed = RuleFilter(rules)
    assert followed.forbidden_after([1], 0).tolist() == [2, 4, 7, 8]
    assert followed.forbidden_after([1, 3], 0).tolist() == [2, 4, 7, 8]
    assert followed.forbidden_after([1, 3, 9], 0).tolist() == [4, 7, 8]


def test_a_word_that_the_model_has_no_tokens_for_forbids_nothing() -> None:
    assert compile_rules(SamplingParams(bad_words=["word"]), lambda _: [10], 10) is None


def test_bad_words_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="'word' has no tokens") as caught:
        compile_rules(SamplingParams(bad_words=["word"]), lambda _: [], 10)
    assert caught.value.param == "bad_words"
    with pytest.raises(InvalidRequest, match="65536 characters together"):
        compile_rules(SamplingParams(bad_words=["x" * 1024] * 65), lambda word: [1] * len(word), 10)
    with pytest.raises(InvalidRequest, match="65536 tokens together"):
        compile_rules(SamplingParams(bad_words=["x" * 1024] * 64), lambda word: [1, 2] * len(word), 10)


def test_a_thousand_words_cost_little_per_token() -> None:
    generator = random.Random(0)
    words = [[1] * size + [generator.randrange(2, 50)] for size in range(1, 340)]
    followed = [RuleFilter(TokenRules(BadWords(words), None)) for _ in range(16)]
    tokens: list[int] = []
    start = time.process_time()
    for _ in range(1000):
        tokens.append(1)
        for each in followed:
            forbidden = each.forbidden_after(tokens, 0)
    assert time.process_time() - start < 5.0
    assert len(forbidden) == len({word[-1] for word in words})


# --- allowed tokens


@STEPS
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 5.0, "seed": 1},
        {"temperature": 1.0, "seed": 2, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 3.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 0.0, "logit_bias": {ord("q"): 100.0}},
        {"temperature": 1.0, "seed": 4, "min_tokens": 40, "ignore_eos": False},
        {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 2},
    ],
)
def test_only_allowed_tokens_are_sampled(tiny: str, steps: int, fields: dict[str, Any]) -> None:
    allowed = {*b"xyz", END_TOKEN}
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields}, allowed_token_ids=sorted(allowed))
        (output,) = llm.generate("hi", params)
        assert_idle(llm)
    for choice in output.outputs:
        assert choice.error is None
        assert len(choice.token_ids) == 40
        assert set(choice.token_ids) <= allowed


def test_free_rows_beside_rows_with_rules_say_what_they_say_alone(native: str) -> None:
    ruled = GREEDY.model_copy(update={"allowed_token_ids": [*b"ab"], "bad_words": ["ab"]})
    with make_llm(native, batch_invariant=True) as llm:
        alone = tokens_of(llm.generate(PROMPTS, GREEDY))
        mixed = tokens_of(llm.generate(PROMPTS, [GREEDY if index % 2 else ruled for index in range(len(PROMPTS))]))
    assert mixed[1::2] == alone[1::2]


def test_a_grammar_and_allowed_tokens_are_both_kept(tiny: str) -> None:
    with make_llm(tiny) as llm:
        structure = StructuredOutputs(regex="[0-9]{4}")
        assert answer(llm, structured_outputs=structure, allowed_token_ids=[*b"7x"]).text == "7777"


@STEPS
def test_where_a_grammar_and_allowed_tokens_have_none_in_common_that_request_ends_alone(tiny: str, steps: int) -> None:
    structure = StructuredOutputs(regex="[0-9]{4}")
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:1], GREEDY))
        impossible = GREEDY.model_copy(update={"structured_outputs": structure, "allowed_token_ids": [*b"x"]})
        free, failed = llm.generate([PROMPTS[0], PROMPTS[1]], [GREEDY, impossible])
        assert free.outputs[0].token_ids == expected[0]
        assert failed.outputs[0].finish_reason == "abort"
        assert failed.outputs[0].error is not None
        assert "none was allowed" in failed.outputs[0].error
        assert core_of(llm)._scheduler.warm  # what others left in their slots is not distrusted for it
        assert_idle(llm)


def test_rows_with_rules_are_not_sampled_from_a_recorded_graph() -> None:
    request = make_request(SamplingParams(temperature=0.0))
    assert prepare_graph_sampling([request], 1) is not None
    request.token_filter = RuleFilter(TokenRules(BadWords([[1]]), None))
    assert prepare_graph_sampling([request], 1) is None
    assert not request.needs_newest_token  # words of one token are the same for every step


# --- repetition


def repeats(tokens: list[int], wanted: RepetitionDetection) -> bool:
    """As vLLM looks for it: every size of pattern by itself."""
    for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
        last = tokens[-size * wanted.min_count :]
        if len(last) == size * wanted.min_count and last == last[:size] * wanted.min_count:
            return True
    return False


@given(
    tokens=st.lists(st.integers(0, 1), max_size=80),
    smallest=st.integers(0, 4),
    more=st.integers(0, 4),
    num_times=st.integers(2, 5),
)
def test_a_repetition_is_seen_with_the_token_that_completes_it(
    tokens: list[int], smallest: int, more: int, num_times: int
) -> None:
    largest = max(1, smallest + more)
    wanted = RepetitionDetection(max_pattern_size=largest, min_pattern_size=smallest, min_count=num_times)
    watch = PatternWatch(wanted)
    for size, token in enumerate(tokens, start=1):
        assert watch(token) == repeats(tokens[:size], wanted)


@STEPS
def test_a_text_that_repeats_itself_ends_there(tiny: str, steps: int) -> None:
    wanted = RepetitionDetection(max_pattern_size=4, min_count=3)
    fields: dict[str, Any] = {"allowed_token_ids": [*b"ab"], "temperature": 1.0, "seed": 1, "logprobs": 0}
    with make_llm(tiny, max_steps_per_launch=steps) as llm:
        whole = answer(llm, **fields)
        ended = answer(llm, **fields, repetition_detection=wanted)
        later = answer(llm, **fields, repetition_detection=wanted, min_tokens=30)
        assert_idle(llm)
    (first, *_) = (n for n in range(1, 41) if repeats(whole.token_ids[:n], wanted))
    assert first < 40
    assert ended.token_ids == whole.token_ids[:first]
    assert ended.text == whole.text[:first]
    assert len(ended.logprobs or []) == first
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "repetition_detected")
    assert len(later.token_ids) >= 30


def test_each_choice_is_watched_by_itself(tiny: str) -> None:
    wanted = RepetitionDetection(max_pattern_size=2, min_count=4)
    params = SamplingParams(
        max_tokens=60, ignore_eos=True, n=5, seed=1, allowed_token_ids=[*b"ab"], repetition_detection=wanted
    )
    with make_llm(tiny) as llm:
        (output,) = llm.generate("hi", params)
    for choice in output.outputs:
        is_ended = choice.stop_reason == "repetition_detected"
        assert is_ended == repeats(choice.token_ids, wanted)
        assert not any(repeats(choice.token_ids[:size], wanted) for size in range(len(choice.token_ids)))


def test_the_largest_pattern_costs_little_per_token() -> None:
    watch = PatternWatch(RepetitionDetection(max_pattern_size=1024, min_pattern_size=512, min_count=1024))
    start = time.process_time()
    for _ in range(20_000):
        watch(1)
    assert time.process_time() - start < 5.0
    assert isinstance(watch._tokens, np.ndarray)
    assert watch._tokens.nbytes <= 2**15
