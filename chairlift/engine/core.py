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
from dataclasses import dataclass, replace

import torch

from chairlift.cache import KVCacheParams
from chairlift.config import EngineConfig, LoadFormat
from chairlift.engine.execution.graphs import CudaRecorder, DecodeGraphs, GraphRecorder, LastTokens
from chairlift.engine.execution.machine import allocate_cache, fit_cache, inspect_machine, steps_that_fit
from chairlift.engine.execution.resolver import resolve
from chairlift.engine.execution.runner import Launch, ModelRunner
from chairlift.engine.forks import prepare_for_forks
from chairlift.engine.journal import EngineStats, Journal, Snapshot
from chairlift.engine.parallel import Leader, Ranks, on_every_rank
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError
from chairlift.models import find_obstacle, load_forward, open_checkpoint
from chairlift.models.attention import Forward
from chairlift.models.loader import TORCH_DTYPES, count_parameters, grouped_size
from chairlift.scheduler import Policy, Request, Scheduler, Speculation, TokenEvent

logger = logging.getLogger(__name__)

REST_AFTER_S = 30.0  # without work
_GRAMMAR_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Pacing:
    """How far the host runs ahead of the device."""

    num_launches_ahead: int = 0  # begun before the tokens of an earlier one are taken
    recorder: GraphRecorder | None = None  # of graphs of decode steps; None: they are launched operator by operator

    @classmethod
    def of(cls, device: torch.device) -> "Pacing":
        """A CPU computes during the launch, so the host cannot run ahead of it."""
        return cls() if device.type == "cpu" else cls(1, CudaRecorder(device))


