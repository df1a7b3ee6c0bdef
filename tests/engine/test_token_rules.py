"""Words that are not written, tokens that are allowed, texts that repeat themselves, penalties, and min_tokens."""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from chairlift import LLM, SamplingParams
from chairlift.engine.sampling.drawing import prepare_graph_sampling
from chairlift.engine.sampling.sampler import Sampler
from chairlift.engine.sampling.token_rules import BadWords, PatternWatch, RuleFilter, TokenRules, compile_rules
from chairlift.errors import InvalidRequest
from chairlift.params import CompletionOutput, RepetitionDetection, StructuredOutputs
from chairlift.scheduler import RequestState
from tests.engine.support import END_TOKEN, GREEDY, PROMPTS, assert_idle, make_llm, make_request, row_of, tokens_of

TOKENS = st.integers(0, 2)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=6)


@pytest.fixture(scope="module", params=[1, 4], ids=["1 step", "4 steps"])
def llm(tiny: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """So many steps a launch."""
    with make_llm(tiny, max_steps_per_launch=request.param) as llm:
        yield llm
        assert_idle(llm)


def answer(llm: LLM, **fields: Any) -> CompletionOutput:
    return llm.generate("hi", SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields}))[0].outputs[0]


@given(words=WORDS, text=st.lists(TOKENS, max_size=12))
@example(words=[[0, 1], [1, 2], [0, 1, 2], [2]], text=[0, 1])
def test_the_last_token_of_a_word_must_not_follow_the_others(words: list[list[int]], text: list[int]) -> None:
    followed = RuleFilter(TokenRules(BadWords(words), None))
    prompt = [0, 1, 2]  # does not count
    for size in range(len(text) + 1):
        ends = [text[max(0, size - num) : size] for num in range(4)]  # of what was generated
        expected = {word[-1] for word in words if word[:-1] == ends[len(word) - 1]}
        assert set(followed.forbidden_after(prompt + text[:size], 3).tolist()) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_is_never_written(llm: LLM, temperature: float) -> None:
    words = ["ab", "ba", "aaa", " c"]
    fields: dict[str, Any] = {"allowed_token_ids": [*b"abc "], "temperature": temperature, "seed": 3}
    text = answer(llm, bad_words=words, **fields).text
    assert any(word in answer(llm, **fields).text for word in words)
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


@pytest.mark.parametrize(
    ("words", "tokens_each", "said"),
    [
        (["word"], 0, "'word' has no tokens"),
        (["x" * 1024] * 65, 1, "65536 characters together"),
        (["x" * 1024] * 64, 2, "65536 tokens together"),
    ],
)
def test_bad_words_that_cannot_be_are_refused_by_name(words: list[str], tokens_each: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        compile_rules(SamplingParams(bad_words=words), lambda word: [1] * tokens_each * len(word), 10)
    assert caught.value.param == "bad_words"


def test_many_words_cost_less_per_token_than_a_look_for_each() -> None:
    generator = random.Random(0)
    words = [[1] * size + [generator.randrange(2, 50)] for size in range(1, 340)]
    followed = RuleFilter(TokenRules(BadWords(words), None))
    tokens: list[int] = []
    cost = cost_of_looking = 0.0
    for _ in range(600):
        tokens.append(1)
        start = time.process_time()
        forbidden = followed.forbidden_after(tokens, 0)
        cost, start = cost + time.process_time() - start, time.process_time()
        expected = {word[-1] for word in words if tokens[1 - len(word) :] == word[:-1]}
        cost_of_looking += time.process_time() - start
        assert set(forbidden.tolist()) == expected
    assert cost < cost_of_looking  # about 0.4 of it


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
def test_only_allowed_tokens_are_sampled(llm: LLM, fields: dict[str, Any]) -> None:
    allowed = {*b"xyz", END_TOKEN}
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True, **fields}, allowed_token_ids=sorted(allowed))
    for choice in llm.generate("hi", params)[0].outputs:
        assert (choice.error, len(choice.token_ids)) == (None, 40)
        assert set(choice.token_ids) <= allowed


def test_a_grammar_and_allowed_tokens_are_both_kept_and_where_they_share_none_that_request_ends_alone(llm: LLM) -> None:
    ruled = GREEDY.model_copy(update={"structured_outputs": StructuredOutputs(regex="[0-9]{4}")})
    both, neither = (ruled.model_copy(update={"allowed_token_ids": [*allowed]}) for allowed in (b"7x", b"x"))
    (expected,) = tokens_of(llm.generate(PROMPTS[:1], GREEDY))
    free, kept, failed = (output.outputs[0] for output in llm.generate(PROMPTS[:3], [GREEDY, both, neither]))
    assert (free.token_ids, kept.text, failed.finish_reason) == (expected, "7777", "abort")
    assert "no token was allowed" in (failed.error or "")


