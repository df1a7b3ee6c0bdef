"""Slots that cannot all be full: who gets memory, who waits for it, and who gives it up.

Memory comes in chunks of 64 tokens.
"""

import pytest

from chairlift.errors import QueueFull
from chairlift.params import FinishReason
from chairlift.plan import SlotCopy
from chairlift.prompt_work import PromptPart, ScoreTask
from chairlift.scheduler import Policy, RequestState
from tests.scheduler.fake_engine import NO_REUSE, FakeEngine


def engine_of(num_chunks: int, **settings: object) -> FakeEngine:
    """Slots of 256 tokens, and memory for so many chunks."""
    defaults = {"num_slots": 4, "max_seq_len": 256, "budget": settings.get("max_seq_len", 256), "policy": NO_REUSE}
    return FakeEngine(**{**defaults, **settings}, cache_tokens=64 * num_chunks)  # type: ignore[arg-type]


def three_on(engine: FakeEngine) -> list[RequestState]:
    """Requests that by their ends want nine chunks."""
    return [engine.add(name, tokens(1000 * number, 60), 100) for number, name in enumerate("abc")]


def tokens(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def running(engine: FakeEngine) -> list[str]:
    return [request.request_id for request in engine.scheduler.running]


def assert_whole(requests: list[RequestState]) -> None:
    assert [each.finish_reason for each in requests] == [FinishReason.LENGTH] * len(requests)
    assert [each.num_output_tokens for each in requests] == [each.max_tokens for each in requests]


# Who is admitted


def test_a_prompt_waits_until_there_is_memory_for_it_and_a_chunk_for_those_that_grow() -> None:
    engine = engine_of(6)
    engine.given(("a", tokens(0, 128), 3), ("b", tokens(1000, 129), 3), ("c", tokens(2000, 1), 3))  # 2 chunks, 3, 1
    engine.step()
    assert running(engine) == ["a", "b"]
    engine.finish("a")
    engine.step()
    assert running(engine) == ["c"]
    engine.run()
    assert_whole(list(engine.requests.values()))


def test_no_prompt_overtakes_one_that_waits_for_memory() -> None:
    engine = engine_of(5)
    engine.given(("a", tokens(0, 128), 3), ("long", tokens(1000, 192), 3), ("short", tokens(2000, 1), 3))
    engine.step()
    assert running(engine) == ["a"]
    engine.finish("a")
    engine.step()
    assert running(engine) == ["long", "short"]


def test_a_prompt_that_takes_all_memory_runs_alone_and_there_are_no_places_beyond_the_queue() -> None:
    engine = engine_of(4, max_queue_size=1).given(("a", tokens(0, 250), 6))
    engine.step()
    engine.add("b", tokens(1000, 250), 6)
    with pytest.raises(QueueFull):
        engine.add("c", tokens(2000, 190), 5)
    engine.step()
    assert running(engine) == ["a"]
    engine.run()
    assert_whole(list(engine.requests.values()))


# Who yields


def test_the_row_that_came_last_yields_and_goes_on_later_with_its_tokens() -> None:
    engine = engine_of(6)
    requests = three_on(engine)
    engine.step()
    assert running(engine) == ["a", "b", "c"]
    engine.steps(80)
    assert running(engine) == ["a", "b"]
    assert (requests[2].num_preemptions, requests[2].num_tokens) == (1, 129)  # two chunks are full, and none is left
    engine.run()
    assert_whole(requests)
    assert [each.num_preemptions for each in requests] == [0, 0, 1]


def test_a_row_that_a_launch_writes_to_yields_when_that_is_over() -> None:
    engine = engine_of(6, num_ahead=1, max_steps=4)
    requests = three_on(engine)
    engine.run()
    assert_whole(requests)
    assert [each.num_preemptions for each in requests] == [0, 0, 1]


def test_of_the_lowest_priority_the_last_yields_though_others_came_later() -> None:
    engine = engine_of(8)
    for number, (name, priority) in enumerate([("old", 2), ("low", 2), ("last low", 2), ("high", 0)]):
        engine.add(name, tokens(1000 * number, 50), 120, priority=priority)
        engine.step()
    assert running(engine) == ["old", "low", "last low", "high"]
    while len(running(engine)) == 4:
        engine.step()
    assert running(engine) == ["old", "low", "high"]
    engine.run()
    assert_whole(list(engine.requests.values()))


def test_the_oldest_row_goes_on_though_its_priority_is_the_lowest() -> None:
    engine = engine_of(5)
    for name, first, priority in (("oldest", 0, 5), ("urgent", 1000, 0)):
        engine.add(name, tokens(first, 60), 190, priority=priority)
        engine.step()
    assert running(engine) == ["oldest", "urgent"]
    engine.run()
    assert_whole(list(engine.requests.values()))
    assert [each.num_preemptions for each in engine.requests.values()] == [0, 1]


def test_all_end_in_a_tenth_of_the_memory_that_they_want() -> None:
    engine = engine_of(8, num_slots=16, max_steps=3, policy=Policy())
    requests = [engine.add(f"r{i}", tokens(1000 * i, 20 + 9 * i), 130 - 4 * i) for i in range(20)]  # 3 or 4 chunks each
    engine.run(limit=5000)
    assert_whole(requests)
    assert engine.slots.budget.use.num_running == 0


def test_what_was_reported_of_a_prompt_is_not_reported_again_after_a_row_yielded() -> None:
    engine = engine_of(4)
    request = engine.add("a", tokens(0, 100), 1, prompt_task=ScoreTask(1))
    assert (request.max_reused, request.part_of_task(0, 100)) == (
        0,
        PromptPart(ScoreTask(1), 0, 99, tokens(0, 100)[1:]),
    )
    request.num_done, request.num_preemptions = 98, 1
    assert (request.max_reused, request.part_of_task(0, 100)) == (
        98,
        PromptPart(ScoreTask(1), 98, 1, tokens(0, 100)[99:]),
    )
    request.num_done = 99
    assert (request.max_reused, request.part_of_task(0, 100)) == (99, None)


# Warm slots


def test_warm_slots_give_up_memory_first_the_least_recently_used_from_its_end() -> None:
    engine = engine_of(16, max_seq_len=640, policy=Policy())
    engine.serve("a", tokens(0, 300), 1)
    engine.serve("b", tokens(1000, 250), 1)
    assert list(engine.slots.warm.values()) == [300, 250]
    engine.serve("c", tokens(2000, 600), 1)
    assert list(engine.slots.warm.values()) == [250, 600]  # of fewer than 512 tokens nothing is kept
    engine.serve("d", tokens(3000, 60), 1)
    assert list(engine.slots.warm.values()) == [250, 600, 60]
    assert engine.serve("again", tokens(2000, 600), 1).num_cached_tokens == 599


def test_a_long_warm_slot_keeps_its_beginning() -> None:
    engine = engine_of(16, num_slots=2, max_seq_len=1024, policy=Policy())
    engine.serve("a", tokens(0, 900), 1)
    engine.serve("b", tokens(5000, 200), 1)
    assert engine.slots.warm == {0: 384, 1: 200}
    assert engine.serve("again", tokens(0, 500), 1).num_cached_tokens == 384


def test_what_a_running_request_reads_in_a_warm_slot_goes_last() -> None:
    engine = engine_of(14, max_seq_len=512, policy=Policy())
    engine.serve("source", tokens(0, 400), 1)
    engine.serve("other", tokens(5000, 60), 1)
    reader = engine.add("reader", [*tokens(0, 200), *tokens(900, 20)], 60)
    assert engine.step().copies == [SlotCopy(0, 2, 200)]
    engine.add("new", tokens(7000, 300), 1)
    engine.step()
    assert engine.slots.warm[0] == 200
    assert reader.num_reused == 200
    engine.run()


def test_where_a_copy_does_not_fit_a_warm_slot_is_taken_in_place() -> None:
    engine = engine_of(5, policy=Policy())
    engine.serve("a", tokens(0, 200), 1)
    b = engine.add("b", [*tokens(0, 100), *tokens(900, 20)], 2)
    engine.step()
    assert (b.slot, b.num_reused) == (0, 100)  # 99 tokens of the other are lost
    engine.run()
