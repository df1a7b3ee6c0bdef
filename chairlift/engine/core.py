"""The engine without its thread: `step` is schedule, launch, update.

Where the device works beside the host, a launch is begun before the tokens of the one before it are taken: the device
always has its next work, and whatever the host does meanwhile costs no time. The device works in the order in which
it is told, so that what is launched, copied or overwritten now happens after all that was launched before.

Knows token ids only. Whoever calls its methods owns it; the methods must not be called from two threads at once.
"""

import logging
from collections import deque
from dataclasses import dataclass

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.config import AttentionBackend, EngineConfig, ModelFacts, find_cpu_obstacle, resolve
from chairlift.engine.forward import Forward, load_forward
from chairlift.engine.graphs import CudaRecorder, DecodeGraphs, GraphRecorder
from chairlift.engine.journal import Journal
from chairlift.engine.machine import choose_num_threads, inspect_machine
from chairlift.engine.memory import fit_cache
from chairlift.engine.newest import NewestTokens
from chairlift.engine.runner import Launch, ModelRunner
from chairlift.engine.sampling import Sampler
from chairlift.engine.snapshot import Snapshot
from chairlift.engine.stats import EngineStats
from chairlift.errors import ConfigurationError
from chairlift.models import open_checkpoint
from chairlift.models.loader import TORCH_DTYPES
from chairlift.scheduler import Policy, Request, Scheduler, StepPlan, TokenEvent

