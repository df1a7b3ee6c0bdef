"""The policy: who runs, how many tokens of whom, for how many steps.

- Decode rows always go on: the token budget is at least the number of slots.
- What is left of the budget goes to prompts: first those begun, then those that wait (`queue`: whose turn it is) and
  find a slot (`placement`: which one, and what of the prompt need not be computed). A prompt that does not fit is
  computed in chunks, so it never stalls the decoding of others.
- When nobody waits and nobody is being prefilled, several decode steps go into one launch. A row whose next token needs
  a mask from the host (a grammar, bad words) keeps only the first token of such a launch.
- A step may be planned while the tokens of the one before are still being computed. Rows that must show their token to
  the host first sit that step out. A row that turns out to have ended has been planned once too often: its surplus is
  dropped, and its slot is free when no launch writes to it.
- A row whose mask is late gets no token in that launch; its newest token is computed once more when the mask is ready.
- If the policy allows it, a request of higher priority takes the slot of a running one when there is no other. That one
  goes back to the queue; its slot stays warm, so that it loses little.

Nothing starves: every row that decodes goes on, each ends after at most `max_tokens` of its own, prompts are computed
in order, and waiting makes up for a lower priority.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

from chairlift.cache.ledger import Reservation, SlotLedger
from chairlift.config import EngineConfig
from chairlift.params import FinishReason
from chairlift.scheduler.placement import Placement
from chairlift.scheduler.plan import Draft, RowPlan, RowResult, StepPlan, TokenEvent
from chairlift.scheduler.request import Request, RequestState
from chairlift.scheduler.waiting import WaitingRoom

TIMED_OUT = "timeout"
"""The stop reason of a request that ran for too long."""

_MAX_EXPIRED = 256  # requests in a step: to end one takes some ten microseconds, and thousands may be due at once


@dataclass(frozen=True, slots=True)
class Policy:
    """What users may choose of how requests are served; the fields of `EngineConfig` of these names."""

    enable_prefix_caching: bool = True
    priority_ageing: float = 30.0  # seconds without a slot for anybody of a priority that make up for a level
    preempt_after: int | None = None  # tokens generated before a slot may be lost; None: it never is
    preempt_levels: int = 1  # of priority by which the one that takes a slot must be above the one that loses it
    queue_timeout: float | None = None  # seconds to wait for a slot

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(**{each.name: getattr(config, each.name) for each in fields(cls)})


DEFAULT_POLICY = Policy()


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
    ) -> None:
        """`clock`: seconds, which never go back. `max_num_running`: None: as many as there are slots."""
        self._slots = slots
        self._max_num_running = slots.slots_remaining if max_num_running is None else max_num_running
        if max_num_batched_tokens < self._max_num_running:
            raise ValueError(f"a budget of {max_num_batched_tokens} tokens cannot feed {self._max_num_running} slots")
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_steps_per_launch = max_steps_per_launch
        self._policy = policy
        self._clock = clock
        self._placement = Placement(slots, policy.enable_prefix_caching)
        self.waiting = WaitingRoom(policy.priority_ageing, policy.queue_timeout, max_queue_size, clock)
        self._running: dict[str, RowPlan] = {}  # in the order in which they got slots: the row of each when it decodes
        self._leaving: set[RequestState] = set()  # ended, but a launch still writes to their slots

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost its slot to another."""
        return self.waiting.num_preemptions

    @property
    def running(self) -> Iterator[RequestState]:
        """Those that have a slot."""
        return (row.request for row in self._running.values())

    @property
    def warm(self) -> dict[int, int]:
        """The reusable tokens of each warm slot."""
        return self._slots.warm

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self._running)

    def can_take(self, requests: Sequence[Request]) -> bool:
        """Whether there are places in the queue, or slots that nobody waits for yet, so that nobody leaves for them."""
        return self.waiting.can_take(requests, self._num_places)

    def add(self, *requests: Request) -> list[TokenEvent]:
        """Queues requests, all or none; they start as there are slots. Returns the ends of those who leave for them.

        `QueueFull` if too many would wait and none of them is served after these.
        """
        names: set[str] = set()
        for request in requests:
            name = request.request_id
            if name in names or self.find(name) is not None:
                raise ValueError(f"request {name!r} is already here")
            names.add(name)
        return self.waiting.add(requests, self._num_places, len(self._running))

    def find(self, request_id: str) -> RequestState | None:
        """A request that waits or runs. None if it is not here (any more)."""
        row = self._running.get(request_id)
        return self.waiting.find(request_id) if row is None else row.request

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it is, between two steps. None if it is not here (any more)."""
        request = self.find(request_id)
        if request is None:
            return None
        self.waiting.remove(request_id)
        return self._end(request)

    def expire(self) -> list[TokenEvent]:
        """Ends requests whose time is up, so many in a step. To be called before `schedule`."""
        events: list[TokenEvent] = []
        while len(events) < _MAX_EXPIRED and (request := self.waiting.pop_overdue()) is not None:
            request.stop_reason = TIMED_OUT
            has_started = request.admission_time is not None
            events.append(self._end(request) if has_started else self.waiting.time_out(request))
        return events

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed so far will be reused by others; running requests go on."""
        self._placement.forget_prefixes()

    def schedule(self) -> StepPlan:
        """The next step, for `advance` once it has begun. Claims slots for those it admits.

        Without rows if all depends on launches in flight, which it only does if there are some.
        """
        self._preempt_if_wanted()
        decode: list[RowPlan] = []
        begun: list[RequestState] = []
        for row in self._running.values():
            request = row.request
            num_pending = request.num_pending
            if (num_pending or request.grammar is not None) and not request.can_be_planned:
                continue
            if len(request.token_ids) + num_pending - request.num_computed == 1:  # num_uncomputed, without a call
                decode.append(row)
            else:
                begun.append(request)
        draft = Draft(self._max_num_batched_tokens - len(decode))
        if begun:
            self._go_on(begun, draft)
        if self.waiting:
            self._admit(draft)
        most = 1 if draft.prefill or self.waiting else self._max_steps_per_launch
        num_steps = 1 if most == 1 else _num_steps(decode, most, self._slots.max_seq_len)
        return StepPlan((*decode, *draft.prefill), len(decode), num_steps)

    def advance(self, plan: StepPlan, reservation: Reservation) -> None:
        """The plan's launch has begun: books it as if no row ended in it. `update` must follow, in the same order."""
        valid_lengths = []
        for row in plan.rows:
            request, num_expected = row.request, plan.num_expected(row)
            # The last token sampled has no key and value yet: it is the first input of the next step.
            num_valid = row.num_new_tokens + num_expected - 1 if num_expected else row.num_new_tokens
            request.num_computed += num_valid
            request.num_pending += num_expected
            request.num_launches += 1
            valid_lengths.append(num_valid)
        self._slots.commit(valid_lengths, reservation)

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> list[TokenEvent]:
        """Takes each row's result once its launch is over, retires who ended. One event per row with news."""
        now = self._clock()
        events = []
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            request.num_pending -= plan.num_expected(row)
            request.num_launches -= 1
            if result.error is not None:
                request.contents.surplus_spoilt()
            if request in self._leaving:  # what came of it is surplus
                self._release_if_idle(request)
                continue
            request.is_late = result.is_late
            kept = _step_back(request, self._slots) if result.is_late else _accept(request, result)
            if kept or result.prompt_logprobs or request.finish_reason is not None:
                events.append(_event(request, kept, result, now))
            if request.finish_reason is not None:
                self._retire(request)
            elif request.is_yielding:
                self._release_if_idle(request)
            elif request.contents.has_bad_surplus:
                self._placement.scrub_surplus(request)
        return events

    def abandon(self) -> None:
        """After a failed or interrupted step all requests with a slot leave, without an event; those that wait stay."""
        for request in (*self.running, *self._leaving):
            request.finish_reason = request.finish_reason or FinishReason.ABORT
            request.slot = request.leader = None
            request.num_launches = request.num_pending = 0
        self._running.clear()
        self._leaving.clear()
        self._placement.abandon()

    def check(self) -> None:
        """Asserts that requests and slots agree. For tests, and for when the engine is idle."""
        self._placement.check()
        self.waiting.check()
        running, leaving = list(self.running), self._leaving
        owners = [*running, *leaving]
        assert len({request.slot for request in owners}) == len(owners), "two requests share a slot"
        assert {request.slot for request in owners} == self._placement.slots, "a slot belongs to nobody"
        assert all(request.finish_reason is not None and request.num_launches for request in leaving)
        for request in running:
            assert request.slot is not None, f"{request.request_id} runs without a slot"
            assert request.num_launches or not request.num_pending, f"nobody computes {request.request_id}'s tokens"
            assert request.num_launches or not request.is_yielding, f"{request.request_id} keeps a slot that it yields"
            length = self._slots.cache_length_of(request.slot)
            assert length == request.num_computed, f"{request.request_id} and its slot"

    @property
    def _num_places(self) -> int:
        """Requests that may start to run."""
        return min(self._slots.slots_remaining, self._max_num_running - len(self._running))

    def _go_on(self, begun: list[RequestState], draft: Draft) -> None:
        """The next chunks of prompts that have slots, except those that wait for a leader."""
        for request in begun:
            if not draft.num_left:
                return
            if request.leader is not None:
                self._placement.follow(request)
                _note_reuse(request)
            if request.leader is None:
                draft.add_prompt(request)

    def _admit(self, draft: Draft) -> None:
        """Gives waiting requests slots, in their order, while there is a slot and budget for each."""
        while self.waiting and draft.num_left and self._num_places:
            request = self.waiting.pop()
            self._placement.place(request)
            request.num_tokens_placed = len(request.token_ids)
            _note_reuse(request)
            self._running[request.request_id] = RowPlan(request, 1, is_sampled=True)
            if request.leader is None:
                draft.add_prompt(request)

    def _preempt_if_wanted(self) -> None:
        """Takes the slot of a running request if one of higher priority waits and there is no other."""
        if self._policy.preempt_after is not None and self.waiting and not self._num_places:
            victim = _choose_victim(self.running, self.waiting.peek(), self._policy)
            if victim is not None:
                victim.is_yielding = True
                self._release_if_idle(victim)

    def _end(self, request: RequestState) -> TokenEvent:
        """Between two steps, for a request that no longer waits."""
        request.finish_reason = FinishReason.ABORT
        if request.slot is None:
            self.waiting.charge(request)  # if it had a slot and lost it; the others have generated nothing
        else:
            self._retire(request)
        return _event(request, [], RowResult(), self._clock())

    def _retire(self, request: RequestState) -> None:
        del self._running[request.request_id]
        request.drop_surplus()
        self.waiting.charge(request)
        self._leaving.add(request)
        self._release_if_idle(request)

    def _release_if_idle(self, request: RequestState) -> None:
        """Takes the slot of a request that ended or yields it, once no launch writes to it."""
        if request.num_launches:
            return
        self._leaving.discard(request)
        self._placement.release(request)
        if request.finish_reason is None:
            del self._running[request.request_id]
            request.is_yielding = False
            request.num_computed = request.num_reused = 0
            self.waiting.put_back(request)


