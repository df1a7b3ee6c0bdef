"""Everything of a rank that computes: its part of the model, the tensors of the cache, sampler and graphs.

The engine is one of these with a scheduler in front of it; a rank other than the first is nothing else.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.config import EngineConfig, LoadFormat, ResolvedConfig
from chairlift.engine.execution.last_tokens import LastTokens
from chairlift.engine.execution.machine import allocate_cache, fit_cache, inspect_machine
from chairlift.engine.execution.recorded_steps import GraphParts
from chairlift.engine.execution.recorder import GraphRecorder
from chairlift.engine.execution.recordings import Recordings, list_obstacles, num_kept_tokens, num_scratch_tokens
from chairlift.engine.execution.resolver import resolve
from chairlift.engine.execution.runner import ModelRunner
from chairlift.engine.execution.sampling_graphs import SamplingGraphs
from chairlift.engine.forks import prepare_for_forks
from chairlift.engine.parts import DEFAULT_PARTS, Pacing, Parts
from chairlift.engine.ranks import Ranks
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError
from chairlift.models import Checkpoint, find_obstacle, open_checkpoint, ragged_recurrence
from chairlift.models.loader import count_parameters, grouped_size
from chairlift.params import SamplingParams
from chairlift.plan import COMPUTE, RowPlan, SamplingKey, StepPlan

logger = logging.getLogger(__name__)

_ALONE = SamplingKey("alone", SamplingParams(), seed=0, num_prompt_tokens=0)


def open_model(config: EngineConfig) -> Checkpoint:
    """Opens the checkpoint that a configuration names. ConfigurationError if it cannot be served."""
    return open_checkpoint(config.model, ignores_weights=config.load_format is LoadFormat.DUMMY)


class Executor:
    """One rank's part of an engine. ConfigurationError if it cannot be set up."""

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks, parts: Parts = DEFAULT_PARTS) -> None:
        config = ranks.config
        self._parts = parts
        self.vocab_size = checkpoint.config.vocab_size  # of all ranks together
        checkpoint, machine = ranks.split(checkpoint, parts.machine or inspect_machine(config.device))
        shape = self._shape = checkpoint.config
        grouped = None if config.load_format is LoadFormat.DUMMY else grouped_size(checkpoint, is_on_gpu=machine.is_gpu)
        resolved = resolve(config, shape, count_parameters(shape), machine, find_obstacle, grouped)
        if resolved.fallback_reason is not None:
            logger.warning("the attention backend is torch instead of cpu: %s", resolved.fallback_reason)
        torch.set_num_threads(resolved.num_threads)
        prepare_for_forks()
        self.forward = parts.load_forward(checkpoint, resolved)
        ranks.meet()  # from here on, all ranks compute together
        device = torch.device(resolved.device)
        self.pacing = self._choose_pacing(device, resolved)
        fitted = fit_cache(
            config,
            resolved,
            shape,
            self.forward,
            ranks.least,
            num_recorded_tokens=0 if self.pacing.recorder is None else num_kept_tokens(self.forward, resolved),
            make_sampler=parts.make_sampler,
        )
        self.config: ResolvedConfig = fitted
        self.is_divided = config.tensor_parallel_size > 1
        self.cache: ContinuousBatchingKVCacheManager
        self.sampler: Sampler
        self.recordings: Recordings | None = None
        self.runner = self._make_runner(device)

    def logits(self, token_ids: Sequence[int], places: slice) -> torch.Tensor:
        """Computes a sequence alone, in one step: float32 `[N, vocab]`, what follows those of its tokens.

        To measure a model, beside no engine. CacheFull if no slot is free; ValueError if the sequence does not fit.
        """
        (slot,) = self.cache.claim(1)
        try:
            self.cache.grow(slot, len(token_ids))
            reservation = self.cache.reserve([slot], [len(token_ids)])
            self.cache.settle()
            row = RowPlan(_ALONE, slot, 0, token_ids, 0, COMPUTE)
            logits = self.runner.logits(StepPlan((row,), 0, 1, reservation=reservation), places)
            self.cache.commit([len(token_ids)], reservation)
        finally:
            self.cache.abandon([slot])
            self.cache.release(slot)
        return logits

    def _choose_pacing(self, device: torch.device, resolved: ResolvedConfig) -> Pacing:
        """The pacing asked for, or the device's, without a recorder if the model's steps cannot be recorded."""
        pacing = self._parts.pacing or Pacing.of(device)
        if pacing.recorder is None:
            return pacing
        if not self._shape.can_record or not self._has_kernels(device, resolved):
            logger.info("no step is recorded: the layers of this model launch or read what differs from step to step")
            return replace(pacing, recorder=None)
        for obstacle in list_obstacles(self.forward):
            logger.info(obstacle)
        return pacing

    def _has_kernels(self, device: torch.device, resolved: ResolvedConfig) -> bool:
        """Returns true if recurrent layers and experts have kernels that a graph can record."""
        shape = self._shape
        if shape.state_layout is not None and not ragged_recurrence.is_available(device):
            return False
        return shape.groups_experts(resolved.dtype, device)

    def _make_runner(self, device: torch.device) -> ModelRunner:
        recorder, shape = self.pacing.recorder, self._shape
        num_slots = self.config.num_slots + (recorder is not None)
        self.cache = allocate_cache(shape.kept(self.config.cache_dtype), shape.states(), num_slots, self.config)
        books = self.cache.states
        if books is not None:  # without kernels, reading ends would wait for a GPU
            is_readable = device.type == "cpu" or ragged_recurrence.is_available(device)
            books.stops_at_ends = is_readable and books.max_tentative > 0 and not self.config.speculation
        last_tokens = LastTokens(num_slots, device, knows_ends=books is not None and books.stops_at_ends)
        self.sampler = self._parts.make_sampler(self.vocab_size, num_slots, device)
        if recorder is not None:
            self.recordings = self._record(recorder, last_tokens)
        return self._parts.make_runner(
            self.forward, self.cache, self.sampler, last_tokens, self.recordings, is_divided=self.is_divided
        )

    def _record(self, recorder: GraphRecorder, last_tokens: LastTokens) -> Recordings:
        """Records steps and sampling, whose padding is in the last slot. ConfigurationError if they do not fit."""
        blocks, scratch = self.cache.blocks[0], self.cache.max_cache_batch_size - 1
        self.cache.claim_slot(scratch)
        self.cache.grow(scratch, num_scratch_tokens(self.forward, self.config))
        try:
            sampling = SamplingGraphs(
                self.forward,
                last_tokens,
                recorder,
                self.sampler.sample_rows,
                vocab_size=self.vocab_size,
                max_steps=self.config.max_steps_per_launch,
                scratch=scratch,
                device=blocks.device,
                records_common=self.pacing.records_common,
            )
            return Recordings(
                GraphParts(
                    self.forward,
                    blocks,
                    last_tokens,
                    recorder,
                    sampling,
                    max_num_tokens=self.config.max_num_batched_tokens,
                    places=self.cache.places,
                    states=next(iter(self.cache.state_memories), None),
                    records_common=self.pacing.records_common,
                    is_divided=self.is_divided,
                )
            )
        except torch.OutOfMemoryError as error:
            raise ConfigurationError(
                "there is no memory left for CUDA graphs; lower kv_cache_memory_bytes, max_batch_size or max_seq_len"
            ) from error
