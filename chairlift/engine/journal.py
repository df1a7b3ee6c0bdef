"""Records what an engine has done: its counts since creation, and snapshots of slots, queue and launches.

The engine's thread updates the journal after each launch, in integers and lists; readers get a copy. What concerns one
request comes with its events, and what rows have in common is counted once, so a launch costs no more than a look at
each event. A snapshot holds only numbers: no text, token ids or names that a client chose, so that every client of the
server may see it.
"""

import threading
import time
import zlib
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, islice
from typing import Protocol, Self

from chairlift.cache.budget import CacheUse
from chairlift.engine.saved.costs import SavedCounts
from chairlift.params import FinishReason, RequestTimes
from chairlift.plan import StepPlan
from chairlift.scheduler import RequestState, Scheduler, TokenEvent

NO_MEMORY = CacheUse()
NOTHING_SAVED = SavedCounts()

MAX_LAUNCHES_SHOWN = 128
"""Launches in a snapshot: more than fit between two snapshots of an engine whose steps take a millisecond."""

MAX_WAITING_SHOWN = 20
"""Waiting requests in a snapshot; the others are only counted."""


class SlotState(StrEnum):
    """Names the ways in which a slot is used."""

    FREE = "free"  # no request, and no reusable tokens
    WARM = "warm"  # no request, but the tokens in it can be reused by a prompt that begins with them
    PREFILLING = "prefilling"  # a request whose prompt is not computed yet
    DECODING = "decoding"  # a request that generates


@dataclass(frozen=True, slots=True)
class SlotSnapshot:
    """One slot between two launches; its number is its place in `Snapshot.slots`. Counts are tokens.

        |== reused ==|== computed ==|-- to do --|== generated ==|
        0   num_reused   num_computed   num_prompt_tokens   num_tokens

    A slot never has both "to do" and "generated" tokens. A warm slot has `num_computed` only.
    """

    state: SlotState = SlotState.FREE
    request_id: str = ""  # see `short_id`
    num_reused: int = 0  # of the prompt, found in this slot or copied from another
    num_computed: int = 0  # with keys and values in the slot, the reused ones included
    num_prompt_tokens: int = 0
    num_tokens: int = 0  # prompt and generated
    num_held: int = 0  # tokens that it has memory for
    num_accepted: int = 0  # generated tokens that were guessed rightly, see docs/speculation.md
    num_restored: int = 0  # tokens that it had when it was last filled from disk
    num_states: int = 0  # recurrent states that are kept of its tokens, see docs/decisions/19-recurrent-state.md


@dataclass(frozen=True, slots=True)
class WaitingSnapshot:
    """One request that waits for a slot."""

    request_id: str  # see `short_id`
    num_prompt_tokens: int
    seconds: float = field(compare=False)  # since it was queued


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch: `num_steps` steps of the same rows."""

    num_prefill_tokens: int
    num_decode_rows: int  # each makes one token a step
    num_steps: int
    seconds: float  # for all of its steps, from planning to the last bookkeeping


@dataclass(slots=True)
class Totals:
    """Counts since the engine was created, which only grow."""

    num_prompt_tokens: int = 0  # of all requests whose prompt was computed
    num_cached_tokens: int = 0  # those of them that were reused
    num_generated_tokens: int = 0
    num_finished: int = 0  # requests that ended, for whatever reason
    num_preemptions: int = 0  # how often requests lost their slot to another
    num_first_tokens: int = 0  # requests that got a first token
    seconds_to_first_token: float = 0.0  # their sum, each from its request's arrival
    num_drafted_tokens: int = 0  # tokens that were guessed and verified
    num_accepted_tokens: int = 0  # those of them that are part of an answer

    @property
    def cached_share(self) -> float:
        """The share of all prompt tokens that was reused, 0 to 1; 0 before the first prompt."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An engine between two launches. Two snapshots are equal if nothing happened between them."""

    time: float = field(compare=False)  # seconds since the engine was made
    slot_len: int  # tokens that a slot can hold
    slots: tuple[SlotSnapshot, ...]
    num_waiting: int
    waiting: tuple[WaitingSnapshot, ...]  # the first `MAX_WAITING_SHOWN`, in the order in which they get slots
    num_launches: int  # since the engine was made
    launches: tuple[LaunchRecord, ...]  # the newest `MAX_LAUNCHES_SHOWN` of them, oldest first
    totals: Totals
    cache: CacheUse = NO_MEMORY


class SavedSource(Protocol):
    """Offers counts of saved prefixes, from any thread."""

    @property
    def counts(self) -> SavedCounts: ...


