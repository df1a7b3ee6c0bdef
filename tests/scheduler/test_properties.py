"""Whatever arrives, is aborted or is sampled: every request ends once and in time, and every slot comes back."""

from collections import deque
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from chairlift.params import FinishReason, SamplingParams
from chairlift.scheduler import Request, RequestState, RowResult, StepPlan, TokenEvent
from tests.scheduler.fake_engine import Driver

EOS, STOP, NUM_TOKENS = 0, 1, 6  # token ids are drawn from [0, NUM_TOKENS)


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


class Run(Driver):
    """Plays a world to its end and notes when and how each request ended."""

    def __init__(self, world: World) -> None:
        super().__init__(world.num_slots, world.budget, world.max_steps, world.max_seq_len)
        self.world = world
        self.asked = [self._request(index, arrival) for index, arrival in enumerate(world.arrivals)]
        self.plans: list[StepPlan] = []
        self.results: deque[list[RowResult]] = deque()  # of launches in flight
        self.heard: dict[str, list[int]] = {request.request_id: [] for request in self.asked}
        self.ends: dict[str, list[int]] = {request.request_id: [] for request in self.asked}  # steps, hopefully one
        self.started: dict[str, None] = {}  # in the order in which they got slots
        self._num_said = 0

    def play(self) -> None:
        last_arrival = max(arrival.step for arrival in self.world.arrivals)
        step = 0
        while step <= last_arrival or self.has_work:
            for arrival, request in zip(self.world.arrivals, self.asked, strict=True):
                if arrival.step == step:
                    self.take(request)
            for arrival, request in zip(self.world.arrivals, self.asked, strict=True):
                if arrival.abort_step == step:
                    self._note(step, self.scheduler.abort(request.request_id))
            self.scheduler.check()
            if self.has_work:
                self._step(step)
            step += 1
            assert step < 2000, "it goes on for ever"

    def _step(self, step: int) -> None:
        has_launched = bool(self.launch().rows)
        self.started.update(dict.fromkeys(request.request_id for request in self.scheduler.running))
        if has_launched and len(self.in_flight) <= self.world.num_ahead:
            return
        for event in self.land(self.results.popleft()):
            self._note(step, event)

    def begin(self, plan: StepPlan) -> None:
        assert all(row.request.num_remaining > 0 for row in plan.rows), "a length's end is known ahead"
        owners = {(row.request.slot, row.request) for row in plan.rows}
        assert all(slot != s or owner is o for slot, owner in owners for s, o in self._writers()), "two write to a slot"
        self.plans.append(plan)
        self.results.append([RowResult(self._say(plan.num_steps) if row.is_sampled else []) for row in plan.rows])

    def _writers(self) -> set[tuple[int | None, RequestState]]:
        """Who writes to which slot in launches in flight."""
        return {(row.request.slot, row.request) for plan in self.in_flight for row in plan.rows}

    def _say(self, count: int) -> list[int]:
        start = self._num_said
        self._num_said += count
        return [self.world.tokens[i % len(self.world.tokens)] for i in range(start, start + count)]

    def _note(self, step: int, event: TokenEvent | None) -> None:
        if event is None:
            return
        assert not self.ends[event.request_id], "there is news of a request that has ended"
        self.heard[event.request_id] += event.new_token_ids
        if event.finish_reason is not None:
            self.ends[event.request_id].append(step)

    @staticmethod
    def _request(index: int, arrival: Arrival) -> Request:
        params = SamplingParams(max_tokens=None, min_tokens=arrival.min_tokens, stop_token_ids=[STOP])
        prompt = [NUM_TOKENS] * arrival.num_prompt_tokens
        return Request(f"r{index}", prompt, params, arrival.max_tokens, index, frozenset({EOS}))


def played(world: World) -> Run:
    run = Run(world)
    run.play()
    return run


@given(worlds())
def test_every_request_ends_exactly_once_and_all_slots_come_back(world: World) -> None:
    run = played(world)
    assert [len(steps) for steps in run.ends.values()] == [1] * len(world.arrivals)
    assert run.slots.num_free == world.num_slots
    assert (run.scheduler.num_waiting, run.scheduler.num_running) == (0, 0)


@given(worlds())
def test_nothing_starves(world: World) -> None:
    """In every step the oldest request gets a token, so whoever came earlier bounds how long one can take.

    With launches in flight, first tokens are heard of, and slots come back, that much later.
    """
    run = played(world)
    work_before = 0
    for arrival, (end,) in zip(world.arrivals, run.ends.values(), strict=True):
        work_before += arrival.num_prompt_tokens + arrival.max_tokens + 2 * world.num_ahead
        assert end - arrival.step < work_before


@given(worlds())
def test_answers_are_whole_and_end_for_the_reason_given(world: World) -> None:
    run = played(world)
    for asked, arrival in zip(run.asked, world.arrivals, strict=True):
        answer, request = run.heard[asked.request_id], run.requests[asked.request_id]
        assert request.token_ids == [*asked.prompt_token_ids, *answer]
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
    for plan in played(world).plans:
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
    order = [int(request_id.removeprefix("r")) for request_id in played(world).started]
    assert order == sorted(order)
