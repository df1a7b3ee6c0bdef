"""A scheduler with a clock that tests turn, and an executor whose slots hold token ids where keys and values would be.

Whatever a row reads of its slot must be what its request had computed: that is asserted at every launch, whether the
tokens were computed there, kept from an earlier request or copied.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

from chairlift.cache.ledger import SlotLedger
from chairlift.cache.state_books import StateBooks
from chairlift.errors import QueueFull
from chairlift.params import DEFAULT_OPTIONS, FinishReason, RequestOptions, SamplingParams
from chairlift.plan import (
    MOST_ENDS,
    ON_DEVICE,
    Grammar,
    Job,
    RowPlan,
    RowResult,
    SlotCopy,
    StateCopy,
    StateScrub,
    StepPlan,
)
from chairlift.scheduler import Drafter, Policy, Request, RequestState, Scheduler, Speculation, TokenEvent, begin_step
from chairlift.scheduler.fair_queue import FairQueue
from chairlift.scheduler.request_queue import RequestQueue

EOS, WORD = 1, 9
MAX_TENTATIVE = 65  # the longest guess and the token before it
ROW_BYTES = 1000  # of a state
_OPTIONS = {
    "priority": "priority",
    "tenant": "tenant",
    "salt": "cache_salt",
    "share": "queue_share",
    "timeout": "timeout",
}
_OF_REQUESTS = ("eos_token_ids", "new_grammar", "new_token_filter", "prompt_task", "text_may_end_early")
NO_REUSE = Policy(enable_prefix_caching=False)


@dataclass(frozen=True)
class Plan:
    """A step plan as a test writes it: names and numbers of tokens, decode rows first."""

    rows: list[tuple[str, int]]
    decode: int = 0
    steps: int = 1
    copies: list[SlotCopy] = field(default_factory=list)


def written(plan: StepPlan, copies: Sequence[SlotCopy] = ()) -> Plan:
    rows = [(row.key.tag, row.num_new_tokens) for row in plan.rows]
    return Plan(rows, plan.num_decode_rows, plan.num_steps, list(copies))


class Words:
    """A grammar: exactly these tokens, in this order."""

    def __init__(self, *tokens: int) -> None:
        self.left = list(tokens)
        self.is_ready = self.keeps_pace = True

    def foresee(self) -> None:
        """It says nothing."""

    def advance(self, token_id: int) -> bool:
        if token_id != self.left.pop(0):
            raise ValueError(f"token {token_id} does not fit")
        return not self.left


class Driver:
    """A scheduler with the real ledger; launches begin and land, with whatever results, when the test says so."""

    def __init__(
        self,
        num_slots: int = 4,
        budget: int = 16,
        max_steps: int = 1,
        max_seq_len: int = 64,
        max_queue_size: int = 100,
        policy: Policy = NO_REUSE,
        max_num_running: int | None = None,
        cache_tokens: int | None = None,
        speculation: Speculation | None = None,
        states: StateBooks | None = None,
        new_queue: Callable[[], RequestQueue] = FairQueue,
    ) -> None:
        self.now = 0.0
        self.slots = SlotLedger(num_slots, max_seq_len, cache_tokens, states)
        limits = (budget, max_steps, max_queue_size)
        parts = (max_num_running, speculation, new_queue)
        self.scheduler = Scheduler(self.slots, *limits, policy, lambda: self.now, *parts)
        self.requests: dict[str, RequestState] = {}
        self.in_flight: deque[StepPlan] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def make(
        self,
        name: str,
        prompt: int | list[int],
        max_tokens: int = 20,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        **more: Any,
    ) -> Request:
        """`prompt`: tokens, or how many; `more`: a grammar, and parameters of sampling."""
        grammar: Grammar | None = more.pop("grammar", None)
        tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
        new_grammar = None if grammar is None else lambda: grammar
        sampling = SamplingParams(max_tokens=None, **more)
        return Request(name, tokens, sampling, max_tokens, 0, frozenset({EOS}), new_grammar, options=options)

    def add(self, name: str, *args: Any, **kwargs: Any) -> RequestState:
        """Queues what `make` makes of these."""
        self.submit(self.make(name, *args, **kwargs))
        return self.requests[name]

    def given(self, *requests: tuple[Any, ...]) -> Self:
        """Queues what `add` makes of these, one after the other. A dict at an end: what is given by keyword."""
        for request in requests:
            positional = [each for each in request if not isinstance(each, dict)]
            self.add(*positional, **(request[-1] if len(positional) < len(request) else {}))
        return self

    def submit(self, *requests: Request) -> list[TokenEvent]:
        """Queues them together."""
        events = self.scheduler.add(*requests)
        states = [self.scheduler.find(request.request_id) for request in requests]
        self.requests |= {state.request_id: state for state in states if state is not None}
        self.scheduler.check()
        return events

    def launch(self) -> StepPlan:
        """Begins the next step, if there is anything to compute."""
        plan = begin_step(self.scheduler, self.slots, self.begin)
        if plan.rows:
            self.in_flight.append(plan)
        self.scheduler.check()
        return plan

    def begin(self, plan: StepPlan) -> None:
        """Does what is to happen while the plan's rows hold what was computed before."""

    def land(self, results: Sequence[RowResult]) -> list[TokenEvent]:
        """The oldest launch is over."""
        events = self.scheduler.update(self.in_flight.popleft(), results)
        self.scheduler.check()
        return events