def test_rows_with_rules_are_not_sampled_from_a_recorded_graph() -> None:
    params, rules = SamplingParams(temperature=0.0), TokenRules(BadWords([[1]]), None)
    assert prepare_graph_sampling([row_of(make_request(params))], 1) is not None
    request = make_request(params, new_token_filter=partial(RuleFilter, rules))
    assert prepare_graph_sampling([row_of(request)], 1) is None
    assert not request.needs_newest_token  # words of one token are the same for every step


def repeats(tokens: list[int], wanted: RepetitionDetection) -> bool:
    """As vLLM looks for it: every size of pattern by itself."""
    for size in range(max(1, wanted.min_pattern_size), wanted.max_pattern_size + 1):
        last = tokens[-size * wanted.min_count :]
        if len(last) == size * wanted.min_count and last == last[:size] * wanted.min_count:
            return True
    return False


@given(st.lists(st.integers(0, 1), max_size=80), st.integers(0, 4), st.integers(0, 4), st.integers(2, 5))
def test_a_repetition_is_seen_with_the_token_that_completes_it(
    tokens: list[int], smallest: int, more: int, num_times: int
) -> None:
    largest = max(1, smallest + more)
    wanted = RepetitionDetection(max_pattern_size=largest, min_pattern_size=smallest, min_count=num_times)
    watch = PatternWatch(wanted)
    assert [watch(token) for token in tokens] == [repeats(tokens[: size + 1], wanted) for size in range(len(tokens))]


def test_a_text_that_repeats_itself_ends_there_each_choice_by_itself(llm: LLM) -> None:
    wanted = RepetitionDetection(max_pattern_size=4, min_count=3)
    fields: dict[str, Any] = {"allowed_token_ids": [*b"ab"], "temperature": 1.0, "seed": 1, "logprobs": 0}
    fields |= {"max_tokens": 60, "ignore_eos": True, "n": 5}
    whole, ended = (
        llm.generate("hi", SamplingParams(**fields, repetition_detection=each))[0].outputs for each in (None, wanted)
    )
    for choice, own in zip(whole, ended, strict=True):
        (first, *_) = (n for n in range(1, 61) if repeats(choice.token_ids[:n], wanted))
        assert first < 60
        assert own.token_ids == choice.token_ids[:first]
        assert own.text == choice.text[:first]
        assert len(own.logprobs or []) == first
        assert (own.finish_reason, own.stop_reason) == ("stop", "repetition_detected")
    assert len({len(own.token_ids) for own in ended}) > 1
    fields |= {"n": 1, "min_tokens": 30}
    assert len(answer(llm, **fields, repetition_detection=wanted).token_ids) >= 30


def test_the_largest_pattern_costs_little_per_token() -> None:
    watch = PatternWatch(RepetitionDetection(max_pattern_size=1024, min_pattern_size=512, min_count=1024))
    start = time.process_time()
    for _ in range(20_000):
        watch(1)
    assert time.process_time() - start < 5.0
    assert isinstance(watch._tokens, np.ndarray)
    assert watch._tokens.nbytes <= 2**15


VOCAB = 12
NUM_TOKENS = 24
EOS, STOP = 5, 6
LIKELY = [3.0, 2.5, 2.0, 1.5] + [-9.0] * 8
END_IS_LIKELIEST = [0.0, 0.0, 1.0, 0.0, 0.0, 99.0, 98.0] + [0.0] * 5


def new_sampler() -> Sampler:
    return Sampler(VOCAB, 4, torch.device("cpu"))


def step_logits(step: int, num_rows: int) -> torch.Tensor:
    return 2.0 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(step))


def launch(sampler: Sampler, requests: Sequence[RequestState], logits: Sequence[torch.Tensor]) -> list[list[int]]:
    """One launch with these logits, step by step: what each row samples, which its request gets."""
    batch = sampler.prepare(list(map(row_of, requests)), len(logits))
    steps = [sampler.sample(each.clone(), batch, step).tokens.tolist() for step, each in enumerate(logits)]
    rows = [list(tokens) for tokens in zip(*steps, strict=True)]
    for request, tokens in zip(requests, rows, strict=True):
        request.accept(tokens)
    return rows


def alike(logits: list[float], num_rows: int, num_steps: int = 1) -> list[torch.Tensor]:
    """The same logits for all rows and steps."""
    return [torch.tensor([logits] * num_rows)] * num_steps


def drive(sampler: Sampler, requests: list[RequestState], num_steps: int) -> list[list[int]]:
    """Generates tokens in launches of so many steps; the tokens of each row."""
    logits = [step_logits(step, len(requests)) for step in range(NUM_TOKENS)]
    for first in range(0, NUM_TOKENS, num_steps):
        launch(sampler, requests, logits[first : first + num_steps])
    return [request.token_ids[request.num_prompt_tokens :] for request in requests]


