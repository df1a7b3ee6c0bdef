"""Whatever arrives, is aborted or is sampled: every request ends once and in time, and every slot comes back."""

from dataclasses import dataclass
from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from chairlift.params import FinishReason
from chairlift.scheduler import StepPlan
from tests.scheduler.fake_engine import EOS, NO_REUSE, FakeEngine

STOP, NUM_TOKENS = 0, 6  # token ids are drawn from [0, NUM_TOKENS)


@dataclass(frozen=True)
class Arrival:
    """A request, when it comes, and when its caller loses patience (if ever): step numbers."""

    step: int
    num_prompt_tokens: int
    max_tokens: int
    min_tokens: int
    abort_step: int | None


@dataclass(frozen=True)
class World:
    """The sizes of an engine, the requests that it meets (in arrival order), and the tokens that it samples."""

    num_slots: int
    max_seq_len: int
    budget: int
    max_steps: int
    num_ahead: int  # launches begun before the results of an earlier one are taken
    arrivals: list[Arrival]
    tokens: list[int]  # said in this order, over and over


@st.composite
def arrivals(draw: st.DrawFn, max_seq_len: int) -> Arrival:
    step = draw(st.integers(0, 12))
    num_prompt_tokens = draw(st.integers(1, max_seq_len - 1))
    max_tokens = draw(st.integers(1, max_seq_len - num_prompt_tokens))
    abort_step = draw(st.none() | st.integers(step, step + 10))
    return Arrival(step, num_prompt_tokens, max_tokens, draw(st.integers(0, max_tokens)), abort_step)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_slots, max_seq_len = draw(st.integers(1, 4)), draw(st.integers(2, 20))
    return World(
        num_slots=num_slots,
        max_seq_len=max_seq_len,
        budget=num_slots + draw(st.integers(0, 12)),
        max_steps=draw(st.integers(1, 5)),
        num_ahead=draw(st.integers(0, 2)),
        arrivals=sorted(draw(st.lists(arrivals(max_seq_len), min_size=1, max_size=8)), key=lambda a: a.step),
        tokens=draw(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=30)),
    )


class Run(FakeEngine):
    """Plays a world to its end, and notes what is heard of each request and in which step it ends."""

    def __init__(self, world: World) -> None:
        words = cycle(world.tokens)
        super().__init__(
            world.num_slots,
            world.budget,
            max_steps=world.max_steps,
            max_seq_len=world.max_seq_len,
            policy=NO_REUSE,
            num_ahead=world.num_ahead,
            say=lambda _: next(words),
        )
        self.plans: list[StepPlan] = []
        self.heard: dict[str, list[int]] = {}
        self.end_steps: dict[str, int] = {}
        self.started: dict[str, None] = {}  # in the order in which they got slots
        by_name = {f"r{index}": arrival for index, arrival in enumerate(world.arrivals)}
        step = 0
        while self.has_work or len(self.heard) < len(by_name):
            for name, each in by_name.items():
                if each.step == step:
                    self.heard[name] = []
                    self.add(
                        name, each.num_prompt_tokens, each.max_tokens, min_tokens=each.min_tokens, stop_token_ids=[STOP]
                    )
            aborted = [self.abort(name) for name, each in by_name.items() if each.abort_step == step]
            self.events = []
            if self.has_work:
                self.step()
            for event in filter(None, [*aborted, *self.events]):
                assert event.request_id not in self.end_steps, "there is news of a request that has ended"
                self.heard[event.request_id] += event.new_token_ids
                if event.finish_reason is not None:
                    self.end_steps[event.request_id] = step
            step += 1
            assert step < 2000, "it goes on for ever"

    def begin(self, plan: StepPlan) -> None:
        assert all(row.request.num_remaining > 0 for row in plan.rows), "a length's end is known ahead"
        self.started.update(dict.fromkeys(request.request_id for request in self.scheduler.running))
        self.plans.append(plan)
        super().begin(plan)


@given(worlds())
def test_every_request_ends_exactly_once_and_all_slots_come_back(world: World) -> None:
    run = Run(world)
    assert run.ends == dict.fromkeys(run.requests, 1)
    assert len(run.requests) == len(world.arrivals)
    assert run.slots.num_free == world.num_slots
    assert (run.scheduler.num_waiting, run.scheduler.num_running) == (0, 0)


@given(worlds())
def test_nothing_starves(world: World) -> None:
    """In every step the oldest request gets a token, so whoever came earlier bounds how long one can take.

    With launches in flight, first tokens are heard of, and slots come back, that much later.
    """
    run = Run(world)
    work_before = 0
    for index, arrival in enumerate(world.arrivals):
        work_before += arrival.num_prompt_tokens + arrival.max_tokens + 2 * world.num_ahead
        assert run.end_steps[f"r{index}"] - arrival.step < work_before


@given(worlds())
def test_answers_are_whole_and_end_for_the_reason_given(world: World) -> None:
    run = Run(world)
    for (name, answer), arrival in zip(run.heard.items(), world.arrivals, strict=True):
        request = run.requests[name]
        assert request.token_ids == [*range(100, 100 + arrival.num_prompt_tokens), *answer]
        may_end = [i >= arrival.min_tokens and token in (EOS, STOP) for i, token in enumerate(answer)]
        assert not any(may_end[:-1])
        match request.finish_reason:
            case FinishReason.STOP:
                assert may_end[-1]
                assert request.stop_reason == (STOP if answer[-1] == STOP else None)
            case FinishReason.LENGTH:
                assert len(answer) == arrival.max_tokens
                assert not may_end[-1]
            case _:
                assert request.finish_reason is FinishReason.ABORT
                assert arrival.abort_step is not None
                assert len(answer) < arrival.max_tokens


@given(worlds())
def test_plans_keep_to_their_limits(world: World) -> None:
    for plan in Run(world).plans:
        counts = [row.num_new_tokens for row in plan.rows]
        assert 1 <= sum(counts) <= world.budget
        assert 1 <= len({row.request.request_id for row in plan.rows}) == len(plan.rows) <= world.num_slots
        assert min(counts) >= 1
        assert counts[: plan.num_decode_rows] == [1] * plan.num_decode_rows
        assert 1 <= plan.num_steps <= world.max_steps
        if plan.num_steps > 1:
            assert plan.num_decode_rows == len(plan.rows)


@given(worlds())
def test_slots_are_given_in_arrival_order(world: World) -> None:
    order = [int(request_id.removeprefix("r")) for request_id in Run(world).started]
    assert order == sorted(order)
