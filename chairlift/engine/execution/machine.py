"""Facts about this machine: the device, the number formats that it multiplies natively, and memory.

On a GPU, the cache is sized once the weights are loaded. What a step allocates is measured: a step of the largest size
runs once, from tokens to sampling with penalties and log-probabilities, and its peak is reserved, as is the peak of the
largest step with prompts in it that is recorded, because graphs keep their memory; the cache takes its share of the
rest, and other CUDA graphs use what is left.
"""

import logging
import re
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.cache.layout import Kept, StateParams
from chairlift.cache.memory import can_map
from chairlift.config import DType, EngineConfig, ResolvedConfig
from chairlift.engine.execution.gpus import Gpu, list_gpus
from chairlift.engine.execution.host import Host
from chairlift.engine.execution.resolver import MachineFacts, fit_slots
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError, sized
from chairlift.models.attention import Forward
from chairlift.models.config import ModelShape
from chairlift.models.cpu.processor import find_drawback, wanted_level

logger = logging.getLogger(__name__)

_HOST = Host()
_LAUNCH_S = 0.002  # of decode steps in a launch: a new request waits for them, and the host's work overlaps with them


def inspect_machine(device: str, host: Host = _HOST, gpus: Sequence[Gpu] | None = None) -> MachineFacts:
    """Facts about the named device ("auto": the first GPU, else the CPU).

    `gpus`: of the host; None: those of this machine.
    ConfigurationError if there is no such device, or if $CHAIRLIFT_CPU_LEVEL names a level that the CPU lacks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        wanted_level()  # raises if it names a level that the processor lacks
        return MachineFacts(
            device="cpu",
            fast_dtypes=_fast_cpu_dtypes(),
            free_bytes=host.free_bytes(),
            has_elastic_memory=can_map(torch.device("cpu")),
            num_threads=host.choose_num_threads(),
            cpu_drawback=find_drawback(),
        )
    match = re.fullmatch(r"cuda(?::([0-9]+))?", device)
    if match is None:
        raise ConfigurationError(f"device {device!r} is not supported; choose cpu or cuda:0")
    index, gpus = int(match[1] or 0), list_gpus() if gpus is None else gpus
    if index >= len(gpus):
        raise ConfigurationError(f"there is no device cuda:{index}; this machine has {len(gpus)} CUDA devices")
    return MachineFacts(
        device=f"cuda:{index}",
        fast_dtypes=frozenset(DType) if gpus[index].has_bfloat16 else frozenset({DType.FLOAT32, DType.FLOAT16}),
        free_bytes=gpus[index].memory().free,
        num_threads=host.choose_num_threads(),
        has_own_kernels=gpus[index].has_bfloat16 and gpus[index].runs_compiled_kernels(),
    )


def _fast_cpu_dtypes() -> frozenset[DType]:
    """float32 always; 16-bit formats only with instructions for them, since emulation is slower than float32."""
    capabilities = torch.cpu.get_capabilities()
    dtypes = {DType.FLOAT32}
    if any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        dtypes.add(DType.BFLOAT16)
    if any(capabilities.get(name) for name in ("avx512_fp16", "amx_fp16", "fp16_arith")):
        dtypes.add(DType.FLOAT16)
    return frozenset(dtypes)


@runtime_checkable
class _Sized(Forward, Protocol):
    """A forward that can tell how much memory its steps take."""

    def step_bytes(self, num_tokens: int, num_rows: int, cache_tokens: int) -> int: ...


@runtime_checkable
class _Measurable(Forward, Protocol):
    """A forward whose largest step can be run without a cache."""

    def dummy_run(self, num_tokens: int, num_rows: int) -> torch.Tensor: ...


def fit_cache(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: ModelShape,
    forward: Forward,
    least: Callable[[int], int] = int,
    host: Host = _HOST,
    gpu: Gpu | None = None,
    num_recorded_tokens: int = 0,
    make_sampler: Callable[[int, int, torch.device], Sampler] = Sampler,
) -> ResolvedConfig:
    """`resolved`, with as many slots as there is memory for beside the loaded model and a step.

    `least`: maps this rank's number to the lowest of all ranks. `gpu` None: the one that `resolved` names.
    `num_recorded_tokens`: of the largest step whose memory recordings keep; 0: there is none.
    `make_sampler`: see `Parts`.
    `ConfigurationError` if the slots that `config` asks for, or a single one, do not fit.
    """
    if isinstance(forward, _Sized):
        return _fit_host_cache(config, resolved, model, forward, host)
    if resolved.device == "cpu" or not isinstance(forward, _Measurable):
        return resolved
    gpu = gpu or Gpu.named(resolved.device)
    num_free_bytes = _measure_free_bytes(forward, resolved, gpu, num_recorded_tokens, make_sampler)
    fitted = fit_slots(config, resolved, model, least(num_free_bytes))
    logger.info(
        "%d slots of %d tokens: a cache of %s",
        fitted.num_slots,
        fitted.slot_len,
        sized(fitted.num_slots * fitted.slot_len * model.token_bytes(fitted.cache_dtype)),
    )
    return fitted


def _fit_host_cache(
    config: EngineConfig, resolved: ResolvedConfig, model: ModelShape, forward: _Sized, host: Host
) -> ResolvedConfig:
    """`resolved`, less the memory of a step, which takes gigabytes with long contexts and many threads."""
    num_step_bytes = forward.step_bytes(resolved.max_num_batched_tokens, resolved.max_batch_size, resolved.cache_tokens)
    fitted = fit_slots(config, resolved, model, host.free_bytes() - num_step_bytes)
    logger.info("a step takes up to %s", sized(num_step_bytes))
    return min(resolved, fitted, key=lambda each: each.kv_cache_memory_bytes)


def _measure_free_bytes(
    forward: _Measurable,
    config: ResolvedConfig,
    gpu: Gpu,
    num_recorded_tokens: int,
    make_sampler: Callable[[int, int, torch.device], Sampler],
) -> int:
    """The device's free bytes beside the weights, the largest step and, if there are any, graphs of such steps."""
    num_weight_bytes = gpu.begin_measuring()

    def run_step() -> None:
        logits = forward.dummy_run(config.max_num_batched_tokens, config.max_batch_size)
        make_sampler(logits.shape[1], len(logits), logits.device).dummy_run(logits)

    try:
        num_step_bytes = _peak_bytes(gpu, run_step)
        num_graph_bytes = 0
        if num_recorded_tokens:
            num_graph_bytes = _peak_bytes(gpu, lambda: forward.dummy_run(num_recorded_tokens, 1))
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{config.device} ran out of memory in a step of {config.max_num_batched_tokens} tokens beside"
            f" {sized(num_weight_bytes)} of weights; lower max_num_batched_tokens or max_batch_size"
        ) from error
    num_free_bytes, num_total_bytes = gpu.memory()
    logger.info(
        "%s: %s of %s are free beside %s of weights; a step of %d tokens needs %s of them",
        *(config.device, sized(num_free_bytes), sized(num_total_bytes), sized(num_weight_bytes)),
        *(config.max_num_batched_tokens, sized(num_step_bytes)),
    )
    if num_recorded_tokens:
        logger.info("graphs of steps of up to %d tokens keep %s", num_recorded_tokens, sized(num_graph_bytes))
    return num_free_bytes - num_step_bytes - num_graph_bytes