def penalised(logits: list[float], prompt: list[int], generated: list[int], params: SamplingParams) -> list[float]:
    """The definition, token by token."""
    counts = Counter(generated)
    scores = []
    for token, logit in enumerate(logits):
        score = logit
        if token in prompt or token in generated:
            score = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        scores.append(score - params.frequency_penalty * counts[token] - params.presence_penalty * (token in generated))
    return scores


def expected_tokens(row: int, num_rows: int, prompt: list[int], params: SamplingParams) -> list[int]:
    generated: list[int] = []
    for step in range(NUM_TOKENS):
        scores = penalised(step_logits(step, num_rows)[row].tolist(), prompt, generated, params)
        generated.append(scores.index(max(scores)))
    return generated


ROWS: list[dict[str, Any]] = [
    *({"presence_penalty": 1.5}, {}, {"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}),
    *({"repetition_penalty": 0.6}, {"presence_penalty": -0.8, "frequency_penalty": -0.2}, {"frequency_penalty": 2.0}),
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("num_steps", [1, 4, 24])
@pytest.mark.parametrize("rows", [ROWS[:4], ROWS[4:]])
def test_penalties_follow_their_definition_over_many_steps(rows: list[dict[str, Any]], num_steps: int) -> None:
    prompts = [[1], [2, 3], [0, 0, 7, 11], [4, 8, 8]]
    params = [SamplingParams(temperature=0.0, **fields) for fields in rows]
    requests = [make_request(p, slot=3 - row, prompt=prompts[row]) for row, p in enumerate(params)]
    expected = [expected_tokens(row, 4, prompts[row], p) for row, p in enumerate(params)]
    assert drive(new_sampler(), requests, num_steps) == expected


def test_penalties_apply_to_random_rows() -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=2.0, logit_bias={0: 1.0})
    requests = [make_request(params, slot=0, seed=seed) for seed in range(200)]
    draws = [launch(new_sampler(), [request], alike([0.0] * VOCAB, 1, 2))[0] for request in requests]
    repeats = sum(first == second for first, second in draws)
    assert repeats / len(draws) < 0.06  # without the penalty about 0.11


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.8}])
def test_a_slot_that_another_request_used_before_starts_with_fresh_counts(fields: dict[str, float]) -> None:
    params = SamplingParams(temperature=0.0, **fields)
    used = new_sampler()
    drive(used, [make_request(params, slot=2, prompt=list(range(VOCAB)))], 4)
    (after,) = drive(used, [make_request(params, slot=2, prompt=[1])], 4)
    assert after == expected_tokens(0, 1, [1], params)


@pytest.mark.parametrize(
    ("slots", "others"),
    [([1, 2, 1, 1], [False] * 4), ([1, 1, 1], [False, True, False])],
    ids=["preempted twice", "beside another row, after which it rests"],
)
def test_counts_survive_launches_elsewhere_and_are_made_anew_in_another_slot(
    slots: list[int], others: list[bool]
) -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler, request, other = new_sampler(), make_request(params, slot=1), make_request(params, slot=0)
    for slot, is_beside in zip(slots, others, strict=True):
        if request.slot != slot:
            request.slot, request.has_counts = slot, False
        launch(sampler, [other, request] if is_beside else [request], alike(LIKELY, 1 + is_beside))
        if is_beside:
            launch(sampler, [other], alike(LIKELY, 1))
    assert request.token_ids[1:] == [0, 1, 2, 3][: len(slots)]


def eager_to_end(min_tokens: int, temperature: float = 0.0, **fields: Any) -> RequestState:
    fields = {"max_tokens": 99, "stop_token_ids": [STOP], "seed": 4, "temperature": temperature, **fields}
    return make_request(SamplingParams(min_tokens=min_tokens, **fields), eos=frozenset({EOS}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5])
def test_no_end_token_is_sampled_before_min_tokens_and_one_may_be_right_after(
    num_steps: int, temperature: float
) -> None:
    sampler = new_sampler()
    requests = [eager_to_end(min_tokens, temperature) for min_tokens in (0, 1, 3, 4)]
    while unfinished := [request for request in requests if request.finish_reason is None]:
        launch(sampler, unfinished, alike(END_IS_LIKELIEST, len(unfinished), num_steps))
    assert [request.num_output_tokens for request in requests] == [1, 2, 4, 5]
    assert all(request.token_ids[-1] in (EOS, STOP) for request in requests)
    assert all(not {EOS, STOP} & set(request.token_ids[:-1]) for request in requests)


def test_min_tokens_forbids_the_models_end_token_only_if_it_would_end_and_is_stronger_than_a_bias_for_it() -> None:
    (tokens,) = launch(new_sampler(), [eager_to_end(3, ignore_eos=True)], alike(END_IS_LIKELIEST, 1))
    assert tokens == [EOS]
    biased = eager_to_end(1, logit_bias={EOS: 100.0}, stop_token_ids=[])
    (tokens,) = launch(new_sampler(), [biased], alike([0.0, 0.0, 1.0] + [0.0] * 9, 1, 2))
    assert tokens == [2, EOS]
