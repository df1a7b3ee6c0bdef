"""The engine without its thread: `step` is schedule, execute, update.

Knows token ids only. Whoever calls its methods owns it; the methods must not be called from two threads at once.
"""

import logging

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager, KVCacheParams
from chairlift.config import AttentionBackend, EngineConfig, ModelFacts, find_cpu_obstacle, resolve
from chairlift.engine.forward import load_forward
from chairlift.engine.machine import choose_num_threads, inspect_machine
from chairlift.engine.runner import ModelRunner
from chairlift.engine.sampling import Sampler
from chairlift.errors import ConfigurationError
from chairlift.models import open_checkpoint
from chairlift.models.loader import TORCH_DTYPES
from chairlift.scheduler import Request, Scheduler, StepPlan, TokenEvent

logger = logging.getLogger(__name__)


class EngineCore:
    """Scheduler, cache and model of one checkpoint. ConfigurationError if it cannot be set up."""

    def __init__(self, config: EngineConfig) -> None:
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
        params = KVCacheParams(dtype, shape.num_kv_heads, shape.head_dim)
        self.cache = _allocate(params, self.config.max_batch_size, slot_len, shape.num_layers, self.config.device)
        sampler = Sampler(shape.vocab_size, self.config.max_batch_size, self.cache.devices[0])
        self._runner = ModelRunner(forward, self.cache, sampler)
        self._scheduler = Scheduler(
            self.cache.ledger,
            self.config.max_num_batched_tokens,
            self.config.max_steps_per_launch,
            self.config.max_queue_size,
        )
        logger.info(
            "engine ready: %s on %s, attention %s, %d slots of %d tokens, %d tokens a step, up to %d steps a launch",
            self.config.dtype,
            self.config.device,
            self.config.attention_backend,
            self.config.max_batch_size,
            slot_len,
            self.config.max_num_batched_tokens,
            self.config.max_steps_per_launch,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def num_acceptable(self) -> int:
        """Requests that `add` would take now."""
        return self._scheduler.num_acceptable

    def add(self, *requests: Request) -> None:
        """Queues requests, all or none. `QueueFull` if too many would wait."""
        self._scheduler.add(*requests)

    def abort(self, request_id: str) -> TokenEvent | None:
        """Ends a request and frees its slot. None if it has ended already."""
        slot = self._scheduler.half_filled_slot(request_id)
        event = self._scheduler.abort(request_id)
        if slot is not None:
            self.cache.scrub(slot)  # no token was sampled from it yet, so nobody knows whether it holds numbers
        return event

    def step(self) -> list[TokenEvent]:
        """One launch. Must only be called while there is work."""
        plan = self._scheduler.schedule()
        try:
            result = self._runner.execute(plan)
            events = self._scheduler.update(plan, result.rows, result.reservation)
        except BaseException:  # also an interrupt
            self._scheduler.abandon(plan)
            self._scrub_uncommitted(plan)
            raise
        for row, slot, row_result in zip(plan.rows, result.reservation.seq_ids, result.rows, strict=True):
            if row_result.error is not None and row.request.finish_reason is not None:
                self.cache.scrub(slot)  # what is not a number in it would spoil its next owner
        return events

    def _scrub_uncommitted(self, plan: StepPlan) -> None:
        """Of a step that did not come to its end nobody knows whether what it wrote are numbers."""
        for row in plan.rows:
            if row.request.slot is not None:
                self.cache.scrub(row.request.slot, row.request.num_computed)

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
