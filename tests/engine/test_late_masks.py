"""A mask or a token that is late costs its own row a turn: the answer is the same, and nobody else waits."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.engine.sampling.compiled_grammar import GrammarLimits, Patience
from chairlift.engine.sampling.masks import TokenGrammar
from chairlift.engine.sampling.pending_masks import PendingMasks
from chairlift.engine.text.grammar import CompilerLimits, GrammarCompiler
from chairlift.params import StructuredOutputs
from tests.engine import test_overlap
from tests.engine.support import GREEDY, PROMPTS, TRACELESS, answers, assert_idle, core_of, make_llm, tokens_of
from tests.support.engines import ahead, grammars_limited, parser_limits

WORDS = GREEDY.model_copy(update={"structured_outputs": StructuredOutputs(regex="[a-z]{4}[0-9]+"), "max_tokens": 14})
MUCH_A = {ord("a"): 100.0}
CASES: dict[str, dict[str, Any]] = {
    **{case: test_overlap.CASES[case] for case in ("greedy", "filtered", "scored", "only the prompt")},
    "penalised and random": {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "temperature": 2.0, "seed": 1},
    "several choices": {"n": 2, "temperature": 1.0, "seed": 8},
    "one token": {"max_tokens": 1},
    "that ends": {"structured_outputs": StructuredOutputs(choice=["one", "two", "three"])},
}


IMPATIENT = CompilerLimits(patience=Patience(max_s=0.0))
"""Lets no launch wait for those that are late."""


class Lateness:
    """Once begun, some rows of every launch are late, for their masks or for their tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_late = 0
        self._monkeypatch = monkeypatch
        self._random = random.Random(7)

    def begin(self, share: float = 0.4) -> None:
        settle = PendingMasks._settle

        def settle_late(masks: PendingMasks, is_done: Callable[[TokenGrammar], bool]) -> None:
            late = {grammar for _, grammar in masks._in_time() if self._random.random() < share}
            settle(masks, lambda grammar: is_done(grammar) and grammar not in late)
            self.num_late += len(late)

        self._monkeypatch.setattr(PendingMasks, "_settle", settle_late)


@pytest.fixture
def lateness(monkeypatch: pytest.MonkeyPatch) -> Lateness:
    return Lateness(monkeypatch)


PACES = [(1, 0), *(pytest.param(pace, marks=pytest.mark.slow) for pace in [(4, 0), (1, 1)]), (4, 1)]


