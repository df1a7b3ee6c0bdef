"""What a snapshot tells beside the present state: the last launches, totals, and since when requests wait."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from chairlift.engine.snapshot import (
    MAX_LAUNCHES_SHOWN,
    MAX_WAITING_SHOWN,
    LaunchRecord,
    SlotSnapshot,
    SlotState,
    Snapshot,
    Totals,
    WaitingSnapshot,
    short_id,
)
from chairlift.scheduler import Request, Scheduler, StepPlan, TokenEvent


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A request of which no token was made yet, and when it came."""

    request: Request
    time: float


class Journal:
    """Kept by the engine's owner: a few additions per launch and request. Times are `time.perf_counter`'s."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._arrivals: dict[str, _Arrival] = {}
        self._launches: deque[LaunchRecord] = deque(maxlen=MAX_LAUNCHES_SHOWN)
        self._num_launches = 0
        self._last_end = self._start
        self._totals = Totals()

    def note_arrivals(self, requests: Iterable[Request]) -> None:
        now = time.perf_counter()
        self._arrivals.update((request.request_id, _Arrival(request, now)) for request in requests)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests that left without an event."""
        for request_id in request_ids:
            self._arrivals.pop(request_id, None)

    def note_launch(self, plan: StepPlan, begin: float) -> None:
        """One that has come to its end. Its time counts from the end of the one before, if it began before that."""
        now = time.perf_counter()
        seconds = round(now - max(begin, self._last_end), 6)
        self._last_end = now
        num_prefill_tokens = sum(row.num_new_tokens for row in plan.rows[plan.num_decode_rows :])
        self._launches.append(LaunchRecord(num_prefill_tokens, plan.num_decode_rows, plan.num_steps, seconds))
        self._num_launches += 1

    def note_events(self, events: Iterable[TokenEvent]) -> None:
        """Of a launch, or of an abort."""
        now, totals = time.perf_counter(), self._totals
        num_generated = num_finished = 0
        firsts: list[_Arrival] = []
        for event in events:
            num_generated += len(event.new_token_ids)
            num_finished += event.finish_reason is not None
            if event.new_token_ids or event.finish_reason is not None:
                arrival = self._arrivals.pop(event.request_id, None)
                if arrival is not None and event.new_token_ids:
                    firsts.append(arrival)
        self._totals = replace(
            totals,
            num_prompt_tokens=totals.num_prompt_tokens + sum(each.request.num_prompt_tokens for each in firsts),
            num_generated_tokens=totals.num_generated_tokens + num_generated,
            num_finished=totals.num_finished + num_finished,
            num_first_tokens=totals.num_first_tokens + len(firsts),
            seconds_to_first_token=totals.seconds_to_first_token + sum(now - each.time for each in firsts),
        )

    def take_snapshot(self, scheduler: Scheduler, num_slots: int, slot_len: int) -> Snapshot:
        """Between two launches."""
        now = time.perf_counter()
        slots = [SlotSnapshot()] * num_slots
        for request in scheduler.running:
            if request.slot is not None:
                slots[request.slot] = _slot(request)
        return Snapshot(
            time=now - self._start,
            slot_len=slot_len,
            slots=tuple(slots),
            num_waiting=scheduler.num_waiting,
            waiting=tuple(self._waiting(request, now) for request in islice(scheduler.waiting, MAX_WAITING_SHOWN)),
            num_launches=self._num_launches,
            launches=tuple(self._launches),
            totals=self._totals,
        )

    def _waiting(self, request: Request, now: float) -> WaitingSnapshot:
        seconds = now - self._arrivals[request.request_id].time
        return WaitingSnapshot(short_id(request.request_id), request.num_prompt_tokens, seconds)


def _slot(request: Request) -> SlotSnapshot:
    is_prefilling = request.num_computed < request.num_prompt_tokens
    return SlotSnapshot(
        state=SlotState.PREFILLING if is_prefilling else SlotState.DECODING,
        request_id=short_id(request.request_id),
        num_computed=request.num_computed,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
    )
