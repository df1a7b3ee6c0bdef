"""Whatever arrives, is aborted or is sampled: every request ends once and in time, and every slot comes back."""

from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chairlift.errors import QueueFull
from chairlift.params import FinishReason
from chairlift.plan import StepPlan
from chairlift.scheduler import Policy, Request, Speculation
from chairlift.scheduler.fair_queue import FairQueue
from tests.scheduler.fake_engine import EOS, NO_REUSE, FakeEngine, assert_nothing_is_left
from tests.scheduler.first_come_queue import FirstComeQueue

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
    step, num_prompt_tokens = draw(st.integers(0, 12)), draw(st.integers(1, max_seq_len - 1))
    max_tokens = draw(st.integers(1, max_seq_len - num_prompt_tokens))
    abort_step = draw(st.none() | st.integers(step, step + 10))
    return Arrival(step, num_prompt_tokens, max_tokens, draw(st.integers(0, max_tokens)), abort_step)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    num_slots, max_seq_len = draw(st.integers(1, 4)), draw(st.integers(2, 20))
    budget, max_steps = num_slots + draw(st.integers(0, 12)), draw(st.integers(1, 5))
    coming = draw(st.lists(arrivals(max_seq_len), min_size=1, max_size=8))
    tokens = draw(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=30))
    in_order = sorted(coming, key=lambda each: each.step)
    return World(num_slots, max_seq_len, budget, max_steps, draw(st.integers(0, 2)), in_order, tokens)


class Run(FakeEngine):
    """Plays a world to its end, and notes what is heard of each request and in which step it ends."""

    def __init__(self, world: World) -> None:
        words = cycle(world.tokens)
        sizes = {"max_steps": world.max_steps, "max_seq_len": world.max_seq_len, "num_ahead": world.num_ahead}
        super().__init__(world.num_slots, world.budget, policy=NO_REUSE, say=lambda _: next(words), **sizes)
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
        for row, num_expected in zip(plan.rows, plan.num_expected, strict=True):
            assert self.requests[row.key.tag].num_remaining + num_expected > 0, "a length's end is known ahead"
        self.started.update(dict.fromkeys(request.request_id for request in self.scheduler.running))
        self.plans.append(plan)
        super().begin(plan)


@given(worlds())
def test_every_request_is_served_in_its_turn_in_time_and_to_its_right_end_by_plans_within_the_limits(
    world: World,
) -> None:
    run = Run(world)
    for plan in run.plans:
        counts = [row.num_new_tokens for row in plan.rows]
        assert 1 <= sum(counts) <= world.budget
        assert 1 <= len({row.key.tag for row in plan.rows}) == len(plan.rows) <= world.num_slots
        assert min(counts) >= 1
        assert counts[: plan.num_decode_rows] == [1] * plan.num_decode_rows
        assert 1 <= plan.num_steps <= world.max_steps
        assert plan.num_steps == 1 or plan.num_decode_rows == len(plan.rows)
    assert list(run.started) == [name for name in run.requests if name in run.started], "not in the order of arrival"
    # In every step the oldest request gets a token, so whoever came earlier bounds how long one can take.
    # With launches in flight, first tokens are heard of, and slots come back, that much later.
    work_before = 0
    for (name, answer), arrival in zip(run.heard.items(), world.arrivals, strict=True):
        work_before += arrival.num_prompt_tokens + arrival.max_tokens + 2 * world.num_ahead
        assert run.end_steps[name] - arrival.step < work_before
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


# Everything at once. Slots hold what their requests think they hold: the fake engine asserts it at every launch.

MAX_SEQ_LEN = 192  # three chunks of memory
FAMILIES = [list(range(10, 150)), list(range(10, 80)) + list(range(200, 270)), [7] * 140]