def requests_of(case: str) -> list[SamplingParams]:
    """For each of PROMPTS; every third is free."""
    params = WORDS.model_copy(update=CASES[case])
    return [params if index % 3 else GREEDY for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def punctual(native: str) -> dict[str, list[Any]]:
    """The answers of each case where nobody is late."""
    with make_llm(native, **TRACELESS, enable_prefix_caching=False) as llm:
        return {case: answers(llm.generate(PROMPTS, requests_of(case))) for case in CASES}


@pytest.fixture(scope="module", params=PACES, ids=["1", "4", "1 ahead", "4 ahead"])
def paced(native: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """One whose rows may be late, of one or four steps a launch, and of no or one launch ahead."""
    steps, num_ahead = request.param
    llm = make_llm(native, ahead(num_ahead), **TRACELESS, max_steps_per_launch=steps)
    with llm, grammars_limited(llm, IMPATIENT):
        yield llm


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_grammars_never_late(
    punctual: dict[str, list[Any]], paced: LLM, lateness: Lateness, case: str
) -> None:
    core_of(paced).scheduler.reset_prefix_cache()
    lateness.begin()
    outputs = paced.generate(PROMPTS, requests_of(case))
    assert answers(outputs) == punctual[case]
    assert all(choice.error is None for output in outputs for choice in output.outputs)
    assert lateness.num_late > 3
    assert_idle(paced)


def test_every_step_leaves_the_books_in_order(paced: LLM, lateness: Lateness) -> None:
    lateness.begin()
    core = core_of(paced)
    for index, prompt in enumerate(PROMPTS):
        core.add(*paced.inputs.prepare(str(index), prompt, WORDS).requests)
    while core.has_work:
        core.step()
        core.check()
    assert core.cache.slots_remaining == 3


def test_a_token_that_was_late_is_counted_once(tiny: str, lateness: Lateness) -> None:
    with make_llm(tiny) as llm, grammars_limited(llm, IMPATIENT):
        lateness.begin(0.7)
        (output,) = llm.generate("hi", WORDS)
        stats = core_of(llm).read_stats()
    assert lateness.num_late > 3
    assert len(output.outputs[0].token_ids) == 14
    totals = stats.totals
    assert (totals.num_generated_tokens, totals.num_first_tokens, totals.num_prompt_tokens) == (14, 1, 2)
    assert stats.inter_token_seconds.count == 13


def test_prefixes_of_rows_that_are_late_are_shared_all_the_same(tiny: str, llm: LLM, lateness: Lateness) -> None:
    prompts = [[7] * 40 + [index] for index in range(4)] + [[7] * 40] * 2
    expected = tokens_of(llm.generate(prompts, WORDS))
    with make_llm(tiny) as other, grammars_limited(other, IMPATIENT):
        lateness.begin()
        assert tokens_of(other.generate(prompts, WORDS)) == expected
        assert_idle(other)


@pytest.mark.parametrize(("slow_s", "lane"), [(-1.0, "slow"), (1e9, "fast")])
def test_a_slow_sequence_sits_out_until_its_mask_and_says_the_same(
    tiny: str, llm: LLM, slow_s: float, lane: str
) -> None:
    expected = tokens_of(llm.generate(PROMPTS[:3], WORDS))
    limits = CompilerLimits(in_use=GrammarLimits(slow_s=slow_s))
    with make_llm(tiny) as other, grammars_limited(other, limits):
        for _ in range(2):
            assert tokens_of(other.generate(PROMPTS[:3], WORDS)) == expected
            assert lanes_of(other) == {lane}
        assert_idle(other)


def lanes_of(llm: LLM) -> set[str]:
    """Returns where sequences of the grammars compiled so far would begin."""
    assert isinstance(llm.inputs.grammars, GrammarCompiler)
    return {"slow" if each.is_slow else "fast" for each in llm.inputs.grammars._cache.values()}


def test_whose_lexer_is_full_begins_again_unnoticed(tiny: str, llm: LLM) -> None:
    # A mask looks at states beside the way: ten for each token here.
    regex = "([a-w]{0,300}x[a-w ]{0,200}|[a-z]{0,250}y[a-w.]{0,250}|[a-w ]{0,99}0)z"
    outputs = StructuredOutputs(regex=regex)
    changes = {"structured_outputs": outputs, "max_tokens": 60, "logit_bias": MUCH_A}
    params = WORDS.model_copy(update={**changes, "ignore_eos": False})
    (expected,) = tokens_of(llm.generate("hi", params))
    with make_llm(tiny) as other, grammars_limited(other, parser_limits(max_lexer_states=150)):
        compiled = other.inputs.grammars.compile(outputs).result()
        assert tokens_of(other.generate(["hi"] * 3, params)) == [expected] * 3
        assert compiled.is_broken  # so one of them began again
        short = params.model_copy(update={"max_tokens": 10})
        assert tokens_of(other.generate("hi", short)) == [expected[:10]]  # with a lexer that others did not fill
        compiled_anew = other.inputs.grammars.compile(outputs).result()
        assert compiled_anew is not compiled
        assert not compiled_anew.is_broken


@pytest.mark.parametrize(
    ("limits", "grammar"),
    [
        ({"max_items_in_row": 50}, StructuredOutputs(grammar='start: e\ne: e e | "a"\n')),
        ({"step_lexer_fuel": 60}, StructuredOutputs(regex="(.*a.{50}b|.*c.{60}d|.*e.{70}f)&(.*i.{90}j.*)")),
    ],
    ids=["tokens", "masks"],
)
@pytest.mark.parametrize("num_ahead", [0, 1])
def test_a_grammar_that_becomes_too_costly_ends_its_request_alone_with_the_reason(
    tiny: str, limits: dict[str, int], grammar: StructuredOutputs, num_ahead: int
) -> None:
    params = WORDS.model_copy(update={"structured_outputs": grammar, "max_tokens": 150, "logit_bias": MUCH_A})
    with make_llm(tiny, ahead(num_ahead)) as llm, grammars_limited(llm, parser_limits(**limits)):
        output, free = llm.generate(["hi", "free"], [params, GREEDY])
        error = output.outputs[0].error
        assert error is not None
        assert error.endswith("too many alternatives, optional parts or repetitions at once; simplify it")
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", "grammar_limit")
        assert 0 < len(output.outputs[0].token_ids) < 150
        assert len(free.outputs[0].token_ids) == 12
        assert_idle(llm)
