"""What an engine has done: the last launches, totals and distributions, for snapshots and for statistics.

Kept by the engine's thread, after each launch. What concerns a request comes with its events, and what rows have in
common is counted once, so that the journal costs a launch no more than a look at each event.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from chairlift.engine.stats import (
    MAX_LAUNCHES_SHOWN,
    MAX_WAITING_SHOWN,
    ROW_COUNTS,
    STEP_SECONDS,
    TOKEN_COUNTS,
    WAIT_SECONDS,
    EngineStats,
    Histogram,
    LaunchRecord,
    SlotSnapshot,
    SlotState,
    Snapshot,
    Totals,
    WaitingSnapshot,
    short_id,
)
from chairlift.params import FinishReason, RequestTimes
from chairlift.scheduler import RequestState, Scheduler, StepPlan, TokenEvent


class Journal:
    """The counts of one engine. Belongs to the engine's thread, except for `read_stats`."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: the scheduler's, and that of the times at which launches begin."""
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()  # for what `read_stats` reads
        self._start = clock()
        self._last_end = self._start  # of a launch
        self._launches: deque[LaunchRecord] = deque(maxlen=MAX_LAUNCHES_SHOWN)
        self._num_launches = 0
        self._totals = Totals()
        self._num_waiting = self._num_running = self._num_prefilling = self._num_warm = 0
        self._cache = scheduler.placement.cache_use
        self._accepted_at: tuple[int, ...] = ()
        self._has_moved = False  # a prompt may have been begun or completed, or a request have ended, since then
        self._step_seconds = Histogram(STEP_SECONDS)
        self._step_rows = Histogram(ROW_COUNTS)
        self._step_tokens = Histogram(TOKEN_COUNTS)
        self._queue_seconds = Histogram(WAIT_SECONDS)
        self._first_token_seconds = Histogram(WAIT_SECONDS)
        self._inter_token_seconds = Histogram(STEP_SECONDS)

    def look_around(self) -> None:
        """Counts requests by where they are: to be called when some have come, or left without an event."""
        with self._lock:
            self._look_around()

    def note_launch(self, plan: StepPlan, begin: float) -> float:
        """Counts a launch that is over; its events must follow. Its time begins with the end of the one before.

        Returns that time.
        """
        now = self._clock()
        others = plan.rows[plan.num_decode_rows :]
        num_new_tokens = sum(row.num_new_tokens for row in others)
        guesses = [len(row.guess.tokens) for row in others if row.guess.tokens]
        num_decode_rows = plan.num_decode_rows + len(guesses)
        num_prefill_tokens = num_new_tokens - sum(guesses) - len(guesses)
        seconds = now - max(begin, self._last_end)
        with self._lock:
            self._launches.append(LaunchRecord(num_prefill_tokens, num_decode_rows, plan.num_steps, round(seconds, 6)))
            self._num_launches += 1
            self._step_seconds.add(seconds / plan.num_steps, plan.num_steps)
            self._step_rows.add(len(plan.rows), plan.num_steps)
            self._step_tokens.add(plan.num_decode_rows + num_new_tokens, plan.num_steps)
            self._has_moved |= bool(num_prefill_tokens)
        self._last_end = now
        return seconds

    def note_events(self, events: Sequence[TokenEvent]) -> None:
        """Counts events of the launch noted just before, or of requests that were ended between launches."""
        by_seconds: defaultdict[float | None, int] = defaultdict(int)  # most rows of a launch took the same time
        with self._lock:
            for event in events:
                by_seconds[event.token_seconds] += len(event.new_token_ids)
                if event.times is not None:
                    self._note_request(event, event.times)
            self._totals.num_generated_tokens += sum(by_seconds.values())
            for seconds, num_tokens in by_seconds.items():
                if seconds is not None:
                    self._inter_token_seconds.add(seconds, num_tokens)
            self._look_around()

    def read_stats(self) -> EngineStats:
        """The counts so far. From any thread, at any time."""
        with self._lock:
            return EngineStats(
                time=self._clock() - self._start,
                totals=replace(self._totals),
                num_waiting=self._num_waiting,
                num_prefilling=self._num_prefilling,
                num_decoding=self._num_running - self._num_prefilling,
                num_warm=self._num_warm,
                step_seconds=self._step_seconds.read(),
                step_rows=self._step_rows.read(),
                step_tokens=self._step_tokens.read(),
                queue_seconds=self._queue_seconds.read(),
                first_token_seconds=self._first_token_seconds.read(),
                inter_token_seconds=self._inter_token_seconds.read(),
                cache=self._cache,
                accepted_at=self._accepted_at,
            )

    def take_snapshot(self, num_slots: int, slot_len: int) -> Snapshot:
        """Between two launches."""
        now = self._clock()
        slots = [SlotSnapshot()] * num_slots
        for slot, num_tokens in self._scheduler.warm.items():
            slots[slot] = SlotSnapshot(SlotState.WARM, num_computed=num_tokens, num_held=num_tokens)
        for request in self._scheduler.running:
            if request.slot is not None:
                slots[request.slot] = _slot(request)
        return Snapshot(
            time=now - self._start,
            slot_len=slot_len,
            slots=tuple(slots),
            num_waiting=self._scheduler.num_waiting,
            waiting=tuple(_waiting(request, now) for request in islice(self._scheduler.waiting, MAX_WAITING_SHOWN)),
            num_launches=self._num_launches,
            launches=tuple(self._launches),
            totals=replace(self._totals),
            cache=self._scheduler.placement.cache_use,
        )

    def _look_around(self) -> None:
        """Counts requests by where they are; while rows only decode, without looking at each of them."""
        if self._has_moved or self._num_running != self._scheduler.num_running:
            running = self._scheduler.running
            self._num_prefilling = len([each for each in running if each.num_computed < each.num_prompt_tokens])
            self._has_moved = False
        self._num_running = self._scheduler.num_running
        self._num_waiting = self._scheduler.num_waiting
        self._totals.num_preemptions = self._scheduler.waiting.num_preemptions
        self._num_warm = len(self._scheduler.warm)
        speculation = self._scheduler.speculation
        if speculation is not None:
            self._totals.num_drafted_tokens = speculation.num_drafted
            self._totals.num_accepted_tokens = speculation.num_accepted
            self._accepted_at = tuple(speculation.accepted_at)
        self._cache = self._scheduler.placement.cache_use

    def _note_request(self, event: TokenEvent, times: RequestTimes) -> None:
        """Counts a request's prompt, with the first token or, if only the prompt was wanted, the end; and its end."""
        self._has_moved = True
        self._totals.num_finished += event.finish_reason is not None
        has_first_token = bool(event.new_token_ids) and event.token_seconds is None
        is_only_prompt = times.first_token is None and event.finish_reason is FinishReason.LENGTH
        if not (has_first_token or is_only_prompt):
            return
        self._totals.num_prompt_tokens += event.num_prompt_tokens
        self._totals.num_cached_tokens += event.num_cached_tokens
        assert times.admission is not None, "it got a slot"
        self._queue_seconds.add(times.admission - times.arrival)
        if times.first_token is not None:
            seconds = times.first_token - times.arrival
            self._first_token_seconds.add(seconds)
            self._totals.num_first_tokens += 1
            self._totals.seconds_to_first_token += seconds


def _slot(request: RequestState) -> SlotSnapshot:
    is_prefilling = request.num_computed < request.num_prompt_tokens
    return SlotSnapshot(
        state=SlotState.PREFILLING if is_prefilling else SlotState.DECODING,
        request_id=short_id(request.request_id),
        num_reused=min(request.num_reused, request.num_prompt_tokens),
        num_computed=request.num_computed,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
        num_held=request.num_held,
    )


def _waiting(request: RequestState, now: float) -> WaitingSnapshot:
    return WaitingSnapshot(short_id(request.request_id), request.num_prompt_tokens, now - request.queue_time)