policies = st.builds(
    Policy,
    enable_prefix_caching=st.booleans(),
    preempt_after=st.none() | st.integers(1, 4),
    preempt_levels=st.integers(1, 2),
    queue_timeout=st.none() | st.sampled_from([2.0, 20.0]),
)
settings_of_engines = st.fixed_dictionaries(
    {
        "policy": policies,
        "new_queue": st.sampled_from([FairQueue, FairQueue, FirstComeQueue]),
        "num_slots": st.integers(1, 5),
        "budget": st.integers(1, 100),
        "cache_tokens": st.none() | st.sampled_from([64 * num_chunks for num_chunks in range(3, 9)]),
        "max_steps": st.integers(1, 4),
    }
)
options_of_requests = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "tenant": st.sampled_from("ab"),
        "salt": st.sampled_from(["", "", "", "x"]),
        "share": st.sampled_from([1.0, 0.5, 0.1]),
        "timeout": st.none() | st.sampled_from([0.5, 5.0]),
    }
)
prompts = st.builds(
    lambda family, length, tail: [*FAMILIES[family][:length], *tail],
    st.integers(0, 2),
    st.integers(1, 40) | st.integers(60, 140),
    st.lists(st.integers(500, 502), max_size=3),
)


class Traffic(RuleBasedStateMachine):
    """Requests come in any order with anything that they may carry; time passes between steps, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.names = count()
        self.groups: list[list[Request]] = []
        self.left: set[str] = set()

    @initialize(
        settings=settings_of_engines,
        num_spare=st.integers(0, 2),
        num_ahead=st.integers(0, 2),
        tokens=st.lists(st.sampled_from([EOS, 9, 9, 9, 9, 30]), min_size=1, max_size=20),
        num_guessed=st.none() | st.integers(1, 16) | st.just("auto"),
        num_snapshots=st.none() | st.integers(0, 4),
    )
    def start(
        self,
        settings: dict[str, Any],
        num_spare: int,
        num_ahead: int,
        tokens: list[int],
        num_guessed: Any,
        num_snapshots: int | None,
    ) -> None:
        words, num_running = cycle(tokens), settings.pop("num_slots")
        self.engine = FakeEngine(
            num_running + num_spare,
            max_num_running=num_running,
            max_seq_len=MAX_SEQ_LEN,
            max_queue_size=6,
            num_ahead=num_ahead if num_guessed is None else 0,
            say=lambda _: next(words),
            speculation=None if num_guessed is None else Speculation(num_guessed),
            num_snapshots=num_snapshots,
            **settings,
        )

    @rule(
        prompt=prompts,
        num_forks=st.integers(1, 3),
        max_tokens=st.integers(1, 5) | st.integers(50, 70),
        is_failing=st.sampled_from([False, False, False, True]),
        options=options_of_requests,
    )
    def arrive(
        self, prompt: list[int], num_forks: int, max_tokens: int, is_failing: bool, options: dict[str, Any]
    ) -> None:
        most = min(max_tokens, MAX_SEQ_LEN - len(prompt))
        requests = [self.engine.ask(f"r{next(self.names)}", prompt, most, **options) for _ in range(num_forks)]
        started = {each.request_id for each in self.engine.requests.values() if each.admission_time is not None}
        has_room = self.engine.scheduler.has_room_for(requests)
        try:
            displaced = self.engine.displace(*requests)
            assert not displaced or not has_room, "somebody left though there was a place"
            assert not started.intersection(displaced), "who had a slot was displaced"
        except QueueFull:
            assert not has_room, "they were refused though there was a place"
            self.engine.scheduler.check()
            return
        self.groups.append(requests)
        if is_failing:
            self.engine.failing.add(requests[-1].request_id)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        self.left.add(name)
        self.engine.abort(name)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(num_steps=st.integers(1, 6))
    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.now += 0.01

    @rule()
    def reset(self) -> None:
        self.engine.scheduler.reset_prefix_cache()
        assert self.engine.slots.warm == {}
        self.engine.scheduler.check()

    @rule()
    def crash(self) -> None:
        self.engine.crash()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        assert_nothing_is_left(engine.scheduler)
        for group in self.groups:
            staying = [each.request_id for each in group if each.request_id not in self.left]
            is_displaced = {isinstance(engine.rejections.get(name), QueueFull) for name in staying}
            assert len(is_displaced) <= 1, "a part of those who came together was displaced"
        assert engine.ends == dict.fromkeys(engine.requests, 1)
        assert engine.slots.slots_remaining == engine.slots.num_slots
        for request in engine.requests.values():
            assert (request.slot, request.leader, request.num_pending, request.num_launches) == (None, None, 0, 0)
            assert request.finish_reason is not None
            assert request.num_cached_tokens < request.num_prompt_tokens


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(stateful_step_count=30)
