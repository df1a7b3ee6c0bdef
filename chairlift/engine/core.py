"""The engine without its thread: `step` is schedule, launch, update.

If the device works asynchronously, a launch begins before the tokens of the one before it are taken, so that the device
always has work and the host's time costs nothing. The device works in order: a launch, copy or scrub happens after all
work that was launched before.

Knows token ids only. Its methods must not be called from two threads at once, except for `read_stats`.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence

from chairlift.config import EngineConfig
from chairlift.engine.execution.machine import steps_that_fit
from chairlift.engine.execution.runner import Launch
from chairlift.engine.executor import Executor, open_model
from chairlift.engine.journal import EngineStats, Journal, Snapshot
from chairlift.engine.parallel import Leader
from chairlift.engine.parts import DEFAULT_PARTS, Parts
from chairlift.engine.ranks import Ranks
from chairlift.engine.saved import open_store
from chairlift.plan import StepPlan
from chairlift.scheduler import Policy, Request, Scheduler, Speculation, TokenEvent, begin_step

logger = logging.getLogger(__name__)

_GRAMMAR_POLL_S = 0.001
_READ_POLL_S = 0.005  # what is read ends the wait, new requests do not
_SAVE_PATIENCE_S = 0.1


class EngineCore:
    """Scheduler, cache and model of one checkpoint. ConfigurationError if it cannot be set up."""

    def __init__(self, config: EngineConfig, parts: Parts = DEFAULT_PARTS) -> None:
        self.clock, self.idle_after = parts.clock, parts.idle_after
        checkpoint = open_model(config)
        self.ranks = Leader(config, checkpoint, parts.start_rank) if config.tensor_parallel_size > 1 else Ranks(config)
        executor = Executor(checkpoint, self.ranks, parts)
        self.config, self.cache, self.vocab_size = executor.config, executor.cache, executor.vocab_size
        self.executor, self._pacing = executor, executor.pacing
        self._computer = self.ranks.lead(executor.runner)
        self._saved = open_store(checkpoint, self.config, self.cache, self._computer, self.clock)
        ahead = self._pacing.num_launches_ahead
        assert not (config.speculation and ahead), "guesses need the tokens of the launch before"
        self._launches: deque[Launch] = deque()  # in flight, in the order in which they were begun
        self._speculation = Speculation(config.num_speculative_tokens) if config.speculation else None
        self.scheduler = Scheduler(
            self.cache,
            self.config.max_num_batched_tokens,
            self.config.max_steps_per_launch,
            self.config.max_queue_size,
            Policy(
                self.config.enable_prefix_caching,
                self.config.preempt_after,
                self.config.preempt_levels,
                self.config.queue_timeout,
            ),
            self.clock,
            max_num_running=self.config.max_batch_size,
            speculation=self._speculation,
            saved=self._saved,
            new_queue=parts.new_queue,
        )
        self.scheduler.placement.has_other_ranks = config.tensor_parallel_size > 1
        self._is_steps_auto = config.max_steps_per_launch == "auto"
        self._journal = Journal(self.scheduler, saved=self._saved)
        ready = self.config
        logger.info(
            "engine ready: %s on %s, attention %s, %d slots of %d tokens, %d tokens a step, up to %d steps a launch",
            *(ready.dtype, ready.device, ready.attention_backend, ready.num_slots, ready.slot_len),
            *(ready.max_num_batched_tokens, ready.max_steps_per_launch),
        )
        self.ranks.meet()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._launches)

    def has_room_for(self, requests: Sequence[Request]) -> bool:
        """Returns true if `add` would queue these now without displacing another request."""
        return self.scheduler.has_room_for(requests)

    def add(self, *requests: Request) -> list[TokenEvent]:
        """Queues requests, all or none, and returns the ends of those that they displace.

        `QueueFull` if the queue is full and too few can be displaced. ValueError if one of them was added before.
        """
        return self._noted(self.scheduler.add(*requests))

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and releases its slot. None if it has ended already."""
        event = self.scheduler.abort(request_id)
        self._noted([event] if event is not None else [])
        return event

    def pause(self, request_ids: Sequence[str]) -> None:
        """Gives these requests no tokens for now; they keep their slots. Skips those that have ended."""
        self._set_paused(request_ids, True)

    def resume(self, request_ids: Sequence[str]) -> None:
        """Lets paused requests go on. Skips those that have ended."""
        self._set_paused(request_ids, False)

    def _set_paused(self, request_ids: Sequence[str], is_paused: bool) -> None:
        for request in filter(None, map(self.scheduler.find, request_ids)):
            request.is_paused = is_paused

    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache: later requests reuse nothing computed so far. Running ones continue."""
        self.scheduler.reset_prefix_cache()
        if self._speculation is not None:
            self._speculation.answers.forget()
        if self._saved is not None:
            self._saved.reset()
        self._journal.look_around()

    def use_idle_time(self) -> bool:
        """Frees unused memory and some warm slots, and records a graph. Must be called after some time without work.

        Returns True if there is more to do.
        """
        if self.has_work:
            return False
        if self.cache.is_elastic:
            self.scheduler.placement.trim()
            self._settle()
            self._journal.look_around()
        return self._computer.record_missing()

    def step(self) -> list[TokenEvent]:
        """Begins a launch. Takes the tokens of the oldest one unless the host may run further ahead.

        Must only be called while there is work. If it raises, all requests that had a slot are dropped.
        """
        try:
            self._load_saved()
            events = self._noted(self.scheduler.expire())
            if self._launch_next() and len(self._launches) <= self._pacing.num_launches_ahead:
                return events
            if self._launches:
                return events + self._finish(self._launches[0])
            if not events:  # all rows wait for masks or for the disk, which take milliseconds
                self._pause()
            return events
        except BaseException as error:  # also an interrupt
            self._launches.clear()
            self.scheduler.abandon()
            self._journal.look_around()
            self.ranks.give_up(error)
            raise

    def save_next(self, patience_s: float = 0.0) -> bool:
        """Copies a piece of a warm slot, to be written to disk. Must be called between two steps.

        Returns True if there is more to do, and nothing else. `patience_s`: how long this may wait for the disk.
        """
        if self._saved is None or self.has_work:
            return False
        self._settle()
        return self._saved.save_next(self.scheduler.placement, patience_s)

    def has_saved_all(self) -> bool:
        """Returns true if everything that is worth saving is on disk, or will not get there."""
        return self._saved is None or not (self.has_work or self.save_next() or not self._saved.finish_writing(0.0))

    def close(self, save_s: float = 0.0) -> None:
        """Ends what works for the engine. `save_s`: how long warm slots may be saved before."""
        if self._saved is not None:
            deadline = time.monotonic() + save_s
            while time.monotonic() < deadline and self.save_next(_SAVE_PATIENCE_S):
                pass
            self._saved.finish_writing(max(0.0, deadline - time.monotonic()))
            self._saved.stop()
        self.ranks.close()

    def _pause(self) -> None:
        if self._saved is not None and self._saved.is_reading:
            self._saved.wait(_READ_POLL_S)
        else:
            time.sleep(_GRAMMAR_POLL_S)

    def _load_saved(self) -> None:
        """Loads what was read from disk into the slots of those who wait for it."""
        if self._saved is not None:
            for part in self._saved.take():
                self.scheduler.placement.restoring.load(part)

    def _note_costs(self, plan: StepPlan, seconds: float) -> None:
        """Learns what prompts cost, and saves something if the disk has been given no work for long enough."""
        if self._saved is not None:
            num_prompt_tokens = 0 if plan.num_decode_rows else sum(plan.num_new_tokens)
            self._saved.note_computed(num_prompt_tokens, seconds)
            if self._saved.can_save_beside(self.scheduler.placement):
                self._settle()
                self._saved.save_next(self.scheduler.placement)

    def _launch_next(self) -> bool:
        """False if nothing can be planned before the tokens of a launch in flight are known."""
        if self._launches and self._launches[-1].outputs is None:
            return False  # it ran out of memory, so there will be no tokens
        plan = begin_step(self.scheduler, self.cache, lambda plan: self._launches.append(self._computer.launch(plan)))
        return bool(plan.rows)

    def _finish(self, launch: Launch) -> list[TokenEvent]:
        events = self.scheduler.update(launch.plan, launch.wait())
        self._launches.popleft()
        seconds = self._journal.note_launch(launch.plan, launch.begin)
        if self._speculation is not None:
            self._speculation.note_launch(launch.plan, seconds)
        if self._is_steps_auto and launch.plan.is_decode:
            most = self.config.max_steps_per_launch
            self.scheduler.max_steps = steps_that_fit(seconds / launch.plan.num_steps, most)
        noted = self._noted(events)
        self._note_costs(launch.plan, seconds)
        return noted

    def _noted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Scrubs released slots, so that they hold no NaN from here on, and records the events."""
        self._settle()
        self._journal.note_events(events)
        return events

    def _settle(self) -> None:
        """Has the pending copies and scrubs performed."""
        while self.cache.owed:
            try:
                self._computer.perform([self.cache.owed[0]])
            except BaseException as error:
                self.ranks.give_up(error)
                raise
            self.cache.performed(1)  # last, so that an interrupted job is done again next time

    def read_snapshot(self) -> Snapshot:
        """The state between two steps, for observers."""
        return self._journal.read_snapshot(self.config.num_slots, self.config.slot_len)

    def read_stats(self) -> EngineStats:
        """The engine's counts so far. From any thread, also when the engine is dead."""
        return self._journal.read_stats()

    def check(self) -> None:
        """Asserts that requests, slots, lengths and memory agree."""
        self.scheduler.check()
        self._settle()
        self.cache.check_memory()