class FakeEngine(Driver):
    """Samples a request's `answer` for it, and then what `say` decides, called with its name for each."""

    def __init__(
        self,
        num_slots: int = 4,
        budget: int = 64,
        *,
        num_ahead: int = 0,
        say: Callable[[str], int] = lambda _: WORD,
        num_snapshots: int | None = None,
        **settings: Any,
    ) -> None:
        """`settings`: of `Driver`; prefixes are reused, unless its policy says otherwise.

        `num_snapshots`: of the states of recurrent layers; None: there are no such layers.
        """
        states = None if num_snapshots is None else StateBooks(num_slots, MAX_TENTATIVE, num_snapshots, ROW_BYTES)
        if states is not None:
            states.stops_at_ends = settings.get("speculation") is None
        super().__init__(num_slots, max(budget, num_slots), **{"policy": Policy(), "states": states, **settings})
        self.events: list[TokenEvent] = []  # of the latest step
        self.ends: Counter[str] = Counter()  # how often each request was said to be over
        self.rejections: dict[str, Exception] = {}  # by request
        self.failing: set[str] = set()  # whose next token is none, because their logits are no numbers
        self.num_tokens_computed = 0
        self._num_ahead = num_ahead
        self._answers: dict[str, list[int]] = {}
        self._say_more = say
        self._contents: list[list[int]] = [[] for _ in range(num_slots)]
        # What states have taken, by row, and the inputs that wait for their turn, by slot.
        self._states: list[list[int]] = [[] for _ in range(num_slots + (num_snapshots or 0))]
        self._pending: list[list[int]] = [[] for _ in range(num_slots)]
        self._said: dict[str, list[int]] = {}  # by request: its prompt and all that was sampled, surplus included
        self._results: deque[list[RowResult]] = deque()  # of launches in flight
        self._copies: list[SlotCopy] = []  # before the latest launch

    def ask(
        self, name: str, prompt: int | list[int], max_tokens: int = 20, *, answer: Sequence[int] = (), **more: Any
    ) -> Request:
        """`more`: what else a request has, its options, or its parameters of sampling."""
        own = {each: more.pop(each) for each in _OF_REQUESTS if each in more}
        options = RequestOptions(**{_OPTIONS[each]: more.pop(each) for each in _OPTIONS if each in more})
        self._answers[name] = list(answer)
        request = replace(self.make(name, prompt, max_tokens, options=options, **more), **own)
        if self.scheduler.speculation is not None:
            request = replace(request, new_drafter=partial(Drafter, len(request.prompt_token_ids)))
        return request

    def add(self, name: str, *args: Any, **kwargs: Any) -> RequestState:
        """Queues what `ask` makes of these."""
        self.displace(self.ask(name, *args, **kwargs))
        return self.requests[name]

    def displace(self, *requests: Request) -> list[str]:
        """Queues them together, and returns whom they displaced."""
        events = self.submit(*requests)
        self._said |= {request.request_id: list(request.prompt_token_ids) for request in requests}
        self._note_ends(events)
        assert all(isinstance(event.rejection, QueueFull) for event in events)
        return [event.request_id for event in events]

    def crash(self) -> None:
        """All launches in flight come to nothing."""
        self.ends.update({request.request_id for request in self.scheduler.running})
        self.scheduler.abandon()
        self.in_flight.clear()
        self._results.clear()
        self.scheduler.check()

    def abort(self, name: str) -> TokenEvent | None:
        event = self.scheduler.abort(name)
        self._note_ends([event] if event is not None else [])
        self.scheduler.check()
        return event

    def step(self) -> Plan:
        """Expires, launches, and takes the results of the oldest launch if it is its turn."""
        self.events = self.scheduler.expire()
        self._note_ends(self.events)
        plan = self.launch()
        copies = self._copies if plan.rows else self._settle()
        if self.in_flight and (not plan.rows or len(self.in_flight) > self._num_ahead):
            self._land()
        return written(plan, copies)

    def steps(self, count: int) -> list[Plan]:
        return [self.step() for _ in range(count)]

    def play(self, *script: tuple[Any, ...] | str | Plan) -> Self:
        """Requests (see `given`) come, those named leave, and each plan is what the next step must be."""
        for number, each in enumerate(script):
            if isinstance(each, Plan):
                assert self.step() == each, f"{number} in the script"
            elif isinstance(each, str):
                self.abort(each)
            else:
                self.given(each)
        return self

    def run(self, limit: int = 2000) -> None:
        """To the end of all work."""
        for _ in range(limit):
            if not self.has_work:
                return
            self.step()
        raise AssertionError("it goes on for ever")

    def finish(self, name: str) -> None:
        """Steps until that request is over."""
        while self.requests[name].finish_reason is None:
            self.step()

    def serve(self, name: str, *args: Any, **kwargs: Any) -> RequestState:
        """Queues a request, and steps until it is over."""
        self.add(name, *args, **kwargs)
        self.finish(name)
        return self.requests[name]

    def slot_of(self, name: str) -> int:
        slot = self.requests[name].slot
        assert slot is not None
        return slot

    def begin(self, plan: StepPlan) -> None:
        """Computes, in slots that hold token ids."""
        self._copies = self._perform(plan.jobs)
        results = []
        for index, row in enumerate(plan.rows):
            said, slot, start = self._said[row.key.tag], row.slot, row.start
            assert self._contents[slot][:start] == said[:start], "it reads what is not its own"
            new = [*said[start : start + row.num_new_tokens - len(row.guess)], *row.guess]
            assert list(row.input_ids) in (new, [ON_DEVICE]), "it computes what is not its own"
            sampled = self._sample(row, plan.num_steps) if row.is_sampled else []
            new += sampled[:-1] if not row.guess else []
            assert len(new) == row.num_new_tokens + plan.num_steps - 1
            self._contents[slot][start:] = new
            if self.slots.states is not None:
                self._advance_state(plan, index, new)
            said += sampled
            self.num_tokens_computed += len(new)
            is_failing = row.is_sampled and row.key.tag in self.failing
            results.append(RowResult([], error="no number") if is_failing else RowResult(sampled))
        self._results.append(results)

    def _advance_state(self, plan: StepPlan, index: int, new: list[int]) -> None:
        """A state takes its pending inputs first, then all new tokens but the tentative ones, and none from its end on.

        Not even the end token: the slot's tokens are what it has computed so far, and what is said may end it.
        """
        assert plan.reservation is not None
        slot, start = plan.reservation.seq_ids[index], plan.reservation.lengths[index]
        num_replayed, num_tentative = plan.reservation.num_replayed[index], plan.reservation.num_tentative[index]
        position, end = start - num_replayed, len(new) - num_tentative
        limit = self._end_of(plan.rows[index])
        taken = self._states[slot] if position else []
        assert taken == self._contents[slot][: min(position, limit)], "its state is not that of its tokens"
        if position > limit:
            return
        assert len(self._pending[slot]) >= num_replayed, "it replays what was not left"
        self._states[slot] = [*taken, *self._pending[slot][:num_replayed], *new[:end]][:limit]
        self._pending[slot] = new[end:]

    def _end_of(self, row: RowPlan) -> int:
        """Returns the place of a sequence's end token among what its slot has computed; without one, a large number."""
        states, key = self.slots.states, row.key
        if states is None or not states.stops_at_ends:
            return sys.maxsize
        if len(key.end_token_ids) > MOST_ENDS:
            return sys.maxsize
        first = key.num_prompt_tokens + key.min_tokens
        tokens = self._contents[row.slot]
        return next((place for place in range(first, len(tokens)) if tokens[place] in key.end_token_ids), sys.maxsize)

    def _sample(self, row: RowPlan, num_steps: int) -> list[int]:
        """One token a step; with a guess, up to the first that is not what was guessed."""
        sampled = [self._say(row.key.tag) for _ in range(num_steps)]
        for token in row.guess:
            if sampled[-1] != token:
                break
            sampled.append(self._say(row.key.tag))
        return sampled

    def _say(self, name: str) -> int:
        return self._answers[name].pop(0) if self._answers[name] else self._say_more(name)

    def _land(self) -> None:
        events = self.land(self._results.popleft())
        self._note_ends(events)
        self.events += events

    def _note_ends(self, events: list[TokenEvent]) -> None:
        self.ends.update(event.request_id for event in events if event.finish_reason is not None)
        self.rejections |= {event.request_id: event.rejection for event in events if event.rejection is not None}

    def _settle(self) -> list[SlotCopy]:
        """Does what no plan takes along."""
        copies = self._perform(list(self.slots.owed))
        self.slots.owed.clear()
        return copies

    def _perform(self, jobs: Sequence[Job]) -> list[SlotCopy]:
        """Copies and scrubs, and returns the copies."""
        copies = []
        for job in jobs:
            if isinstance(job, SlotCopy):
                self._contents[job.target] = self._contents[job.source][: job.num_tokens]
                copies.append(job)
            elif isinstance(job, StateCopy):
                self._states[job.target] = list(self._states[job.source])
            elif isinstance(job, StateScrub):
                self._states[job.row] = []
                self._pending[job.row : job.row + 1] = [[]] * (job.row < len(self._pending))
            else:
                del self._contents[job.slot][job.start :]
        return copies