class SnapshotSource(Protocol):
    """Offers snapshots: an `AsyncLLM`, in tests something smaller."""

    async def read_snapshot(self) -> Snapshot:
        """The engine's state after its current launch, or at once if it is idle.

        Raises `EngineClosed` or `EngineDead`. May be cancelled at any time.
        """
        ...


def short_id(request_id: str) -> str:
    """Eight hexadecimal digits that distinguish a generation, and by which its own client can find it.

    It is the CRC-32 of the generation's id, which is a sequence's id without its last two parts (its serial number and
    its place among `n`). For `POST /v1/chat/completions` that is the completion's id followed by `-0`.
    """
    generation_id = request_id.rsplit("-", 2)[0]
    return f"{zlib.crc32(generation_id.encode()):08x}"


STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds for times of about a step."""

WAIT_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Bounds for times that a client waits."""

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKEN_COUNTS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(slots=True)
class Histogram:
    """Counts values by range. Range i ends with `bounds[i]`, which is in it; the last has no end."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)  # one more than bounds
    sum: float = 0.0  # of all values

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def cumulative(self) -> list[int]:
        """Values up to each bound, and last all of them: what Prometheus calls buckets."""
        return list(accumulate(self.counts))

    def add(self, value: float, times: int = 1) -> None:
        """Counts the value `times` times. Costs a fraction of a microsecond."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def __iadd__(self, other: "Histogram") -> Self:
        """Adds the values of another one with the same bounds."""
        self.counts = [own + others for own, others in zip(self.counts, other.counts, strict=True)]
        self.sum += other.sum
        return self


@dataclass(slots=True)
class EngineStats:
    """An engine's counts after its newest launch or, if that was later, after a request was added or ended.

    The steps of a launch share its time equally, and so do the tokens of a row. Waiting times start at a request's
    arrival; queue times are those of requests whose prompt was computed.
    """

    time: float = 0.0  # seconds since the engine was created
    totals: Totals = field(default_factory=Totals)
    num_waiting: int = 0
    num_running: int = 0  # requests that have a slot
    num_prefilling: int = 0  # those of them whose prompt is not computed yet
    num_warm: int = 0  # slots without a request, with tokens that can be reused
    step_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROW_COUNTS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNTS))  # computed in a step
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))  # to the first slot
    first_token_seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))
    cache: CacheUse = NO_MEMORY
    accepted_at: tuple[int, ...] = ()  # accepted tokens by their place in a guess
    num_snapshot_bytes: int = 0  # of recurrent states that are kept for later prompts
    saved: SavedCounts = NOTHING_SAVED
    # By prompt that a slot held some of: tokens of these that were computed again, to get from a state to their end.
    state_distances: Histogram = field(default_factory=lambda: Histogram(TOKEN_COUNTS))

    @property
    def num_decoding(self) -> int:
        return self.num_running - self.num_prefilling