class EngineCore:
    """Scheduler, cache and model of one checkpoint. ConfigurationError if it cannot be set up."""

    def __init__(self, config: EngineConfig, pacing: Pacing | None = None, ranks: Ranks | None = None) -> None:
        """`pacing` None: the device's default. `ranks`: given to all ranks but the first, which starts the others."""
        is_dummy = config.load_format is LoadFormat.DUMMY
        checkpoint = open_checkpoint(config.model, ignores_weights=is_dummy)
        self.vocab_size = checkpoint.config.vocab_size
        is_first = ranks is None and config.tensor_parallel_size > 1
        self.ranks = Leader(config, checkpoint) if is_first else ranks or Ranks(config)
        config = self.ranks.config
        checkpoint, machine = self.ranks.split(checkpoint, inspect_machine(config.device))
        shape = checkpoint.config
        grouped = None if is_dummy else grouped_size(checkpoint)
        self.config = resolve(config, shape, count_parameters(shape), machine, find_obstacle, grouped)
        if self.config.fallback_reason is not None:
            logger.warning("the attention backend is torch instead of cpu: %s", self.config.fallback_reason)
        torch.set_num_threads(self.config.num_threads)
        prepare_for_forks()
        forward = load_forward(checkpoint, self.config)
        self.ranks.meet()  # from here on, all ranks compute together
        self.config = fit_cache(config, self.config, shape, forward, self.ranks.least)
        params = KVCacheParams(TORCH_DTYPES[self.config.dtype], shape.num_kv_heads, shape.head_dim)
        device = torch.device(self.config.device)
        self._pacing = pacing or Pacing.of(device)
        ahead = self._pacing.num_launches_ahead
        assert not (config.speculation and ahead), "guesses need the tokens of the launch before"
        if not shape.can_record:
            self._pacing = replace(self._pacing, recorder=None)
        self._launches: deque[Launch] = deque()  # in flight, in the order in which they were begun
        num_slots = self.config.num_slots + (self._pacing.recorder is not None)
        self.cache = allocate_cache(params, num_slots, shape.num_layers, self.config)
        last_tokens = LastTokens(num_slots, device)
        graphs = self._make_graphs(self._pacing.recorder, forward, last_tokens) if self._pacing.recorder else None
        sampler = Sampler(self.vocab_size, num_slots, device)
        is_divided = config.tensor_parallel_size > 1
        self._runner = ModelRunner(forward, self.cache, sampler, last_tokens, graphs, is_divided=is_divided)
        self._speculation = Speculation(config.num_speculative_tokens) if config.speculation else None
        self._scheduler = Scheduler(
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
            clock=self.ranks.clock,
            max_num_running=self.config.max_batch_size,
            speculation=self._speculation,
        )
        self._is_steps_auto = config.max_steps_per_launch == "auto" and not is_divided
        self._journal = Journal(self._scheduler)
        ready = self.config
        logger.info(
            "engine ready: %s on %s, attention %s, %d slots of %d tokens, %d tokens a step, up to %d steps a launch",
            *(ready.dtype, ready.device, ready.attention_backend, ready.num_slots, ready.slot_len),
            *(ready.max_num_batched_tokens, ready.max_steps_per_launch),
        )
        self.ranks.meet()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._launches)

    def can_take(self, requests: Sequence[Request]) -> bool:
        """Whether `add` would queue these now without displacing another request."""
        return self._scheduler.can_take(requests)

    @on_every_rank
    def add(self, *requests: Request) -> list[TokenEvent]:
        """Queues requests, all or none, and returns the ends of those that they displace.

        `QueueFull` if the queue is full and too few can be displaced. ValueError if one of them was added before.
        """
        return self._noted(self._scheduler.add(*map(self.ranks.share, requests)))

    @on_every_rank
    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and releases its slot. None if it has ended already."""
        event = self._scheduler.abort(request_id)
        self._noted([event] if event is not None else [])
        return event

    @on_every_rank
    def hold(self, request_ids: Sequence[str], is_held: bool) -> None:
        """Pauses rows in their slots, or resumes them. Requests that have ended are skipped."""
        for request in filter(None, map(self._scheduler.find, request_ids)):
            request.is_held = is_held

    @on_every_rank
    def reset_prefix_cache(self) -> None:
        """Empties the prefix cache: later requests reuse nothing computed so far. Running ones continue."""
        self._scheduler.reset_prefix_cache()
        if self._speculation is not None:
            self._speculation.answers.forget()
        self._journal.look_around()

    @on_every_rank
    def rest(self) -> bool:
        """To be called after some time without work: frees unused memory and some warm slots, and records a graph.

        Returns True if there is more to do.
        """
        if self.has_work:
            return False
        if self.cache.is_elastic:
            self._scheduler.placement.rest()
            self.cache.settle()
            self._journal.look_around()
        # One of several ranks might lack memory for a graph, and the others would wait for it.
        return self.config.tensor_parallel_size == 1 and self._runner.record_missing()

    @on_every_rank
    def step(self) -> list[TokenEvent]:
        """Begins a launch. Takes the tokens of the oldest one unless the host may run further ahead.

        Must only be called while there is work. If it raises, all requests that had a slot are dropped.
        """
        try:
            events = self._noted(self._scheduler.expire())
            if self._launch_next() and len(self._launches) <= self._pacing.num_launches_ahead:
                return events
            if self._launches:
                return events + self._finish(self._launches[0])
            if not events:  # all rows wait for masks, which take milliseconds
                time.sleep(_GRAMMAR_POLL_S)
            return events
        except BaseException:  # also an interrupt
            self._launches.clear()
            self._scheduler.abandon()
            self._journal.look_around()
            raise

    def _launch_next(self) -> bool:
        """False if nothing can be planned before the tokens of a launch in flight are known."""
        if self._launches and self._launches[-1].outputs is None:
            return False  # it ran out of memory, so there will be no tokens
        plan = self._scheduler.schedule()
        if not plan.rows:
            return False
        launch = self._runner.launch(plan)
        self._scheduler.advance(plan, launch.reservation)
        self._launches.append(launch)
        return True

    def _finish(self, launch: Launch) -> list[TokenEvent]:
        results = self.ranks.agree(launch.wait())
        events = self._scheduler.update(launch.plan, results)
        self._launches.popleft()
        seconds = self._journal.note_launch(launch.plan, launch.begin)
        if self._speculation is not None:
            self._speculation.note_launch(launch.plan, self.ranks.agree(seconds))
        if self._is_steps_auto and launch.plan.is_decode:
            most = self.config.max_steps_per_launch
            self._scheduler.max_steps = steps_that_fit(seconds / launch.plan.num_steps, most)
        return self._noted(events)

    def _noted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Scrubs released slots, so that they hold no NaN from here on, and records the events."""
        self.cache.settle()
        self._journal.note_events(events)
        return events

    def _make_graphs(self, recorder: GraphRecorder, forward: Forward, last_tokens: LastTokens) -> DecodeGraphs:
        scratch, max_steps = self.cache.max_cache_batch_size - 1, self.config.max_steps_per_launch
        self.cache.claim_slot(scratch)  # padding rows need a slot
        self.cache.hold(scratch, min(max_steps, self.config.slot_len))
        try:
            graphs = DecodeGraphs(forward, self.cache.blocks[0], last_tokens, recorder, self.vocab_size, max_steps)
            graphs.record_common()
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                "there is no memory left for CUDA graphs; lower kv_cache_memory_bytes, max_batch_size or max_seq_len"
            ) from error
        return graphs

    def take_snapshot(self) -> Snapshot:
        """The state between two steps, for observers."""
        return self._journal.take_snapshot(self.config.num_slots, self.config.slot_len)

    def read_stats(self) -> EngineStats:
        """The engine's counts so far. From any thread, also when the engine is dead."""
        return self._journal.read_stats()

    def check(self) -> None:
        """Asserts that requests, slots, lengths and memory agree."""
        self._scheduler.check()
        self.cache.check_memory()