logger = logging.getLogger(__name__)


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
        torch.set_num_threads(choose_num_threads() if config.num_threads == "auto" else config.num_threads)
        checkpoint = open_checkpoint(config.model)
        shape = checkpoint.config
        facts = ModelFacts(
            dtype=shape.dtype,
            max_position_embeddings=shape.max_position_embeddings,
            num_parameters=checkpoint.num_parameters,
            head_dim=shape.head_dim,
            kv_elements_per_token=shape.kv_elements_per_token,
        )
        is_native = config.attention_backend in ("auto", AttentionBackend.CPU)
        machine = inspect_machine(config.device, wants_cpu_kernels=is_native)
        self.config = resolve(config, facts, machine)
        if is_native and not machine.is_gpu and self.config.attention_backend is AttentionBackend.TORCH:
            obstacle = find_cpu_obstacle(facts, machine, self.config.dtype) or "this processor has no AVX-512"
            logger.warning("attention backend torch rather than cpu: %s", obstacle)
        self.vocab_size = shape.vocab_size
        dtype = TORCH_DTYPES[self.config.dtype]
        slot_len = self.config.slot_len
        forward = load_forward(checkpoint, self.config)
        self.config = fit_cache(config, self.config, facts, forward)
        params = KVCacheParams(dtype, shape.num_kv_heads, shape.head_dim)
        device = torch.device(self.config.device)
        self._pacing = pacing or Pacing.of(device)
        self._launches: deque[Launch] = deque()  # in flight, in the order in which they were begun
        num_slots = self.config.num_slots + (self._pacing.recorder is not None)
        self.cache = _allocate(params, num_slots, slot_len, shape.num_layers, self.config.device)
        newest = NewestTokens(num_slots, device)
        graphs = self._make_graphs(self._pacing.recorder, forward, newest) if self._pacing.recorder else None
        sampler = Sampler(shape.vocab_size, num_slots, device)
        self._runner = ModelRunner(forward, self.cache, sampler, newest, graphs)
        self._scheduler = Scheduler(
            self.cache.ledger,
            self.config.max_num_batched_tokens,
            self.config.max_steps_per_launch,
            self.config.max_queue_size,
            Policy.of(self.config),
            max_num_running=self.config.max_batch_size,
        )
        self._journal = Journal(self._scheduler)
        logger.info(
            "engine ready: %s on %s, attention %s, %d slots of %d tokens, %d tokens a step, up to %d steps a launch",
            self.config.dtype,
            self.config.device,
            self.config.attention_backend,
            self.config.num_slots,
            slot_len,
            self.config.max_num_batched_tokens,
            self.config.max_steps_per_launch,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._launches)

    @property
    def num_acceptable(self) -> int:
        """Requests that `add` would take now."""
        return self._scheduler.num_acceptable

    def add(self, *requests: Request) -> None:
        """Queues requests, all or none. `QueueFull` if too many would wait."""
        self._scheduler.add(*requests)
        self._journal.look_around()

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and gives its slot back. None if it has ended already."""
        event = self._scheduler.abort(request_id)
        self._journal.note_events([event] if event is not None else [])
        self._scrub()
        return event

    def step(self) -> list[TokenEvent]:
        """Begins a launch, and takes the tokens of the oldest one if it need not, or cannot, run ahead any further.

        Must only be called while there is work. If it raises, the requests of all launches in flight are gone.
        """
        try:
            events = self._expire()
            if self._launch_next() and len(self._launches) <= self._pacing.num_launches_ahead:
                return events
            return events + self._finish(self._launches[0]) if self._launches else events
        except BaseException:  # also an interrupt
            self._abandon(*(launch.plan for launch in self._launches))
            self._launches.clear()
            raise

    def _expire(self) -> list[TokenEvent]:
        events = self._scheduler.expire()
        if events:
            self._journal.note_events(events)
            self._scrub()
        return events

    def _launch_next(self) -> bool:
        """False if nothing can be planned before the tokens of a launch in flight are known."""
        plan = self._scheduler.schedule()
        self._scrub()  # slots that were yielded just now, before their new owners write to them
        if not plan.rows:
            return False
        try:
            launch = self._runner.launch(plan)
            self._scheduler.advance(plan, launch.reservation)
            self._launches.append(launch)
        except BaseException:
            self._abandon(plan)
            raise
        return True

    def _finish(self, launch: Launch) -> list[TokenEvent]:
        results = launch.wait()
        events = self._scheduler.update(launch.plan, results)
        self._launches.popleft()
        self._scrub()
        self._journal.note_launch(launch.plan, launch.begin)
        self._journal.note_events(events)
        return events

    def _abandon(self, *plans: StepPlan) -> None:
        """Of launches that did not come to their end nobody knows whether what they wrote are numbers."""
        for plan in plans:
            self._scheduler.abandon(plan)
        self._scrub()
        self._journal.look_around()

    def _scrub(self) -> None:
        """Overwrites what may be no numbers: attention multiplies even what it does not look at."""
        for unproven in self._scheduler.take_unproven():
            self.cache.scrub(unproven.slot, unproven.start)

    def _make_graphs(self, recorder: GraphRecorder, forward: Forward, newest: NewestTokens) -> DecodeGraphs:
        self.cache.claim_slot(self.cache.max_cache_batch_size - 1)  # what pads a batch has to work on something
        max_steps = self.config.max_steps_per_launch
        try:
            graphs = DecodeGraphs(forward, self.cache.blocks[0], newest, recorder, self.vocab_size, max_steps)
            graphs.record_common()
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                "there is no memory left for CUDA graphs; lower memory_fraction, max_batch_size or max_seq_len"
            ) from error
        return graphs

    def take_snapshot(self) -> Snapshot:
        """What can be seen from outside, between two steps."""
        return self._journal.take_snapshot(self.config.num_slots, self.config.slot_len)

    def read_stats(self) -> EngineStats:
        """What the engine has done so far. From any thread, and of a dead engine as well."""
        return self._journal.read_stats()

    def check(self) -> None:
        """Asserts that requests, slots and lengths agree."""
        self._scheduler.check()


def _allocate(
    params: KVCacheParams, num_slots: int, slot_len: int, num_layers: int, device: str
) -> ContinuousBatchingKVCacheManager:
    size = ContinuousBatchingKVCacheManager.estimated_memory_size(params, num_slots, slot_len, num_layers, [device])
    try:
        cache = ContinuousBatchingKVCacheManager(params, num_slots, slot_len, num_layers, [device])
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as a RuntimeError
        raise ConfigurationError(
            f"allocating {size / 1e6:.0f} MB of cache failed; lower max_batch_size or max_seq_len"
        ) from error
    logger.info("cache: %d slots of %d tokens, %.1f MB", num_slots, slot_len, size / 1e6)
    return cache