def _choose_victim(running: Iterable[RequestState], waiting: RequestState, policy: Policy) -> RequestState | None:
    """The first of the lowest priority, at least `preempt_levels` below `waiting`'s, of those that generated enough
    tokens since they got a slot. None also while a request yields already, until its launches are over.
    """
    victim: RequestState | None = None
    lowest = waiting.options.priority + policy.preempt_levels - 1
    for request in running:
        if request.is_yielding:
            return None
        priority = request.options.priority
        is_able = len(request.token_ids) - request.num_tokens_placed >= (policy.preempt_after or 0)
        if is_able and priority > lowest:
            victim, lowest = request, priority
    return victim


def _note_reuse(request: RequestState) -> None:
    """What a request finds again when it comes back was its own, and does not count."""
    if not request.num_preemptions:
        request.num_cached_tokens = request.num_reused


def _step_back(request: RequestState, slots: SlotLedger) -> list[int]:
    """Its newest token has to be computed once more, to have another one sampled after it."""
    assert request.slot is not None, f"{request.request_id} goes on without a slot"
    slots.rewind(request.slot)
    request.num_computed -= 1
    return []


def _accept(request: RequestState, result: RowResult) -> list[int]:
    """Takes what counts. An error counts only if the request gets to it."""
    sampled = result.token_ids
    usable = sampled[:1] if request.needs_newest_token else sampled
    if sampled:
        request.contents.sampled()
    kept = request.accept(usable)
    if result.error is not None and request.finish_reason is None and not (request.needs_newest_token and usable):
        request.fail(result.error, result.stop_reason)
    return kept


def _event(request: RequestState, kept: list[int], result: RowResult, now: float) -> TokenEvent:
    event = TokenEvent(
        request.request_id,
        kept,
        request.finish_reason,
        request.stop_reason,
        request.error,
        request.has_end_token,
        result.logprobs[: len(kept)],
        result.prompt_logprobs,
    )
    is_first = request.first_token_time is None and bool(kept)
    if is_first:
        request.first_token_time = now
    if is_first or request.finish_reason is not None:
        event.times, event.num_cached_tokens = request.times, request.num_cached_tokens
    return event


def _num_steps(decode: list[RowPlan], most: int, max_seq_len: int) -> int:
    """Bounded also by the room in every slot, and by the longest that any row still wants."""
    room = min((max_seq_len - row.request.num_computed for row in decode), default=1)
    wanted = max((_num_usable_steps(row.request) for row in decode), default=1)
    return min(most, room, wanted)


def _num_usable_steps(request: RequestState) -> int:
    return 1 if request.needs_newest_token else max(1, request.num_remaining)  # none: only a prompt is wanted
