"""Whatever comes, leaves, forks, runs out of time or is pushed aside: all requests end once, all slots come back.

Slots hold what their requests think they hold: the fake engine asserts it at every launch.
"""

from itertools import count, cycle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from chairlift.errors import QueueFull
from chairlift.scheduler import Policy
from tests.scheduler.fake_engine import EOS, FakeEngine

MAX_SEQ_LEN = 48
FAMILIES = [list(range(10, 50)), list(range(10, 30)) + list(range(60, 80)), [7] * 40]

policies = st.builds(
    Policy,
    enable_prefix_caching=st.booleans(),
    priority_ageing=st.sampled_from([0.5, 30.0]),
    preempt_after=st.none() | st.integers(1, 4),
    queue_timeout=st.none() | st.sampled_from([2.0, 20.0]),
)
prompts = st.builds(
    lambda family, length, tail: [*FAMILIES[family][:length], *tail],
    st.integers(0, 2),
    st.integers(1, 40),
    st.lists(st.integers(90, 92), max_size=3),
)


class Traffic(RuleBasedStateMachine):
    """Requests come in any order with anything that they may carry; time passes between steps, or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.names = count()

    @initialize(
        policy=policies,
        num_slots=st.integers(1, 5),
        num_spare=st.integers(0, 2),
        budget=st.integers(1, 40),
        max_steps=st.integers(1, 4),
        num_ahead=st.integers(0, 2),
        tokens=st.lists(st.sampled_from([EOS, 9, 9, 9, 9, 30]), min_size=1, max_size=20),
    )
    def start(
        self,
        policy: Policy,
        num_slots: int,
        num_spare: int,
        budget: int,
        max_steps: int,
        num_ahead: int,
        tokens: list[int],
    ) -> None:
        words = cycle(tokens)
        self.engine = FakeEngine(
            num_slots=num_slots + num_spare,
            budget=budget,
            max_seq_len=MAX_SEQ_LEN,
            max_steps=max_steps,
            max_queue_size=6,
            policy=policy,
            num_ahead=num_ahead,
            say=lambda _: next(words),
            max_num_running=num_slots,
        )

    @rule(
        prompt=prompts,
        num_forks=st.integers(1, 3),
        max_tokens=st.integers(1, 5),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("ab"),
        salt=st.sampled_from(["", "", "", "x"]),
        timeout=st.none() | st.sampled_from([0.5, 5.0]),
    )
    def arrive(
        self,
        prompt: list[int],
        num_forks: int,
        max_tokens: int,
        priority: int,
        tenant: str,
        salt: str,
        timeout: float | None,
    ) -> None:
        requests = [
            self.engine.make(
                f"r{next(self.names)}",
                prompt,
                min(max_tokens, MAX_SEQ_LEN - len(prompt)),
                priority=priority,
                tenant=tenant,
                salt=salt,
                timeout=timeout,
            )
            for _ in range(num_forks)
        ]
        try:
            self.engine.scheduler.add(*requests)
        except QueueFull:
            for request in requests:
                del self.engine.requests[request.request_id]
        self.engine.scheduler.check()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(sorted(self.engine.requests))))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def wait(self, seconds: float) -> None:
        self.engine.now += seconds

    @rule(num_steps=st.integers(1, 6))
    def go_on(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()
            self.engine.now += 0.01

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        assert engine.ends == dict.fromkeys(engine.requests, 1)
        assert engine.slots.num_claimable == engine.slots.num_slots
        for request in engine.requests.values():
            assert (request.slot, request.leader, request.num_pending, request.num_launches) == (None, None, 0, 0)
            assert request.end_time is not None
            assert request.num_cached_tokens < request.num_prompt_tokens


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