def assert_nothing_is_left(scheduler: Scheduler) -> None:
    """Asserts that a scheduler without work knows the tokens of warm slots only, and nothing once they are
    forgotten.
    """
    queue, placement, slots = scheduler.waiting, scheduler.placement, scheduler._slots
    assert (scheduler._running, scheduler._unstarted) == ({}, [])
    assert (queue._requests, list(queue), queue._num_by_tenant) == ({}, [], {})
    assert queue._deadlines.first() is None
    assert placement._owners == {}
    scheduler.reset_prefix_cache()
    index = placement._index
    assert (index._roots, index._entries) == ({}, {})
    assert slots.states is None or not len(slots.states.snapshots), "a state is kept, though it was forgotten"
    assert (slots.warm, slots._in_flight, slots._common._prefixes) == ({}, {}, {})
    assert slots.num_free == slots.num_slots


def end_of(event: TokenEvent | None) -> tuple[str, FinishReason | None, int | str | None]:
    assert event is not None
    return event.request_id, event.finish_reason, event.stop_reason


def decode(*names: str, steps: int = 1) -> Plan:
    return Plan([(name, 1) for name in names], len(names), steps)


def beside(name: str, *chunks: tuple[str, int], copies: Sequence[SlotCopy] = ()) -> Plan:
    """A decode row and chunks of prompts."""
    return Plan([(name, 1), *chunks], decode=1, copies=list(copies))


def prefill(copies: Sequence[SlotCopy] = (), **chunks: int) -> Plan:
    """Chunks of prompts, by their names."""
    return Plan(list(chunks.items()), copies=list(copies))
