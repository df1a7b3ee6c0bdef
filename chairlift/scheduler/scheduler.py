"""The policy: who runs, how many tokens of whom, for how many steps.

- Decode rows always go on: the token budget is at least the number of slots.
- What is left of the budget goes to prompts: first those begun, then those that wait (`queue`: whose turn it is) and
  find a slot (`placement`: which one, and what of the prompt need not be computed). A prompt that does not fit is
  computed in chunks, so it never stalls the decoding of others.
- When nobody waits and nobody is being prefilled, several decode steps go into one launch. A row whose next token needs
  a mask from the host (a grammar) keeps only the first token of such a launch.
- A step may be planned while the tokens of the one before are still being computed: rows go on with a token that only
  the device knows. Those that must show it to the host first (a grammar) sit that step out. A row that turns out to
  have ended has been planned once too often: its surplus is dropped, and its slot is free when no launch writes to it.
- Who has waited or run longer than it may is told so (`expire`).
- If the policy has it so, a request of higher priority takes the slot of a running one when there is no other. That one
  goes back to the queue; its slot stays warm, so that it loses little.

Nothing starves: every row that decodes goes on, each ends after at most `max_tokens` of its own, prompts are computed
in order, and waiting makes up for a lower priority.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from chairlift.cache.ledger import Reservation, SlotLedger
from chairlift.errors import QueueTimeout
from chairlift.params import FinishReason
from chairlift.scheduler.placement import Placement, Unproven
from chairlift.scheduler.plan import RowPlan, RowResult, SlotCopy, StepPlan, TokenEvent
from chairlift.scheduler.policy import DEFAULT_POLICY, Policy
from chairlift.scheduler.preemption import choose_victim
from chairlift.scheduler.request import Request
from chairlift.scheduler.waiting import WaitingRoom

TIMED_OUT = "timeout"
"""The stop reason of a request that ran longer than it may."""


class _Draft:
    """The step being planned: what it may still compute, and what it consists of. Lives as long as one `schedule`."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens
        self.prefill: list[RowPlan] = []
        self.copies: list[SlotCopy] = []

    def add_prompt(self, request: Request, copy: SlotCopy | None) -> None:
        """As much of what the request has to compute as there is room for, which must be some."""
        num_wanted = request.num_uncomputed
        num_new = min(num_wanted, self.num_left)
        self.num_left -= num_new
        self.prefill.append(RowPlan(request, num_new, is_sampled=num_new == num_wanted))
        if copy is not None:
            self.copies.append(copy)


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
        self._num_slots = slots.num_free  # others may have been claimed for other purposes
        self._max_num_running = self._num_slots if max_num_running is None else max_num_running
        if max_num_batched_tokens < self._max_num_running:
            raise ValueError(f"a budget of {max_num_batched_tokens} tokens cannot feed {self._max_num_running} slots")
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_steps_per_launch = max_steps_per_launch
        self._preempt_after = policy.preempt_after
        self._clock = clock
        self._placement = Placement(slots, policy.enable_prefix_caching)
        self._waiting = WaitingRoom(policy, max_queue_size, clock)
        self._running: dict[str, RowPlan] = {}  # in the order in which they got slots: the row of each when it decodes
        self._leaving: set[Request] = set()  # ended, but a launch still writes to their slots
        self._unproven: list[Unproven] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_preemptions(self) -> int:
        """Times that a request lost its slot to another."""
        return self._waiting.num_preemptions

    @property
    def waiting(self) -> Iterable[Request]:
        """Roughly in the order in which they get slots."""
        return self._waiting

    @property
    def running(self) -> Iterator[Request]:
        """Those that have a slot."""
        return (row.request for row in self._running.values())

    @property
    def warm(self) -> dict[int, int]:
        """Of each warm slot the tokens that can be reused."""
        return self._slots.warm

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_acceptable(self) -> int:
        """Requests that `add` would take now: places in the queue, and slots that nobody waits for yet."""
        return self._waiting.num_acceptable(self._num_places)

    def add(self, *requests: Request) -> None:
        """Queues requests, all or none; they start as there are slots. `QueueFull` if too many would wait."""
        known: set[str] = set()
        for request in requests:
            name = request.request_id
            if name in self._waiting or name in self._running or name in known:
                raise ValueError(f"request {name!r} is already here")
            known.add(name)
        self._waiting.add(requests, self._num_places, len(self._running))

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it is, between two steps. None if it is not here (any more)."""
        row = self._running.get(request_id)
        request = self._waiting.remove(request_id) if row is None else row.request
        if request is None:
            return None
        return self._end(request)

    def expire(self) -> list[TokenEvent]:
        """Ends all requests whose time is up. To be called before `schedule`."""
        events = []
        while (request := self._waiting.pop_overdue()) is not None:
            request.stop_reason = TIMED_OUT
            events.append(self._end(request))
            if request.admission_time is None and request.end_time is not None:
                waited = request.end_time - request.queue_time
                error = QueueTimeout(f"no slot was free within {waited:.1f} s; try again later", self.estimate_wait())
                events[-1].rejection, events[-1].error = error, str(error)
        return events

    def take_unproven(self) -> list[Unproven]:
        """Contents of slots that were given back since the last call and may be no numbers.

        They must be overwritten before the next step: attention would carry a NaN to a slot's next owner.
        """
        unproven, self._unproven = self._unproven, []
        return unproven

    def estimate_wait(self) -> float:
        """Seconds until those that wait now will have got slots, by the rate at which requests lately did."""
        return self._waiting.estimate_wait()

    def schedule(self) -> StepPlan:
        """The next step, for `advance` once it has begun. Claims slots for those it admits.

        Without rows if all depends on launches in flight, which it only does if there are some.
        """
        self._preempt_if_wanted()
        decode: list[RowPlan] = []
        begun: list[Request] = []
        for row in self._running.values():
            request = row.request
            num_pending = request.num_pending
            if num_pending and not request.can_be_planned:
                continue
            if len(request.token_ids) + num_pending - request.num_computed == 1:  # num_uncomputed, without a call
                decode.append(row)
            else:
                begun.append(request)
        draft = _Draft(self._max_num_batched_tokens - len(decode))
        if begun:
            self._go_on(begun, draft)
        if self._waiting:
            self._admit(draft)
        num_steps = 1 if draft.prefill or self._waiting else self._steps_for(decode)
        return StepPlan((*decode, *draft.prefill), len(decode), num_steps, tuple(draft.copies))

    def advance(self, plan: StepPlan, reservation: Reservation) -> None:
        """The plan's launch has begun: books what it computes as if no row ended in it, so that more can be planned.

        Whoever did end has no use for the books of its slot any more. `update` must follow, in the same order.
        """
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
        for copy in plan.copies:
            self._placement.note_copied(copy)

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> list[TokenEvent]:
        """Takes each row's result once its launch is over, retires who ended. One event per row with news."""
        now = self._clock()
        events = []
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            request.num_pending -= plan.num_expected(row)
            request.num_launches -= 1
            if result.error is not None:
                request.has_bad_surplus = True
            if request in self._leaving:  # what came of it is surplus
                self._release_if_idle(request)
                continue
            kept = _accept(request, result)
            if kept and request.first_token_time is None:
                request.first_token_time = now
            if kept or result.prompt_logprobs or request.finish_reason is not None:
                events.append(_event(request, kept, result))
            if request.finish_reason is not None:
                self._retire(request, now)
            elif request.is_yielding:
                self._release_if_idle(request)
            elif request.has_bad_surplus:
                self._distrust_surplus(request)
        return events

    def abandon(self, plan: StepPlan) -> None:
        """A launch that failed or was interrupted: its requests leave without an event, and their slots are free.

        Other launches with these requests must be abandoned, too.
        """
        for row in plan.rows:
            request = row.request
            if request.slot is not None:
                self._slots.abandon([request.slot])
                request.num_launches = request.num_pending = 0
                request.finish_reason = request.finish_reason or FinishReason.ABORT
                request.end_time = self._clock()
                if request not in self._leaving:  # whose name somebody else may have by now
                    del self._running[request.request_id]
                self._release(request, is_spoilt=True)

    def check(self) -> None:
        """Asserts that requests and slots agree. For tests, and for when the engine is idle."""
        self._placement.check()
        self._waiting.check()
        running, leaving = list(self.running), self._leaving
        owners = [*running, *leaving]
        assert len({request.slot for request in owners}) == len(owners), "two requests share a slot"
        assert self._slots.num_claimable + len(owners) == self._num_slots, "a slot belongs to nobody"
        assert all(request.finish_reason is not None and request.num_launches for request in leaving)
        for request in running:
            assert request.slot is not None, f"{request.request_id} runs without a slot"
            assert request.num_launches or not request.num_pending, f"nobody computes {request.request_id}'s tokens"
            assert request.num_launches or not request.is_yielding, f"{request.request_id} keeps a slot that it yields"
            assert self._slots.length_of(request.slot) == request.num_computed, f"{request.request_id} and its slot"

    @property
    def _num_places(self) -> int:
        """Requests that may start to run."""
        return min(self._slots.num_claimable, self._max_num_running - len(self._running))

    def _go_on(self, begun: list[Request], draft: _Draft) -> None:
        """The next chunks of prompts that have slots, but of those that wait for another's to copy it."""
        for request in begun:
            if not draft.num_left:
                return
            copy = None
            if request.leader is not None:
                copy = self._placement.follow(request)
                self._note_reuse(request)
            if request.leader is None:
                draft.add_prompt(request, copy)

    def _admit(self, draft: _Draft) -> None:
        """Gives waiting requests slots, in their order, while there is a slot and budget for each."""
        while self._waiting and draft.num_left and self._num_places:
            request = self._waiting.pop()
            copy = self._place(request)
            if request.leader is None:
                draft.add_prompt(request, copy)

    def _place(self, request: Request) -> SlotCopy | None:
        copy = self._placement.place(request)
        request.num_tokens_placed = len(request.token_ids)
        self._note_reuse(request)
        self._running[request.request_id] = RowPlan(request, 1, is_sampled=True)
        return copy

    def _note_reuse(self, request: Request) -> None:
        """What a request finds again when it comes back was its own."""
        if not request.num_preemptions:
            request.num_cached_tokens = request.num_reused

    def _preempt_if_wanted(self) -> None:
        """Takes the slot of a running request if one of higher priority waits and there is no other."""
        if self._preempt_after is not None and self._waiting and not self._num_places:
            victim = choose_victim(self.running, self._waiting.peek(), self._preempt_after)
            if victim is not None:
                victim.is_yielding = True
                self._release_if_idle(victim)

    def _steps_for(self, decode: list[RowPlan]) -> int:
        """Bounded by the setting, by the room in every slot, and by the longest that any row still wants."""
        if self._max_steps_per_launch == 1:
            return 1
        room = min((self._slots.max_seq_len - row.request.num_computed for row in decode), default=1)
        wanted = max((_num_usable_steps(row.request) for row in decode), default=1)
        return min(self._max_steps_per_launch, room, wanted)

    def _end(self, request: Request) -> TokenEvent:
        """Between two steps, for a request that does not wait any more."""
        request.finish_reason = FinishReason.ABORT
        now = self._clock()
        if request.slot is None:
            request.end_time = now
            self._waiting.charge(request, request.num_output_tokens)  # of who had lost a slot; the others have none
        else:
            self._retire(request, now)
        return TokenEvent(request.request_id, [], FinishReason.ABORT, request.stop_reason)

    def _retire(self, request: Request, now: float) -> None:
        del self._running[request.request_id]
        request.end_time = now
        request.drop_surplus()
        self._waiting.charge(request, request.num_output_tokens)
        self._leaving.add(request)
        self._release_if_idle(request)

    def _distrust_surplus(self, request: Request) -> None:
        """Of a row that goes on behind what it keeps: with a grammar, of a launch of several steps."""
        assert request.slot is not None, f"{request.request_id} goes on without a slot"
        self._unproven.append(Unproven(request.slot, request.num_computed))
        request.has_bad_surplus = False

    def _release_if_idle(self, request: Request) -> None:
        """Takes the slot of a request that ended or yields it, once no launch writes to it."""
        if not request.num_launches:
            self._release(request, is_spoilt=request.error is not None)
            if request.finish_reason is None:
                self._put_back(request)

    def _release(self, request: Request, *, is_spoilt: bool) -> None:
        self._leaving.discard(request)
        unproven = self._placement.release(request, is_spoilt=is_spoilt)
        if unproven is not None:
            self._unproven.append(unproven)

    def _put_back(self, request: Request) -> None:
        del self._running[request.request_id]
        request.is_yielding = False
        request.num_computed = request.num_reused = 0
        self._waiting.put_back(request)


def _accept(request: Request, result: RowResult) -> list[int]:
    """Takes what counts. An error counts only if the request gets to it."""
    sampled = result.token_ids
    usable = sampled if request.grammar is None else sampled[:1]
    if sampled:
        request.is_proven = True
    kept = request.accept(usable)
    if result.error is not None and request.finish_reason is None and (request.grammar is None or not usable):
        request.fail(result.error)
    return kept


def _event(request: Request, kept: list[int], result: RowResult) -> TokenEvent:
    return TokenEvent(
        request.request_id,
        kept,
        request.finish_reason,
        request.stop_reason,
        request.error,
        request.has_end_token,
        result.logprobs[: len(kept)],
        result.prompt_logprobs,
    )


def _num_usable_steps(request: Request) -> int:
    return max(1, request.num_remaining) if request.grammar is None else 1  # none remain where only a prompt is wanted
