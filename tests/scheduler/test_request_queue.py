"""Another scheduling policy is one class, given to the scheduler: here first come, first served."""

import pytest

from chairlift.errors import QueueFull
from tests.scheduler.fake_engine import FakeEngine
from tests.scheduler.first_come_queue import FirstComeQueue

URGENT, OTHER_TENANT = {"priority": -2}, {"tenant": "b"}


def engine_of(*names: str, max_queue_size: int = 10) -> FakeEngine:
    """An engine with one slot. Requests of one tenant wait, and then an urgent one and one of another tenant."""
    engine = FakeEngine(num_slots=1, max_queue_size=max_queue_size, new_queue=FirstComeQueue)
    others = [("urgent", 4, 2, URGENT), ("other", 4, 2, OTHER_TENANT)]
    return engine.given(*((name, 4, 2) for name in names), *others)


def order_of_service(engine: FakeEngine) -> list[str]:
    names: list[str] = []
    while engine.has_work:
        names += [name for name, _ in engine.step().rows if name not in names]
    return names


def test_a_policy_decides_the_order_of_service() -> None:
    assert order_of_service(engine_of("a", "b")) == ["a", "b", "urgent", "other"]


def test_a_policy_serves_what_is_left_after_an_abort() -> None:
    engine = engine_of("a", "b")
    engine.abort("b")
    assert order_of_service(engine) == ["a", "urgent", "other"]


def test_a_policy_decides_that_nobody_is_displaced() -> None:
    engine = engine_of("a", max_queue_size=2)
    with pytest.raises(QueueFull):
        engine.add("more urgent", 4, 2, priority=-5)
    assert order_of_service(engine) == ["a", "urgent", "other"]
