"""The policy: who runs, how many tokens of whom, for how many steps.

- Decode rows always go on: the token budget is at least the number of slots.
- What is left of the budget goes to prompts, in arrival order: first those begun, then those that wait and find a
  free slot. A prompt that does not fit is computed in chunks, so it never stalls the decoding of others.
- When nobody waits and nobody is being prefilled, several decode steps go into one launch. A row whose next token needs
  a mask from the host (a grammar) keeps only the first token of such a launch.
- A step may be planned while the tokens of the one before are still being computed: rows go on with a token that only
  the device knows. Those that must show it to the host first (a grammar) sit that step out. A row that turns out to
  have ended has been planned once too often: its surplus is dropped, and its slot is free when no launch writes to it.

Nothing starves: every running row gets a token per step, requests are admitted in arrival order, and each ends after
at most `max_tokens` of its own.
"""

from collections.abc import Iterable, Sequence

from chairlift.cache.ledger import Reservation, SlotLedger
from chairlift.errors import QueueFull
from chairlift.params import FinishReason
from chairlift.scheduler.plan import RowPlan, RowResult, StepPlan, TokenEvent
from chairlift.scheduler.request import Request


class _StepBudget:
    """Tokens that the step being planned may still compute. Lives as long as one `schedule` call."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens

    def take(self, num_wanted: int) -> int:
        num_taken = min(num_wanted, self.left)
        self.left -= num_taken
        return num_taken


class Scheduler:
    """Turns waiting requests into step plans, and sampled tokens into events. Not thread-safe: one owner."""

    def __init__(
        self, slots: SlotLedger, max_num_batched_tokens: int, max_steps_per_launch: int, max_queue_size: int
    ) -> None:
        if max_num_batched_tokens < slots.num_free:
            raise ValueError(f"a budget of {max_num_batched_tokens} tokens cannot feed {slots.num_free} slots")
        self._slots = slots
        self._num_slots = slots.num_free  # others may have been claimed for other purposes
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_steps_per_launch = max_steps_per_launch
        self._max_queue_size = max_queue_size
        self._waiting: dict[str, Request] = {}  # both in arrival order
        self._running: dict[str, Request] = {}
        self._leaving: set[Request] = set()  # ended, but a launch still writes to their slots

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> Iterable[Request]:
        """In the order in which they get slots."""
        return self._waiting.values()

    @property
    def running(self) -> Iterable[Request]:
        """Those that have a slot."""
        return self._running.values()

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_acceptable(self) -> int:
        """Requests that `add` would take now: places in the queue, and free slots that nobody waits for yet."""
        return self._max_queue_size + self._slots.num_free - len(self._waiting)

    def add(self, *requests: Request) -> None:
        """Queues requests, all or none; they start as slots are free. `QueueFull` if too many would wait."""
        added: dict[str, Request] = {}
        for request in requests:
            if any(request.request_id in known for known in (self._waiting, self._running, added)):
                raise ValueError(f"request {request.request_id!r} is already here")
            added[request.request_id] = request
        if len(added) > self.num_acceptable:
            raise QueueFull(self._max_queue_size)
        self._waiting.update(added)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request wherever it is, between two steps. None if it is not here (any more)."""
        request = self._waiting.pop(request_id, None) or self._running.get(request_id)
        if request is None:
            return None
        request.finish_reason = FinishReason.ABORT
        if request.slot is not None:
            self._retire(request)
        return TokenEvent(request_id, [], FinishReason.ABORT)

    def half_filled_slot(self, request_id: str) -> int | None:
        """The slot of a request whose prompt is computed in part; None if it has none such."""
        request = self._running.get(request_id)
        if request is None or not 0 < request.num_computed < request.num_prompt_tokens:
            return None
        return request.slot

    def schedule(self) -> StepPlan:
        """The next step, for `advance` once it has begun. Claims slots for those it admits.

        Without rows if all depends on launches in flight, which it only does if there are some.
        """
        budget = _StepBudget(self._max_num_batched_tokens)
        decode: list[RowPlan] = []
        begun: list[Request] = []
        for request in self._running.values():
            if request.can_be_planned:
                if request.num_uncomputed == 1:
                    decode.append(RowPlan(request, 1, True))
                else:
                    begun.append(request)
        budget.take(len(decode))
        prefill = [_chunk(request, budget) for request in begun if budget.left]
        prefill += [_chunk(request, budget) for request in self._admit_while(budget)]
        num_steps = 1 if prefill or self._waiting else self._steps_for(decode)
        return StepPlan(rows=(*decode, *prefill), num_decode_rows=len(decode), num_steps=num_steps)

    def advance(self, plan: StepPlan, reservation: Reservation) -> None:
        """The plan's launch has begun: books what it computes as if no row ended in it, so that more can be planned.

        Whoever did end has no use for the books of its slot any more. `update` must follow, in the same order.
        """
        valid_lengths = []
        for row in plan.rows:
            request, num_expected = row.request, plan.num_expected(row)
            # The last token sampled has no key and value yet: it is the first input of the next step.
            valid_lengths.append(row.num_new_tokens + max(0, num_expected - 1))
            request.num_computed += valid_lengths[-1]
            request.num_pending += num_expected
            request.num_launches += 1
        self._slots.commit(valid_lengths, reservation)

    def update(self, plan: StepPlan, results: Sequence[RowResult]) -> list[TokenEvent]:
        """Takes each row's result once its launch is over, retires who ended. One event per row with news."""
        events = []
        for row, result in zip(plan.rows, results, strict=True):
            request = row.request
            request.num_pending -= plan.num_expected(row)
            request.num_launches -= 1
            if request in self._leaving:  # what came of it is surplus
                self._release_if_idle(request)
                continue
            kept = _accept(request, result)
            if kept or result.prompt_logprobs or request.finish_reason is not None:
                events.append(_event(request, kept, result))
            if request.finish_reason is not None:
                self._retire(request)
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
                self._running.pop(request.request_id, None)
                self._release_if_idle(request)

    def check(self) -> None:
        """Asserts that requests and slots agree. For tests, and for when the engine is idle."""
        self._slots.check()
        running, leaving = self._running.values(), self._leaving
        assert all(request.slot is None and request.num_computed == 0 for request in self._waiting.values())
        owners = [*running, *leaving]
        assert len({request.slot for request in owners}) == len(owners), "two requests share a slot"
        assert self._slots.num_free + len(owners) == self._num_slots, "a slot belongs to nobody"
        assert all(request.finish_reason is not None and request.num_launches for request in leaving)
        for request in running:
            assert request.slot is not None, f"{request.request_id} runs without a slot"
            assert request.num_launches or not request.num_pending, f"nobody computes {request.request_id}'s tokens"
            assert self._slots.length_of(request.slot) == request.num_computed, f"{request.request_id} and its slot"

    def _admit_while(self, budget: _StepBudget) -> list[Request]:
        """Moves waiting requests to running, in arrival order, while there is a slot and budget for each."""
        admitted: list[Request] = []
        wanted = 0
        while self._waiting and self._slots.num_free and wanted < budget.left:
            request = self._waiting.pop(next(iter(self._waiting)))
            (request.slot,) = self._slots.claim(1)
            self._running[request.request_id] = request
            admitted.append(request)
            wanted += request.num_uncomputed
        return admitted

    def _steps_for(self, decode: list[RowPlan]) -> int:
        """Bounded by the setting, by the room in every slot, and by the longest that any row still wants."""
        if self._max_steps_per_launch == 1:
            return 1
        room = min((self._slots.max_seq_len - row.request.num_computed for row in decode), default=1)
        wanted = max((_num_usable_steps(row.request) for row in decode), default=1)
        return min(self._max_steps_per_launch, room, wanted)

    def _retire(self, request: Request) -> None:
        del self._running[request.request_id]
        request.drop_surplus()
        self._leaving.add(request)
        self._release_if_idle(request)

    def _release_if_idle(self, request: Request) -> None:
        if request.num_launches:
            return
        assert request.slot is not None, f"{request.request_id} leaves without a slot"
        self._leaving.discard(request)
        self._slots.release(request.slot)
        request.slot = None


def _accept(request: Request, result: RowResult) -> list[int]:
    """Takes what counts. An error counts only if the request gets to it."""
    usable = result.token_ids if request.grammar is None else result.token_ids[:1]
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
        has_end_token=request.has_end_token,
        logprobs=result.logprobs[: len(kept)],
        prompt_logprobs=result.prompt_logprobs,
    )


def _num_usable_steps(request: Request) -> int:
    return request.num_remaining if request.grammar is None else 1


def _chunk(request: Request, budget: _StepBudget) -> RowPlan:
    num_new = budget.take(request.num_uncomputed)
    return RowPlan(request, num_new, is_sampled=num_new == request.num_uncomputed)
