"""The engine without its thread: `step` is schedule, launch, update.

Where the device works beside the host, a launch begins before the tokens of the one before it are taken, so that the
device always has work and the host's time costs nothing. The device works in order: what is launched, copied or
overwritten now happens after all that was launched before.

Knows token ids only. Its methods must not be called from two threads at once, except for `read_stats`.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.config import EngineConfig, LoadFormat, ResolvedConfig
from chairlift.engine.execution.forward import Forward, load_forward
from chairlift.engine.execution.graphs import CudaRecorder, DecodeGraphs, GraphRecorder, LastTokens
from chairlift.engine.execution.machine import fit_cache, inspect_machine
from chairlift.engine.execution.resolver import resolve
from chairlift.engine.execution.runner import Launch, ModelRunner
from chairlift.engine.journal import Journal
from chairlift.engine.sampling.sampler import Sampler
from chairlift.engine.stats import EngineStats, Snapshot
from chairlift.errors import ConfigurationError
from chairlift.models import open_checkpoint
from chairlift.models.loader import TORCH_DTYPES, count_parameters, grouped_size
from chairlift.scheduler import Policy, Request, Scheduler, Speculation, TokenEvent

logger = logging.getLogger(__name__)

REST_AFTER_S = 30.0  # without work
_GRAMMAR_POLL_S = 0.001
_LAUNCH_S = 0.002  # of decode steps: a newcomer waits for that, and the host's work hides behind it


@dataclass(frozen=True, slots=True)
class Pacing:
    """How the host keeps ahead of the device."""

    num_launches_ahead: int = 0  # begun before the tokens of an earlier one are taken
    recorder: GraphRecorder | None = None  # of graphs of decode steps; None: they are launched operator by operator

    @classmethod
    def of(cls, device: torch.device) -> "Pacing":
        """A CPU computes while it launches, so that there is nothing to keep ahead of."""
        return cls() if device.type == "cpu" else cls(1, CudaRecorder(device))


class EngineCore:
    """Scheduler, cache and model of one checkpoint. ConfigurationError if it cannot be set up."""

    def __init__(self, config: EngineConfig, pacing: Pacing | None = None) -> None:
        """`pacing` None: what suits the device."""
        checkpoint = open_checkpoint(config.model)
        shape = checkpoint.config
        machine, num_parameters = inspect_machine(config.device), count_parameters(shape)
        grouped = grouped_size(checkpoint) if config.load_format is LoadFormat.SAFETENSORS else None
        self.config = resolve(config, shape, num_parameters, machine, grouped=grouped)
        if self.config.fallback_reason is not None:
            logger.warning("attention backend torch rather than cpu: %s", self.config.fallback_reason)
        torch.set_num_threads(self.config.num_threads)
        self.vocab_size = shape.vocab_size
        dtype = TORCH_DTYPES[self.config.dtype]
        forward = load_forward(checkpoint, self.config)
        self.config = fit_cache(config, self.config, shape, forward)
        params = KVCacheParams(dtype, shape.num_kv_heads, shape.head_dim)
        device = torch.device(self.config.device)
        self._pacing = pacing or Pacing.of(device)
        is_ahead = self._pacing.num_launches_ahead > 0
        assert config.speculation is None or not is_ahead, "guesses need the tokens of the launch before"
        if not shape.can_record:
            self._pacing = replace(self._pacing, recorder=None)
        self._launches: deque[Launch] = deque()  # in flight, in the order in which they were begun
        num_slots = self.config.num_slots + (self._pacing.recorder is not None)
        self.cache = _allocate(params, num_slots, shape.num_layers, self.config)
        last_tokens = LastTokens(num_slots, device)
        graphs = self._make_graphs(self._pacing.recorder, forward, last_tokens) if self._pacing.recorder else None
        sampler = Sampler(shape.vocab_size, num_slots, device)
        self._runner = ModelRunner(forward, self.cache, sampler, last_tokens, graphs)
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
            max_num_running=self.config.max_batch_size,
            speculation=self._speculation,
        )
        self._is_steps_auto = config.max_steps_per_launch == "auto"
        self._journal = Journal(self._scheduler)
        logger.info(
            "engine ready: %s on %s, attention %s, %d slots of %d tokens, %d tokens a step, up to %d steps a launch",
            self.config.dtype,
            self.config.device,
            self.config.attention_backend,
            self.config.num_slots,
            self.config.slot_len,
            self.config.max_num_batched_tokens,
            self.config.max_steps_per_launch,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._launches)

    def can_take(self, requests: Sequence[Request]) -> bool:
        """Whether `add` would take them now, and no other request would have to leave for them."""
        return self._scheduler.can_take(requests)

    def add(self, *requests: Request) -> list[TokenEvent]:
        """Queues requests, all or none, and returns the ends of those that lose their places in the queue to them.

        `QueueFull` if there is no place and none has to leave. ValueError if one of them was added before.
        """
        return self._noted(self._scheduler.add(*requests))

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and gives its slot back. None if it has ended already."""
        event = self._scheduler.abort(request_id)
        self._noted([event] if event is not None else [])
        return event

    def reset_prefix_cache(self) -> None:
        """Forgets all prompts: later requests reuse nothing that was computed so far. Running ones go on."""
        self._scheduler.reset_prefix_cache()
        self._journal.look_around()

    def rest(self) -> None:
        """Gives memory back that nobody uses. For when there has been no work for a while; frees some warm slots."""
        if self.cache.is_elastic and not self.has_work:
            self._scheduler.placement.rest()
            self.cache.settle()
            self._journal.look_around()

    def step(self) -> list[TokenEvent]:
        """Begins a launch, and takes the tokens of the oldest one if it need not, or cannot, run ahead any further.

        Must only be called while there is work. If it raises, all requests that had a slot are gone.
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
        plan = self._scheduler.schedule()
        if not plan.rows:
            return False
        launch = self._runner.launch(plan)
        self._scheduler.advance(plan, launch.reservation)
        self._launches.append(launch)
        return True

    def _finish(self, launch: Launch) -> list[TokenEvent]:
        results = launch.wait()
        events = self._scheduler.update(launch.plan, results)
        self._launches.popleft()
        seconds = self._journal.note_launch(launch.plan, launch.begin)
        if self._speculation is not None:
            self._speculation.note_launch(launch.plan, seconds)
        if self._is_steps_auto and launch.plan.is_decode:
            most = self.config.max_steps_per_launch
            self._scheduler.max_steps = steps_that_fit(seconds / launch.plan.num_steps, most)
        return self._noted(events)

    def _noted(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Slots that were given back are clean from here on: nothing in them may be NaN."""
        self.cache.settle()
        self._journal.note_events(events)
        return events

    def _make_graphs(self, recorder: GraphRecorder, forward: Forward, last_tokens: LastTokens) -> DecodeGraphs:
        scratch, max_steps = self.cache.max_cache_batch_size - 1, self.config.max_steps_per_launch
        self.cache.claim_slot(scratch)  # what pads a batch has to work on something
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
        """What can be seen from outside, between two steps."""
        return self._journal.take_snapshot(self.config.num_slots, self.config.slot_len)

    def read_stats(self) -> EngineStats:
        """What the engine has done so far. From any thread, and of a dead engine as well."""
        return self._journal.read_stats()

    def check(self) -> None:
        """Asserts that requests, slots, lengths and memory agree."""
        self._scheduler.check()
        self.cache.check_memory()


def steps_that_fit(seconds_each: float, most: int) -> int:
    """Decode steps of a launch, from 1 to `most`, that together take about as long as a launch should."""
    return max(1, min(most, round(_LAUNCH_S / max(seconds_each, 1e-6))))


def _allocate(
    params: KVCacheParams, num_slots: int, num_layers: int, config: ResolvedConfig
) -> ContinuousBatchingKVCacheManager:
    slot_len, devices = config.slot_len, [config.device]
    size = ContinuousBatchingKVCacheManager.estimated_memory_size(params, num_slots, slot_len, num_layers, devices)
    max_tokens = config.cache_tokens if config.is_cache_elastic else None
    try:
        cache = ContinuousBatchingKVCacheManager(params, num_slots, slot_len, num_layers, devices, max_tokens)
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as a RuntimeError
        raise ConfigurationError(
            f"allocating {size / 1e6:.0f} MB of cache failed; lower max_batch_size or max_seq_len"
        ) from error
    num_bytes = size if max_tokens is None else min(size, config.kv_cache_memory_bytes)
    how = "at once" if max_tokens is None else "as it is used"
    logger.info("cache: %d slots of %d tokens, %.1f MB taken %s", num_slots, slot_len, num_bytes / 1e6, how)
    return cache