class Journal:
    """The counts of one engine. Belongs to the engine's thread, except for `read_stats`."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.perf_counter,
        saved: SavedSource | None = None,
    ) -> None:
        """`clock`: the scheduler's, which also measures when launches begin. `saved`: None if nothing is."""
        self._saved = saved
        self._scheduler = scheduler
        self._clock = clock
        self._lock = threading.Lock()  # for what `read_stats` reads
        self._start = clock()
        self._last_end = self._start  # of a launch
        self._launches: deque[LaunchRecord] = deque(maxlen=MAX_LAUNCHES_SHOWN)
        self._num_launches = 0
        self._stats = EngineStats(cache=scheduler.placement.cache_use)
        self._has_moved = False  # a prompt may have begun or been completed, or a request ended, since the last count

    def look_around(self) -> None:
        """Counts requests by state. To be called when some were added, or dropped without an event."""
        with self._lock:
            self._look_around()

    def note_launch(self, plan: StepPlan, begin: float) -> float:
        """Counts a launch that is over; its events must follow. Returns its seconds.

        Its time begins no earlier than the end of the launch before.
        """
        now = self._clock()
        others = plan.rows[plan.num_decode_rows :]
        num_new_tokens = sum(len(row.input_ids) for row in others)
        guesses = [len(row.guess) for row in others if row.guess]
        num_decode_rows = plan.num_decode_rows + len(guesses)
        num_prefill_tokens = num_new_tokens - sum(guesses) - len(guesses)
        seconds = now - max(begin, self._last_end)
        with self._lock:
            self._launches.append(LaunchRecord(num_prefill_tokens, num_decode_rows, plan.num_steps, round(seconds, 6)))
            self._num_launches += 1
            self._stats.step_seconds.add(seconds / plan.num_steps, plan.num_steps)
            self._stats.step_rows.add(len(plan.rows), plan.num_steps)
            self._stats.step_tokens.add(plan.num_decode_rows + num_new_tokens, plan.num_steps)
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
            self._stats.totals.num_generated_tokens += sum(by_seconds.values())
            for seconds, num_tokens in by_seconds.items():
                if seconds is not None:
                    self._stats.inter_token_seconds.add(seconds, num_tokens)
            self._look_around()

    def read_stats(self) -> EngineStats:
        """The counts so far. From any thread, at any time."""
        with self._lock:
            self._stats.time = self._clock() - self._start
            if self._saved is not None:
                self._stats.saved = self._saved.counts
            return deepcopy(self._stats)

    def read_snapshot(self, num_slots: int, slot_len: int) -> Snapshot:
        """Must be called between two launches."""
        now = self._clock()
        slots = [SlotSnapshot()] * num_slots
        for slot, num_tokens in self._scheduler.warm.items():
            slots[slot] = SlotSnapshot(SlotState.WARM, num_computed=num_tokens, num_held=num_tokens)
        for request in self._scheduler.running:
            if request.slot is not None:
                slots[request.slot] = _slot(request)
        restoring = self._scheduler.placement.restoring
        for slot, num_tokens in restoring.origins.items():
            slots[slot] = replace(slots[slot], num_restored=min(num_tokens, slots[slot].num_computed))
        for slot, num_states in self._scheduler.placement.count_kept_states().items():
            slots[slot] = replace(slots[slot], num_states=num_states)
        return Snapshot(
            time=now - self._start,
            slot_len=slot_len,
            slots=tuple(slots),
            num_waiting=self._scheduler.num_waiting,
            waiting=tuple(_waiting(request, now) for request in islice(self._scheduler.waiting, MAX_WAITING_SHOWN)),
            num_launches=self._num_launches,
            launches=tuple(self._launches),
            totals=replace(self._stats.totals),
            cache=self._scheduler.placement.cache_use,
        )

    def _look_around(self) -> None:
        """Counts requests by state; while rows only decode, without a look at each of them."""
        stats, scheduler = self._stats, self._scheduler
        if self._has_moved or stats.num_running != scheduler.num_running:
            running = scheduler.running
            stats.num_prefilling = len([each for each in running if each.num_computed < each.num_prompt_tokens])
            self._has_moved = False
        stats.num_running = scheduler.num_running
        stats.num_waiting = scheduler.num_waiting
        stats.num_warm = len(scheduler.warm)
        stats.totals.num_preemptions = scheduler.waiting.num_preemptions
        if scheduler.speculation is not None:
            stats.totals.num_drafted_tokens = scheduler.speculation.num_drafted
            stats.totals.num_accepted_tokens = scheduler.speculation.num_accepted
            stats.accepted_at = tuple(scheduler.speculation.accepted_at)
        if (states := scheduler.placement.states) is not None:
            stats.num_snapshot_bytes = states.snapshot_bytes
            for distance in states.take_distances():
                stats.state_distances.add(distance)
        stats.cache = scheduler.placement.cache_use

    def _note_request(self, event: TokenEvent, times: RequestTimes) -> None:
        """Counts a request's end, and its prompt: at its first token, or at its end if only the prompt was wanted."""
        stats, totals = self._stats, self._stats.totals
        self._has_moved = True
        totals.num_finished += event.finish_reason is not None
        has_first_token = bool(event.new_token_ids) and event.token_seconds is None
        is_only_prompt = times.first_token is None and event.finish_reason is FinishReason.LENGTH
        if not (has_first_token or is_only_prompt):
            return
        totals.num_prompt_tokens += event.num_prompt_tokens
        totals.num_cached_tokens += event.num_cached_tokens
        assert times.admission is not None, "it got a slot"
        stats.queue_seconds.add(times.admission - times.arrival)
        if times.first_token is not None:
            seconds = times.first_token - times.arrival
            stats.first_token_seconds.add(seconds)
            totals.num_first_tokens += 1
            totals.seconds_to_first_token += seconds


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
        num_accepted=request.num_accepted,
    )


def _waiting(request: RequestState, now: float) -> WaitingSnapshot:
    return WaitingSnapshot(short_id(request.request_id), request.num_prompt_tokens, now - request.queue_time)
