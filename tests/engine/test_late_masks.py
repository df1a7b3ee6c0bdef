"""A mask or a token that is late costs its own row a turn: the answer is the same, and nobody else waits."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.engine import core as core_module
from chairlift.engine.core import Pacing
from chairlift.engine.sampling import compiled_grammar
from chairlift.engine.sampling import masks as masks_module
from chairlift.engine.sampling.masks import PendingMasks, TokenGrammar
from chairlift.engine.text.grammar import GrammarCompiler
from chairlift.params import RequestOutput, StructuredOutputs
from tests.engine.support import GREEDY, PROMPTS, assert_idle, core_of, make_llm, tokens_of

WORDS = GREEDY.model_copy(update={"structured_outputs": StructuredOutputs(regex="[a-z]{4}[0-9]+"), "max_tokens": 14})

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.0, "seed": 5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "penalised and random": {"repetition_penalty": 1.5, "frequency_penalty": 1.5, "temperature": 2.0, "seed": 1},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 8},
    "one token": {"max_tokens": 1},
    "only the prompt": {"max_tokens": 0, "prompt_logprobs": 1},
    "that ends": {"structured_outputs": StructuredOutputs(choice=["one", "two", "three"])},
}


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
        self._monkeypatch.setattr(masks_module, "_MAX_PATIENCE_S", 0.0)


@pytest.fixture
def lateness(monkeypatch: pytest.MonkeyPatch) -> Lateness:
    return Lateness(monkeypatch)


@pytest.fixture(params=[0, 1], ids=["no launch ahead", "1 ahead"])
def pacing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module.Pacing, "of", lambda _: Pacing(num_launches_ahead=request.param))


def answers(outputs: list[RequestOutput]) -> list[Any]:
    return [(output.outputs, output.prompt_logprobs) for output in outputs]


# Who is in the batch with whom differs, so log-probabilities are only equal if that leaves no trace.
TRACELESS = {"max_num_batched_tokens": 16, "batch_invariant": True}


@pytest.fixture(scope="module")
def punctual(native: str) -> Iterator[LLM]:
    """An engine to ask before anybody is late."""
    with make_llm(native, **TRACELESS, enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.usefixtures("pacing")
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_grammars_that_are_never_late(
    native: str, punctual: LLM, lateness: Lateness, case: str, steps: int
) -> None:
    params = WORDS.model_copy(update=CASES[case])
    mixed = [params if index % 3 else GREEDY for index in range(len(PROMPTS))]
    expected = punctual.generate(PROMPTS, mixed)
    assert all(choice.error is None for output in expected for choice in output.outputs)
    with make_llm(native, **TRACELESS, max_steps_per_launch=steps) as llm:
        lateness.begin()
        assert answers(llm.generate(PROMPTS, mixed)) == answers(expected)
        assert_idle(llm)
    assert lateness.num_late > 3


@pytest.mark.usefixtures("pacing")
def test_every_step_leaves_the_books_in_order(tiny: str, lateness: Lateness) -> None:
    lateness.begin()
    with make_llm(tiny, max_num_batched_tokens=8) as llm:
        core = core_of(llm)
        for index, prompt in enumerate(PROMPTS):
            core.add(*llm.inputs.prepare(str(index), prompt, WORDS).requests)
        while core.has_work:
            core.step()
            core.check()
        assert core.cache.slots_remaining == 3


def test_a_token_that_was_late_is_counted_once(tiny: str, lateness: Lateness) -> None:
    with make_llm(tiny) as llm:
        lateness.begin(0.7)
        (output,) = llm.generate("hi", WORDS)
        stats = core_of(llm).read_stats()
    assert lateness.num_late > 3
    assert len(output.outputs[0].token_ids) == 14
    assert (stats.totals.num_generated_tokens, stats.totals.num_first_tokens, stats.totals.num_prompt_tokens) == (
        14,
        1,
        2,
    )
    assert stats.inter_token_seconds.count == 13


def test_prefixes_of_rows_that_are_late_are_shared_all_the_same(tiny: str, lateness: Lateness) -> None:
    prompts = [[7] * 40 + [index] for index in range(4)] + [[7] * 40] * 2
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(prompts, WORDS))
    with make_llm(tiny) as llm:
        lateness.begin()
        assert tokens_of(llm.generate(prompts, WORDS)) == expected
        assert_idle(llm)


def test_a_slow_sequence_sits_out_until_its_mask_is_there_and_says_the_same(
    tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_llm(tiny) as llm:
        expected = tokens_of(llm.generate(PROMPTS[:3], WORDS))
        monkeypatch.setattr(compiled_grammar, "_SLOW_S", -1.0)  # so everybody is slow
        assert tokens_of(llm.generate(PROMPTS[:3], WORDS)) == expected
        assert lanes_of(llm) == {"slow"}
        monkeypatch.setattr(compiled_grammar, "_SLOW_S", 1e9)
        assert tokens_of(llm.generate(PROMPTS[:3], WORDS)) == expected
        assert lanes_of(llm) == {"fast"}
        assert_idle(llm)


def limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    """Limits the grammars that are in use, but not where they are tried out."""
    monkeypatch.setattr(compiled_grammar, "PARSER_LIMITS", {**compiled_grammar.PARSER_LIMITS, **limits})


def lanes_of(llm: LLM) -> set[str]:
    """Where sequences of the grammars compiled so far would begin."""
    assert isinstance(llm.inputs.grammars, GrammarCompiler)
    return {"slow" if each.is_slow else "fast" for each in llm.inputs.grammars._cache.values()}


def test_whose_lexer_is_full_begins_again_and_nobody_notices(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A mask looks at states beside the way: ten for each token here.
    regex = "([a-w]{0,300}x[a-w ]{0,200}|[a-z]{0,250}y[a-w.]{0,250}|[a-w ]{0,99}0)z"
    params = SamplingParams(
        temperature=0.0, max_tokens=60, logit_bias={ord("a"): 100.0}, structured_outputs=StructuredOutputs(regex=regex)
    )
    with make_llm(tiny) as llm:
        (expected,) = tokens_of(llm.generate("hi", params))
    begun_again: list[TokenGrammar] = []
    begin_again = TokenGrammar.begin_again

    def note(grammar: TokenGrammar, *rest: Any) -> None:
        begun_again.append(grammar)
        begin_again(grammar, *rest)

    monkeypatch.setattr(TokenGrammar, "begin_again", note)
    limit(monkeypatch, max_lexer_states=150)
    with make_llm(tiny) as llm:
        assert tokens_of(llm.generate(["hi"] * 3, params)) == [expected] * 3
        assert begun_again
        begun_again.clear()
        short = params.model_copy(update={"max_tokens": 10})
        assert tokens_of(llm.generate("hi", short)) == [expected[:10]]  # with a lexer that others did not fill
        assert not begun_again


@pytest.mark.parametrize(
    ("limits", "grammar"),
    [
        ({"max_items_in_row": 50}, StructuredOutputs(grammar='start: e\ne: e e | "a"\n')),
        ({"step_lexer_fuel": 60}, StructuredOutputs(regex="(.*a.{50}b|.*c.{60}d|.*e.{70}f)&(.*i.{90}j.*)")),
    ],
    ids=["tokens", "masks"],
)
def test_a_grammar_that_becomes_too_costly_ends_its_request_alone_with_the_reason(
    tiny: str, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int], grammar: StructuredOutputs
) -> None:
    limit(monkeypatch, **limits)
    bias = {ord("a"): 100.0}
    params = WORDS.model_copy(update={"structured_outputs": grammar, "max_tokens": 150, "logit_bias": bias})
    with make_llm(tiny) as llm:
        output, free = llm.generate(["hi", "free"], [params, GREEDY])
        error = output.outputs[0].error
        assert error is not None
        assert error.endswith("too many alternatives, optional parts or repetitions at once; simplify it")
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("abort", "grammar_limit")
        assert 0 < len(output.outputs[0].token_ids) < 150
        assert len(free.outputs[0].token_ids) == 12
        assert_idle(llm)
