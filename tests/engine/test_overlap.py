"""One launch, and a launch that begins before the tokens of the one before it are taken: the same answers.

A device that works beside the host is not needed for that: on a CPU a launch is over when it has begun, and its tokens
are taken one launch later all the same.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from chairlift import SamplingParams
from chairlift.device import Arrival
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.machine import steps_that_fit
from chairlift.engine.execution.runner import Launch
from chairlift.engine.parts import Pacing
from chairlift.engine.sampling.compiled_grammar import GrammarLimits, Patience
from chairlift.engine.text.grammar import CompilerLimits
from chairlift.params import RepetitionDetection, StructuredOutputs
from chairlift.plan import RowResult, StepPlan
from chairlift.scheduler import Request
from tests.engine.support import ENGINE, PROMPTS, TRACELESS, answers, assert_idle, core_of, make_llm
from tests.engine.test_poison import greedy
from tests.support.engines import ahead, grammars_limited, hooked, make_core

AGAIN = RepetitionDetection(max_pattern_size=3, min_count=2)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.0, "seed": 5, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biased": {"logit_bias": {3: 4.0, 9: -100.0}, "temperature": 1.0, "seed": 6},
    "scored": {"logprobs": 3, "prompt_logprobs": 2},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z]{4}[0-9]+")},
    "without words": {"bad_words": ["the", "a", "et", "x" * 20], "temperature": 1.0, "seed": 9},
    "few allowed": {"allowed_token_ids": [*b"abc ", 258], "min_tokens": 4, "temperature": 1.0, "seed": 10},
    "few allowed, fewer words": {"allowed_token_ids": [*b"ab"], "bad_words": ["aa", "bbb"], "frequency_penalty": 1.0},
    "repeats itself": {"allowed_token_ids": [*b"ab"], "repetition_detection": AGAIN, "temperature": 1.0, "seed": 11},
    "a stop string": {"stop": [*"abcdefghijklmnopqrstuvwxyz"], "temperature": 1.0, "seed": 12},
    "ends by itself": {"stop_token_ids": list(range(0, 259, 5)), "min_tokens": 3, "temperature": 1.0, "seed": 7},
    "only the prompt": {"max_tokens": 0, "prompt_logprobs": 1},
    "several choices": {"n": 3, "temperature": 1.0, "seed": 8},
}


@pytest.fixture(scope="module")
def expected(native: str) -> list[list[Any]]:
    """Returns what an engine that keeps no launch ahead answers to PROMPTS in each case."""
    with make_llm(native, **TRACELESS, enable_prefix_caching=False) as llm:
        return [answers(llm.generate(PROMPTS, greedy(**fields))) for fields in CASES.values()]


SLOW_PACES = [pytest.param(*pace, marks=pytest.mark.slow) for pace in [(1, 1, 16), (2, 4, 16), (1, 3, 512)]]


@pytest.mark.parametrize(("num_ahead", "steps", "budget"), [(2, 1, 16), (1, 4, 16), *SLOW_PACES])
def test_answers_are_those_of_an_engine_that_waits(
    native: str, expected: list[list[Any]], num_ahead: int, steps: int, budget: int
) -> None:
    params = [greedy(**fields) for fields in CASES.values()]
    prompts = (PROMPTS * 2)[: len(params)]
    settings = {**TRACELESS, "max_num_batched_tokens": budget, "max_steps_per_launch": steps}
    with make_llm(native, ahead(num_ahead), **settings) as llm:
        for each, of_each in zip(params, expected, strict=True):
            assert answers(llm.generate(PROMPTS, each)) == of_each
            assert_idle(llm)
        mixed = answers(llm.generate(prompts, params))  # side by side
        assert mixed == [of_each[index % len(PROMPTS)] for index, of_each in enumerate(expected)]
        assert_idle(llm)


def test_the_next_launch_begins_before_the_tokens_of_the_one_before_are_taken(tiny: str) -> None:
    order: list[str] = []

    class Noted(Arrival):
        def wait(self) -> None:
            order.append("wait")

    def note(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        order.append("launch")
        return replace(launch(plan), arrival=Noted(None))

    with make_llm(tiny, ahead(1), max_steps_per_launch=1) as llm, hooked(llm, note):
        llm.generate("hi", greedy(max_tokens=4))
    assert order == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


def test_a_row_under_a_grammar_is_in_every_launch_beside_others(tiny: str) -> None:
    num_rows: list[int] = []

    def note(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        num_rows.append(len(plan.rows))
        return launch(plan)

    structured = greedy(structured_outputs=StructuredOutputs(regex="[a-z]{99}"), max_tokens=20)
    in_use, patience = GrammarLimits(slow_s=1e9), Patience(min_s=60.0, max_s=60.0)  # however busy the machine is
    limits = CompilerLimits(in_use=in_use, patience=patience)
    with make_llm(tiny, ahead(1)) as llm, grammars_limited(llm, limits), hooked(llm, note):
        outputs = llm.generate(["hi", "so"], [greedy(max_tokens=20, ignore_eos=True), structured])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 20]
    assert num_rows == [2] * 20


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_every_step_leaves_the_books_in_order(tiny: str, num_ahead: int) -> None:
    with make_llm(tiny, ahead(num_ahead), max_num_batched_tokens=8) as llm:
        core = core_of(llm)
        for fields, prompt in zip(CASES.values(), PROMPTS, strict=False):
            core.add(*llm.inputs.prepare(str(prompt), prompt, greedy(**fields)).requests)
        while core.has_work:
            core.step()
            core.check()
        assert core.cache.slots_remaining == 3


def test_a_device_that_works_beside_the_host_is_kept_one_launch_ahead_of() -> None:
    assert Pacing.of(torch.device("cpu")) == Pacing(num_launches_ahead=0, recorder=None)


@pytest.mark.parametrize(
    ("seconds_each", "num_steps"), [(0.0, 4), (0.0004, 4), (0.0007, 3), (0.001, 2), (0.0019, 1), (0.006, 1), (5.0, 1)]
)
def test_a_launch_has_as_many_steps_as_take_two_milliseconds(seconds_each: float, num_steps: int) -> None:
    assert steps_that_fit(seconds_each, 4) == num_steps


_TO_HOST = {"tolist", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero"}


class HostCopies(TorchFunctionMode):
    """Notes each call that would bring the values of a tensor on a GPU to the host; `numpy` refuses one there."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _TO_HOST:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def core(tiny: str) -> Iterator[EngineCore]:
    settings: dict[str, Any] = {"max_batch_size": 4, "max_num_batched_tokens": 8, "max_steps_per_launch": 4}
    core = make_core(tiny, **settings, **ENGINE)
    yield core
    core.check()


