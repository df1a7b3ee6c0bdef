"""The policy: which requests run, how many tokens of each, for how many steps.

- Decode rows always run: the token budget is at least the number of slots. The rest of the budget goes to prompts:
  first to those begun, by priority and then the shortest first, then to waiting requests (`waiting`: which is next)
  that get a slot (`placement`: which one, and what is reused). A prompt that does not fit is computed in chunks, so it
  stalls no decode row. A quarter each is kept for waiting requests and for the prompt begun first, so none starves.
- A row without memory for its next tokens gets more. If there is none, the last row of the lowest priority is
  preempted: it returns to the queue with its tokens, and resumes when there is room. The oldest row never is, and no
  request is admitted while memory is short, so that every request finishes.
- A launch has several steps if no request waits or is in prefill, and no row's tokens are needed one by one.
- A step may be planned while the tokens of the one before are pending. A row skips that step if the host must know
  its newest token to plan the next (bad words, or a grammar with slow masks). A row that turns out to have ended was
  planned once too often: its surplus tokens are dropped, and its slot is released once no launch writes to it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter

from chairlift.cache.ledger import SlotLedger
from chairlift.params import FinishReason
from chairlift.plan import RowResult, StepPlan
from chairlift.scheduler.events import TokenEvent
from chairlift.scheduler.fair_queue import FairQueue
from chairlift.scheduler.next_step import NextStep, share_of
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.preemption import choose_last, choose_victim
from chairlift.scheduler.request import TIMED_OUT, Request, RequestState
from chairlift.scheduler.request_queue import RequestQueue
from chairlift.scheduler.restoring import SavedPrefixes
from chairlift.scheduler.speculation import Speculation
from chairlift.scheduler.waiting import DEFAULT_POLICY, Policy, WaitingQueue

_MAX_EXPIRED = 256  # requests ended in a step: each takes some ten microseconds, and thousands may be due at once
_NO_RESULT = RowResult()
_needs_each_token = attrgetter("needs_each_token")


class Scheduler:
    """Turns waiting requests into step plans, and sampled tokens into events. Not thread-safe: one owner."""

    def __init__(
        self,
        slots: SlotLedger,
        max_num_batched_tokens: int,
        max_steps_per_launch: int,
        max_queue_size: int,
        policy: Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.perf_counter,
        max_num_running: int | None = None,
        speculation: Speculation | None = None,
        new_queue: Callable[[], RequestQueue] = FairQueue,
        saved: SavedPrefixes | None = None,
    ) -> None:
        """`clock`: monotonic seconds. `max_num_running` None: as many as slots. `saved` None: nothing is on disk."""
        self._slots = slots
        self._max_num_running = slots.slots_remaining if max_num_running is None else max_num_running
        if max_num_batched_tokens < self._max_num_running:
            raise ValueError(f"a budget of {max_num_batched_tokens} tokens cannot feed {self._max_num_running} slots")
        self.max_steps = self._max_steps_per_launch = max_steps_per_launch  # current, and maximum
        self._max_num_batched_tokens, self._clock, self._policy = max_num_batched_tokens, clock, policy
        self.speculation, self.placement = speculation, Placement(slots, policy.enable_prefix_caching, saved)
        self.waiting = WaitingQueue(new_queue(), max_queue_size, policy, clock)
        self._running: dict[str, RequestState] = {}  # in the order in which they got slots
        self._unstarted: list[TokenEvent] = []  # ends of requests that could not start, not yet reported

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> Iterator[RequestState]:
        """Requests that have a slot."""
        return iter(self._running.values())

    @property
    def warm(self) -> dict[int, int]:
        return self._slots.warm  # slot -> reusable tokens

    @property
    def has_work(self) -> bool:
        return bool(len(self.waiting) or self._running or self._unstarted)

    def has_room_for(self, requests: Sequence[Request]) -> bool:
        """Returns true if `add` would queue these without displacing a waiting request."""
        return self.waiting.has_room_for(requests, self._num_places)

    def add(self, *requests: Request) -> list[TokenEvent]:
        """Queues requests, all or none; they start as slots become available. Returns the ends of those they displace.

        `QueueFull` if too many would wait and too few of them are served after these.
        """
        names = [request.request_id for request in requests]
        if twice := [name for name in names if names.count(name) > 1 or self.find(name) is not None]:
            raise ValueError(f"request {twice[0]!r} is already here")
        return self.waiting.add(requests, self._num_places)

    def find(self, request_id: str) -> RequestState | None:
        """A request that waits or runs. None if it is not here (any more)."""
        return self._running.get(request_id) or self.waiting.find(request_id)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it is, between two steps. None if it is not here (any more)."""
        if (request := self.find(request_id)) is None:
            return None
        self.waiting.remove(request_id)
        return self._end(request)

    def expire(self) -> list[TokenEvent]:
        """Ends requests whose deadline has passed, `_MAX_EXPIRED` at most. Must be called before `schedule`."""
        events, self._unstarted = self._unstarted, []
        while len(events) < _MAX_EXPIRED and (request := self.waiting.pop_overdue()) is not None:
            request.stop_reason = TIMED_OUT
            has_started = request.admission_time is not None
            events.append(self._end(request) if has_started else self.waiting.time_out(request))
        return events

    def reset_prefix_cache(self) -> None:
        """Stops the reuse of everything computed so far by other requests; running ones continue."""
        self.placement.forget_prefixes()

    def schedule(self) -> StepPlan:
        """Plans the next step, to be passed to `advance` when it is launched. Gives the requests that it admits slots.

        The plan has no rows if all depend on launches in flight or on late masks.
        """
        self._preempt_if_wanted()
        step = NextStep(self._max_num_batched_tokens)
        begun, growing, reach = list[RequestState](), list[RequestState](), self._max_steps_per_launch
        for request in self._running.values():
            num_pending = request.num_pending
            if (num_pending or request.grammar is not None) and not request.can_be_planned:
                continue
            num_uncomputed = len(request.token_ids) + num_pending - request.num_computed  # without a call
            if num_uncomputed != 1 or request.is_prompt_only:
                begun.append(request)
            elif not request.is_paused:
                step.decode.append(request)
                if request.num_computed + reach > request.num_held:
                    growing.append(request)
        short = {request for request in growing if not self._grow(request)}
        if growing and not self._slots.budget.is_ample:  # some may have been preempted
            begun = [request for request in begun if _keeps_slot(request)]
            step.decode = [request for request in step.decode if _keeps_slot(request) and request not in short]
        step.num_left -= len(step.decode)
        num_kept = share_of(step.num_left) if len(self.waiting) and self._num_places else 0
        step.go_on(begun, self.placement, num_kept)
        self._admit(step)
        step.go_on(begun, self.placement, 0)
        if self.speculation is not None and step.decode:
            self.speculation.add_guesses(step, self.placement)
        is_alone = not (step.num_prompt_tokens or len(self.waiting) or any(map(_needs_each_token, self.running)))
        return step.finish(self.max_steps if is_alone else 1, self._slots.max_seq_len)

    def advance(self, plan: StepPlan) -> StepPlan:
        """Records that a plan is launched now, as if no row ended in it. `update` must follow, in the same order.

        Returns the plan as it is to be computed: with the copies and scrubs that precede it.
        """
        reservation = self._slots.reserve(plan.slots, plan.num_new_tokens, plan.num_steps, plan.num_tentative)
        valid_lengths, owner_of = list[int](), self.placement.owner_of
        for row, num_expected in zip(plan.rows, plan.num_expected, strict=True):
            request = owner_of(row.slot)
            # The last token that a row gets has no key and value yet; a guess's tokens are already among the new ones.
            num_valid = len(row.input_ids) + max(num_expected - 1 - len(row.guess), 0)
            request.num_computed += num_valid
            request.num_pending += num_expected
            request.num_launches += 1
            valid_lengths.append(num_valid)
        self._slots.commit(valid_lengths, reservation)
        begun = replace(plan, jobs=tuple(self._slots.owed), reservation=reservation)
        self.placement.keep_states(plan)  # by jobs that precede the next plan
        return begun

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> list[TokenEvent]:
        """Takes each row's result once its launch is over, and retires ended requests. One event per changed row."""
        now, events = self._clock(), list[TokenEvent]()
        owner_of = self.placement.owner_of  # no slot gets another owner while a launch writes to it
        for row, num_expected, result in zip(plan.rows, plan.num_expected, results, strict=True):
            request = owner_of(row.slot)
            request.num_pending -= num_expected
            request.num_launches -= 1
            if result.error is not None or result.has_bad_surplus:
                request.contents.surplus_failed()
            had_ended = request.finish_reason is not None
            if had_ended:  # the result is surplus
                self._release_if_idle(request)
                continue
            if result.is_late or row.guess:
                num_right = 0 if result.is_late else len(result.token_ids)
                self.placement.step_back(request, num_expected - num_right)
            kept = request.record(row, result)
            if self.speculation is not None and row.guess and not result.is_late:
                self.speculation.learn(request, len(kept), len(result.token_ids))
            if kept or result.prompt_result is not None or request.finish_reason is not None:
                events.append(TokenEvent.of(request, kept, result, now))
            if request.finish_reason is not None:
                self._retire(request)
            elif request.is_yielding:
                self._release_if_idle(request)
            elif request.contents.has_bad_surplus:
                self.placement.scrub_surplus(request)
        return events

    def abandon(self) -> None:
        """After a failed or interrupted step: drops all requests with a slot, without events; waiting ones stay."""
        self.placement.abandon()
        self._running.clear()

    def check(self) -> None:
        """Asserts that requests and slots agree. For tests, and for when the engine is idle."""
        self.placement.check()
        self.waiting.check()
        running = {request.request_id for request in self.placement.owners if request.finish_reason is None}
        assert running == set(self._running), "a request runs without a slot, or has one and does not run"

    @property
    def _num_places(self) -> int:
        """Number of requests that may start to run: 0 while there is no memory for the next one."""
        num_places = min(self._slots.slots_remaining, self._max_num_running - len(self._running))
        if num_places and len(self.waiting):
            num_places *= self.placement.has_memory_for(self.waiting.peek(), len(self._running))
        return num_places

    def _admit(self, step: NextStep) -> None:
        """Gives waiting requests slots, in order, while there are a slot, memory and budget for the next one."""
        while len(self.waiting) and step.num_left and self._num_places:
            request = self.waiting.start_next()
            if request.finish_reason is not None:
                self._unstarted.append(TokenEvent.of(request, [], _NO_RESULT, self._clock()))
                continue
            self.placement.place(request)
            self._running[request.request_id] = request
            if request.is_ready:
                step.add_prompt(request)

    def _preempt_if_wanted(self) -> None:
        """Preempts a running request if one of higher priority waits and cannot start otherwise."""
        if len(self.waiting) and not self._num_places:
            victim = choose_victim(self.running, self.waiting.peek(), self._policy)
            if victim is not None:
                self._make_yield(victim)

    def _grow(self, request: RequestState) -> bool:
        """Gets memory for a decode row's next launch, by preemption if needed. False if the row must wait for it."""
        wanted = min(request.num_computed + self._max_steps_per_launch, self._slots.max_seq_len)
        while _keeps_slot(request) and not self.placement.provide(request, wanted):
            if (victim := choose_last(list(self.running))) is None or not self._make_yield(victim):
                return False  # launches in flight still write to the slot that will be released
        return _keeps_slot(request)

    def _make_yield(self, victim: RequestState) -> bool:
        """Preempts a running request. False if its slot is released only after launches in flight."""
        victim.is_yielding = True
        self._release_if_idle(victim)
        return victim.slot is None

    def _end(self, request: RequestState) -> TokenEvent:
        """Ends a request that is not in the queue (any more). Must be called between two steps."""
        request.finish_reason = FinishReason.ABORT
        if request.slot is None:
            self.waiting.charge(request)  # in case it was preempted; others have generated nothing
        else:
            self._retire(request)
        return TokenEvent.of(request, [], _NO_RESULT, self._clock())

    def _retire(self, request: RequestState) -> None:
        del self._running[request.request_id]
        if self.speculation is not None:
            self.speculation.remember(request)
        request.drop_surplus()
        self.waiting.charge(request)
        self._release_if_idle(request)

    def _release_if_idle(self, request: RequestState) -> None:
        """Releases the slot of a request that ended or was preempted, once no launch writes to it."""
        if request.num_launches:
            return
        self.placement.release(request)
        if request.finish_reason is None:
            del self._running[request.request_id]
            request.is_yielding = False
            request.num_computed = request.num_reused = 0
            self.waiting.put_back(request)


def _keeps_slot(request: RequestState) -> bool:
    return request.slot is not None and not request.is_yielding
