"""Whatever comes, leaves, forks, fails, is late or is pushed aside: all requests end once, and all slots come back.

Slots hold what their requests think they hold: the fake engine asserts it at every launch. In the end no table holds
anything of anybody.
"""

from itertools import count, cycle
from typing import Any, Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chairlift.errors import QueueFull
from chairlift.scheduler import Policy, Request, Speculation
from tests.scheduler.fake_engine import EOS, FakeEngine, assert_nothing_is_left

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
    )
    def start(
        self,
        settings: dict[str, Any],
        num_spare: int,
        num_ahead: int,
        tokens: list[int],
        num_guessed: int | Literal["auto"] | None,
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
        can_take = self.engine.scheduler.can_take(requests)
        try:
            displaced = self.engine.displace(*requests)
            assert not displaced or not can_take, "somebody left though there was a place"
            assert not started.intersection(displaced), "who had a slot was displaced"
        except QueueFull:
            assert not can_take, "they were refused though there was a place"
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