def add(core: EngineCore, name: str, num_prompt_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    core.add(Request(name, list(range(1, num_prompt_tokens + 1)), params, 40, seed=0))


def launch(core: EngineCore) -> tuple[StepPlan, list[RowResult]]:
    """Takes a step, and returns what is between plan and events."""
    seen: list[tuple[StepPlan, list[RowResult]]] = []

    class Seen(Launch):
        def wait(self) -> list[RowResult]:
            results = super().wait()
            seen.append((self.plan, results))
            return results

    def see(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        begun = launch(plan)
        return Seen(begun.plan, begun.outputs, begun.arrival, begun.begin)

    with hooked(core, see):
        core.step()
    return seen[0]


def test_a_chunk_that_does_not_reach_the_prompts_end_gets_no_token_and_brings_nothing_to_the_host(
    core: EngineCore,
) -> None:
    add(core, "long", 20)
    with HostCopies() as copies:
        lengths = [[len(row.token_ids) for row in launch(core)[1]] for _ in range(2)]
    assert copies.names == []
    lengths += [[len(row.token_ids) for row in launch(core)[1]] for _ in range(2)]
    assert lengths == [[0], [0], [1], [4]]
    assert not core.cache.blocks[0].requires_grad


def test_rows_that_decode_get_tokens_beside_a_chunk_that_does_not(core: EngineCore) -> None:
    add(core, "short", 2)
    launch(core)
    add(core, "long", 20)
    plan, results = launch(core)
    assert [(row.key.tag, row.num_new_tokens) for row in plan.rows] == [("short", 1), ("long", 7)]
    assert [len(row.token_ids) for row in results] == [1, 0]


def test_all_steps_of_a_launch_come_to_the_host_in_one_copy(core: EngineCore) -> None:
    add(core, "a", 2)
    add(core, "b", 3)
    launch(core)
    with HostCopies() as copies:
        _, results = launch(core)
    assert [len(row.token_ids) for row in results] == [4, 4]
    assert copies.names == ["tolist"]
