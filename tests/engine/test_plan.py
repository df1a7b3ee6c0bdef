"""Plans are values: whoever has the weights can compute them, in another process or later, without any request."""

import pickle
from typing import Any

import pytest

from chairlift import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.execution.runner import Launch
from chairlift.plan import RowPlan, RowResult, StepPlan
from tests.engine.support import ENGINE, PROMPTS, make_llm
from tests.engine.test_overlap import CASES
from tests.engine.test_poison import greedy

SETTINGS: dict[str, Any] = {"max_batch_size": 3, "max_num_batched_tokens": 16, "max_steps_per_launch": 4}
SETTINGS |= {
    "enable_prefix_caching": False,
    "speculation": "ngram",
    "num_speculative_tokens": 3,
    "batch_invariant": True,
}
UNGUIDED = [fields for fields in CASES.values() if "structured_outputs" not in fields]  # masks stay in their process


class Player:
    """Computes plans that it is given as bytes; of requests it knows nothing."""

    def __init__(self, model: str) -> None:
        self._core = EngineCore(EngineConfig(model=model, **SETTINGS, **ENGINE))
        self._claimed: set[int] = set()

    def play(self, pickled: bytes) -> list[RowResult]:
        plan: StepPlan = pickle.loads(pickled)
        cache = self._core.cache
        for row in plan.rows:
            if row.start == 0 and row.slot in self._claimed:
                cache.release(row.slot)
                self._claimed.remove(row.slot)
            if row.slot not in self._claimed:
                cache.claim_slot(row.slot)
                self._claimed.add(row.slot)
            cache.hold(row.slot, row.start + len(row.input_ids) + plan.num_steps)
            cache.rewind(row.slot, cache.cache_length_of(row.slot) - row.start)
        launch = self._core._runner.launch(plan)
        results = launch.wait()
        cache.commit([_num_valid(row, plan) for row in plan.rows], launch.reservation)
        return results


def _num_valid(row: RowPlan, plan: StepPlan) -> int:
    return len(row.input_ids) + (plan.num_steps - 1 if plan.is_decode else 0)


def test_recorded_plans_are_computed_again_without_requests(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[bytes, bytes]] = []  # plans and results
    wait = Launch.wait

    def record(launch: Launch) -> list[RowResult]:
        plan, results = pickle.dumps(launch.plan), wait(launch)
        recorded.append((plan, pickle.dumps(results)))
        return results

    monkeypatch.setattr(Launch, "wait", record)
    with make_llm(tiny, **SETTINGS) as llm:
        llm.generate(PROMPTS * 2, [greedy(**UNGUIDED[index % len(UNGUIDED)]) for index in range(2 * len(PROMPTS))])
    monkeypatch.undo()
    player = Player(tiny)
    assert len(recorded) > 20
    for pickled, results in recorded:
        assert player.play(pickled) == pickle.loads(results)
