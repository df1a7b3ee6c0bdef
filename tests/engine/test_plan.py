"""Plans are values: whoever has the weights can compute them, in another process or later, without any request."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from chairlift import EngineConfig, SamplingParams
from chairlift.engine.execution.runner import Launch
from chairlift.engine.executor import Executor, open_model
from chairlift.engine.plan_pickling import GuidedElsewhere, PlanReader, PlanWriter
from chairlift.engine.ranks import Ranks
from chairlift.engine.sampling.token_rules import BadWords, RuleFilter, TokenRules
from chairlift.plan import SAMPLE, RowPlan, RowResult, SamplingKey, SlotCopy, StepPlan
from tests.engine.support import ENGINE, PROMPTS, make_llm
from tests.engine.test_overlap import CASES
from tests.engine.test_poison import greedy
from tests.scheduler.fake_engine import Words
from tests.support.engines import hooked

SETTINGS: dict[str, Any] = {"max_batch_size": 3, "max_num_batched_tokens": 16, "max_steps_per_launch": 4}
SETTINGS |= {
    "speculation": "ngram",
    "num_speculative_tokens": 3,
    "batch_invariant": True,
}
SYSTEM = [7] * 30
UNGUIDED = [fields for fields in CASES.values() if "structured_outputs" not in fields]  # masks stay in their process


class Player:
    """Computes plans that it is given as bytes; of requests and slots it keeps no books."""

    def __init__(self, model: str) -> None:
        config = EngineConfig(model=model, **SETTINGS, **ENGINE)
        self._runner = Executor(open_model(config), Ranks(config)).runner

    def play(self, pickled: bytes) -> list[RowResult]:
        return self._runner.launch(pickle.loads(pickled)).wait()


def test_recorded_plans_are_computed_again_without_requests(tiny: str) -> None:
    recorded: list[tuple[bytes, bytes]] = []  # plans and results

    class Recorded(Launch):
        def wait(self) -> list[RowResult]:
            plan, results = pickle.dumps(self.plan), super().wait()
            recorded.append((plan, pickle.dumps(results)))
            return results

    def record(launch: Callable[[StepPlan], Launch], plan: StepPlan) -> Launch:
        begun = launch(plan)
        return Recorded(begun.plan, begun.outputs, begun.arrival, begun.begin)

    cases = [greedy(**UNGUIDED[index % len(UNGUIDED)]) for index in range(2 * len(PROMPTS))]
    with make_llm(tiny, **SETTINGS) as llm, hooked(llm, record):
        llm.generate([SYSTEM + [9] * 80], greedy())  # from this one's slot prefixes are copied
        llm.generate([SYSTEM + prompt for prompt in PROMPTS * 2], cases)
    player = Player(tiny)
    plans: list[StepPlan] = [pickle.loads(pickled) for pickled, _ in recorded]
    assert len(plans) > 20
    assert SlotCopy in {type(job) for plan in plans for job in plan.jobs}
    assert any(row.guess for plan in plans for row in plan.rows)
    for pickled, results in recorded:
        assert player.play(pickled) == pickle.loads(results)


def test_a_plan_reaches_another_process_as_it_is_and_each_sequence_is_introduced_once() -> None:
    writer, reader = PlanWriter(), PlanReader()
    keys = [SamplingKey(name, SamplingParams(bad_words=[str(i) + "a" * 1000 for i in range(5)]), 0, 1) for name in "ab"]
    guided = replace(keys[0], grammar=Words(1))
    sizes = []
    for names in ("ab", "ab", "b", "ab", "a"):
        rows = tuple(RowPlan(keys["ab".index(name)], 0, 3, (7,), 1, SAMPLE) for name in names)
        plan = StepPlan(rows, len(rows), 1, (1,) * len(rows), (SlotCopy(0, 1, 5),))
        written = writer.write(plan)
        sizes.append(len(written) // 5000)  # keys in it
        read = reader.read(written)
        assert [row.key.tag for row in read.rows] == list(names)
        assert [replace(row, key=own.key) for row, own in zip(read.rows, rows, strict=True)] == list(rows)
        assert (read.jobs, read.num_expected) == (plan.jobs, plan.num_expected)
    assert sizes == [2, 0, 0, 1, 0]
    (row,) = reader.read(writer.write(StepPlan((RowPlan(guided, 0, 0, (7,), 0, SAMPLE),), 1, 1))).rows
    assert isinstance(row.key.grammar, GuidedElsewhere)  # so that it is sampled where masks are applied


def test_a_rows_rules_reach_another_process_as_allowed_tokens_on_the_host_wherever_they_are_used() -> None:
    refused = torch.tensor([False, True])
    rules = TokenRules(BadWords([[1, 2]]), refused)
    used = RuleFilter(rules)
    assert used.follows_text
    rules._sent = refused.to("meta")  # as after a step on a device
    assert rules.refused_on(torch.device("meta")) is rules._sent
    received = pickle.loads(pickle.dumps(used))
    assert received.rules.bad_words is None
    assert torch.equal(received.rules.refused_on(torch.device("cpu")), refused)
