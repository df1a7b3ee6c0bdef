"""Everything of a rank that computes: its part of the model, the tensors of the cache, sampler and graphs.

The engine is one of these with a scheduler in front of it; a rank other than the first is nothing else.
"""

import logging
from dataclasses import dataclass, replace

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.config import EngineConfig, LoadFormat, ResolvedConfig
from chairlift.engine.execution.graphs import CudaRecorder, DecodeGraphs, GraphRecorder, LastTokens
from chairlift.engine.execution.machine import allocate_cache, fit_cache, inspect_machine
from chairlift.engine.execution.resolver import resolve
from chairlift.engine.execution.runner import ModelRunner
from chairlift.engine.forks import prepare_for_forks
from chairlift.engine.ranks import Ranks
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError
from chairlift.models import Checkpoint, find_obstacle, load_forward, open_checkpoint
from chairlift.models.attention import Forward
from chairlift.models.loader import count_parameters, grouped_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pacing:
    """Says how far the host runs ahead of the device."""

    num_launches_ahead: int = 0  # begun before the tokens of an earlier one are taken
    recorder: GraphRecorder | None = None  # of graphs of decode steps; None: they are launched operator by operator

    @classmethod
    def of(cls, device: torch.device) -> "Pacing":
        """A CPU computes during the launch, so the host cannot run ahead of it."""
        return cls() if device.type == "cpu" else cls(1, CudaRecorder(device))


def open_model(config: EngineConfig) -> Checkpoint:
    """Opens the checkpoint that a configuration names. ConfigurationError if it cannot be served."""
    return open_checkpoint(config.model, ignores_weights=config.load_format is LoadFormat.DUMMY)


class Executor:
    """One rank's part of an engine. ConfigurationError if it cannot be set up."""

    def __init__(self, checkpoint: Checkpoint, ranks: Ranks, pacing: Pacing | None = None) -> None:
        """`pacing` None: the device's default."""
        config = ranks.config
        self.vocab_size = checkpoint.config.vocab_size  # of all ranks together
        checkpoint, machine = ranks.split(checkpoint, inspect_machine(config.device))
        shape = self._shape = checkpoint.config
        grouped = None if config.load_format is LoadFormat.DUMMY else grouped_size(checkpoint)
        resolved = resolve(config, shape, count_parameters(shape), machine, find_obstacle, grouped)
        if resolved.fallback_reason is not None:
            logger.warning("the attention backend is torch instead of cpu: %s", resolved.fallback_reason)
        torch.set_num_threads(resolved.num_threads)
        prepare_for_forks()
        forward = load_forward(checkpoint, resolved)
        ranks.meet()  # from here on, all ranks compute together
        self.config: ResolvedConfig = fit_cache(config, resolved, shape, forward, ranks.least)
        device = torch.device(self.config.device)
        self.pacing = pacing or Pacing.of(device)
        if not shape.can_record:
            self.pacing = replace(self.pacing, recorder=None)
        self.is_divided = config.tensor_parallel_size > 1
        self.cache: ContinuousBatchingKVCacheManager
        self.runner = self._make_runner(forward, device)

    def _make_runner(self, forward: Forward, device: torch.device) -> ModelRunner:
        recorder, shape = self.pacing.recorder, self._shape
        num_slots = self.config.num_slots + (recorder is not None)
        self.cache = allocate_cache(shape.kept(self.config.dtype), num_slots, self.config)
        last_tokens = LastTokens(num_slots, device)
        graphs = None if recorder is None else self._make_graphs(recorder, forward, last_tokens)
        sampler = Sampler(self.vocab_size, num_slots, device)
        return ModelRunner(forward, self.cache, sampler, last_tokens, graphs, is_divided=self.is_divided)

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