def _peak_bytes(gpu: Gpu, work: Callable[[], object]) -> int:
    """Bytes that `work` allocates at its peak."""
    num_bytes_before = gpu.begin_measuring()
    with gpu.current(), torch.inference_mode():
        work()
    return gpu.end_measuring() - num_bytes_before


def allocate_cache(
    kept: Sequence[Kept], states: Sequence[StateParams | None], num_slots: int, config: ResolvedConfig
) -> ContinuousBatchingKVCacheManager:
    """The cache of a resolved configuration. `ConfigurationError` if there is no memory for it.

    `kept`, `states`: what a slot keeps of each layer.
    """
    slot_len, num_layers, devices = config.slot_len, len(kept), [config.device]
    rows = states, config.num_snapshots, config.max_tentative
    size = ContinuousBatchingKVCacheManager.estimated_memory_size(kept, num_slots, slot_len, num_layers, devices, *rows)
    max_tokens = config.cache_tokens if config.is_cache_elastic else None
    try:
        cache = ContinuousBatchingKVCacheManager(kept, num_slots, slot_len, num_layers, devices, max_tokens, *rows)
    except (MemoryError, RuntimeError) as error:  # torch reports a failed allocation as a RuntimeError
        raise ConfigurationError(
            f"allocating {sized(size)} of cache failed; lower max_batch_size or max_seq_len"
        ) from error
    num_bytes = size if max_tokens is None else min(size, config.kv_cache_memory_bytes)
    how = "at once" if max_tokens is None else "as it is used"
    logger.info("cache: %d slots of %d tokens, %s taken %s", num_slots, slot_len, sized(num_bytes), how)
    layout = cache.layout.states
    if layout is not None:
        logger.info("recurrent states: %s each, and room for %d more", sized(layout.row_bytes), config.num_snapshots)
    return cache


def steps_that_fit(seconds_each: float, most: int) -> int:
    """Decode steps, from 1 to `most`, that together take about as long as a launch should."""
    return max(1, min(most, round(_LAUNCH_S / max(seconds_each, 1e-6))))
