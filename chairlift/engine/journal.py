"""What an engine has done: the last launches, totals and distributions, for snapshots and for statistics.

Kept by the engine's thread, after each launch. What concerns a request is counted when its prompt is computed, and what
all rows have in common is counted once, so that the journal costs a launch no more than a look at each row.
"""

import threading
import time
from collections import deque
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
from chairlift.params import FinishReason
from chairlift.scheduler import RequestState, RowPlan, Scheduler, StepPlan, TokenEvent


class Journal:
    """The counts of one engine. Belongs to the engine's thread, except for `read_stats`."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock`: the scheduler's, and that of the times at which launches begin."""
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()  # for what `read_stats` reads
        self._start = clock()
        self._last_end = self._start  # of a launch
        self._token_seconds = 0.0  # from one token of a row to the next, in the newest launch
        self._num_other_tokens = 0  # of the newest launch: of rows for which that is not so
        self._launches: deque[LaunchRecord] = deque(maxlen=MAX_LAUNCHES_SHOWN)
        self._num_launches = 0
        self._totals = Totals()
        self._num_waiting = self._num_running = self._num_prefilling = self._num_warm = 0
        self._has_moved = False  # a prompt may have been begun or completed, or a request have ended, since then
        self._begun: set[RequestState] = set()  # their prompts are computed in part
        self._last_tokens: dict[RequestState, float] = {}  # when the last token of those that sit launches out came
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

    def note_launch(self, plan: StepPlan, begin: float) -> None:
        """Counts a launch that is over; its events must follow. Its time begins with the end of the one before."""
        now = self._clock()
        prefill = plan.rows[plan.num_decode_rows :]
        num_prefill_tokens = sum(row.num_new_tokens for row in prefill)
        seconds = now - max(begin, self._last_end)
        with self._lock:
            self._launches.append(
                LaunchRecord(num_prefill_tokens, plan.num_decode_rows, plan.num_steps, round(seconds, 6))
            )
            self._num_launches += 1
            self._step_seconds.add(seconds / plan.num_steps, plan.num_steps)
            self._step_rows.add(len(plan.rows), plan.num_steps)
            self._step_tokens.add(num_prefill_tokens + plan.num_decode_rows, plan.num_steps)
            # A row that decodes has its token before from the launch before: all but those that need it on the host,
            # and so sit launches out, have waited for the same time.
            self._token_seconds = (now - self._last_end) / plan.num_steps
            self._num_other_tokens = self._note_masked(plan.rows, now) if self._last_tokens else 0
            self._has_moved |= bool(prefill or self._begun)
            for request in self._completed(prefill):
                self._note_prompt(request, now)
        self._last_end = now

    def note_events(self, events: Sequence[TokenEvent]) -> None:
        """Counts events of the launch noted just before, or of requests that were ended between launches."""
        num_tokens = num_finished = 0
        for event in events:
            num_tokens += len(event.new_token_ids)
            if event.finish_reason is not None:
                num_finished += 1
        with self._lock:
            self._totals.num_generated_tokens += num_tokens
            self._totals.num_finished += num_finished
            self._inter_token_seconds.add(self._token_seconds, max(0, num_tokens - self._num_other_tokens))
            self._num_other_tokens = 0
            self._has_moved |= num_finished > 0
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
            )

    def take_snapshot(self, num_slots: int, slot_len: int) -> Snapshot:
        """Between two launches."""
        now = self._clock()
        slots = [SlotSnapshot()] * num_slots
        for slot, num_tokens in self._scheduler.warm.items():
            slots[slot] = SlotSnapshot(SlotState.WARM, num_computed=num_tokens)
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
        )

    def _look_around(self) -> None:
        """Counts requests by where they are; while rows only decode, without looking at each of them."""
        if self._has_moved or self._num_running != self._scheduler.num_running:
            running = self._scheduler.running
            self._num_prefilling = len([each for each in running if each.num_computed < each.num_prompt_tokens])
            self._has_moved = False
        if not self._scheduler.num_running:
            self._begun.clear()  # or the prompts of those that left would stay until the next launch
            self._last_tokens.clear()
        self._num_running = self._scheduler.num_running
        self._num_waiting = self._scheduler.num_waiting
        self._totals.num_preemptions = self._scheduler.num_preemptions
        self._num_warm = len(self._scheduler.warm)

    def _completed(self, prefill: Sequence[RowPlan]) -> list[RequestState]:
        """Requests whose prompt is computed with this launch."""
        completed = []
        for row in prefill:
            if row.is_sampled and not row.request.is_late:
                completed.append(row.request)
                self._begun.discard(row.request)
            elif row.request.first_token_time is None:
                self._begun.add(row.request)
        for request in list(self._begun):
            if request.first_token_time is not None or request.finish_reason is FinishReason.LENGTH:
                completed.append(request)  # but for its last token, which was planned like a token generated
            if request.first_token_time is not None or request.finish_reason is not None:
                self._begun.discard(request)
        return completed

    def _note_prompt(self, request: RequestState, now: float) -> None:
        """It has caught up with all of its tokens, and the next one was sampled."""
        if request.num_preemptions:  # it had lost its slot, and all of this was computed before
            self._num_other_tokens += 1
            self._inter_token_seconds.add(now - request.queue_time)
            return
        self._totals.num_prompt_tokens += request.num_prompt_tokens
        self._totals.num_cached_tokens += request.num_cached_tokens
        assert request.admission_time is not None, "it got a slot"
        self._queue_seconds.add(request.admission_time - request.arrival_time)
        if request.first_token_time is None:  # only the prompt was wanted, or the request was aborted
            return
        seconds = request.first_token_time - request.arrival_time
        self._first_token_seconds.add(seconds)
        self._totals.num_first_tokens += 1
        self._totals.seconds_to_first_token += seconds
        self._num_other_tokens += 1
        if request.needs_newest_token:
            self._last_tokens[request] = now

    def _note_masked(self, rows: Sequence[RowPlan], now: float) -> int:
        """Tokens of rows that sit launches out: how many, and how long after the one before each came."""
        num_tokens = 0
        for row in rows:
            last = self._last_tokens.get(row.request) if row.request.needs_newest_token else None
            if last is not None and not row.request.is_late:
                num_tokens += 1
                self._inter_token_seconds.add(now - last)
                self._last_tokens[row.request] = now
        self._last_tokens = {
            request: last for request, last in self._last_tokens.items() if request.finish_reason is None
        }
        return num_tokens


def _slot(request: RequestState) -> SlotSnapshot:
    is_prefilling = request.num_computed < request.num_prompt_tokens
    return SlotSnapshot(
        state=SlotState.PREFILLING if is_prefilling else SlotState.DECODING,
        request_id=short_id(request.request_id),
        num_reused=min(request.num_reused, request.num_prompt_tokens),
        num_computed=request.num_computed,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=request.num_tokens,
    )


def _waiting(request: RequestState, now: float) -> WaitingSnapshot:
    return WaitingSnapshot(short_id(request.request_id), request.num_prompt_tokens, now - request.queue_time)
