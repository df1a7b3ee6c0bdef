"""Facts about this machine: the device, the number formats that it multiplies natively, and memory.

On a GPU, the cache is sized once the weights are loaded. What a step allocates is measured: a step of the largest size
runs once, from tokens to sampling with penalties and log-probabilities, and its peak is reserved; the cache takes its
share of the rest, and CUDA graphs use what is left.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Protocol, runtime_checkable

import psutil
import torch

from chairlift.cache import ContinuousBatchingKVCacheManager
from chairlift.cache.layout import Kept, StateParams
from chairlift.cache.memory import can_map
from chairlift.config import DType, EngineConfig, ResolvedConfig
from chairlift.device import on_device
from chairlift.engine.execution.resolver import MachineFacts, fit_slots
from chairlift.engine.sampling.sampler import Sampler
from chairlift.errors import ConfigurationError, sized
from chairlift.models.attention import Forward
from chairlift.models.config import ModelShape
from chairlift.models.cpu.processor import find_drawback, wanted_level

logger = logging.getLogger(__name__)

_AMPERE = (8, 0)  # compute capability of the first GPUs that multiply bfloat16
_LAUNCH_S = 0.002  # of decode steps in a launch: a new request waits for them, and the host's work overlaps with them
_CGROUP = Path("/sys/fs/cgroup")  # of version 2; version 1 has a folder for each controller
_CGROUP_FILES = (
    (_CGROUP / "memory.max", _CGROUP / "memory.current"),
    (_CGROUP / "memory/memory.limit_in_bytes", _CGROUP / "memory/memory.usage_in_bytes"),
)
_OWN_CGROUPS = Path("/proc/self/cgroup")  # lines of a number, controllers (none: version 2) and a path
_QUOTA_FILES = {"": ("cpu.max",), "cpu": ("cpu.cfs_quota_us", "cpu.cfs_period_us")}


def inspect_machine(device: str) -> MachineFacts:
    """Facts about the named device ("auto": the first GPU, else the CPU).

    ConfigurationError if there is no such device, or if $CHAIRLIFT_CPU_LEVEL names a level that the CPU lacks.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        wanted_level()  # raises if it names a level that the processor lacks
        return MachineFacts(
            device="cpu",
            fast_dtypes=_fast_cpu_dtypes(),
            free_bytes=_free_memory(),
            has_elastic_memory=can_map(torch.device("cpu")),
            num_threads=choose_num_threads(),
            cpu_drawback=find_drawback(),
        )
    match = re.fullmatch(r"cuda(?::([0-9]+))?", device)
    if match is None:
        raise ConfigurationError(f"device {device!r} is not supported; choose cpu or cuda:0")
    index, num_gpus = int(match[1] or 0), torch.cuda.device_count()
    if index >= num_gpus:
        raise ConfigurationError(f"there is no device cuda:{index}; this machine has {num_gpus} CUDA devices")
    has_bfloat16 = torch.cuda.get_device_capability(index) >= _AMPERE
    return MachineFacts(
        device=f"cuda:{index}",
        fast_dtypes=frozenset(DType) if has_bfloat16 else frozenset({DType.FLOAT32, DType.FLOAT16}),
        free_bytes=torch.cuda.mem_get_info(index)[0],
        num_threads=choose_num_threads(),
    )


def _free_memory() -> int:
    """Bytes that this process may still allocate, on the machine or within its container's limit."""
    free = [psutil.virtual_memory().available]
    for limit, usage in _CGROUP_FILES:
        if limit.exists() and usage.exists() and limit.read_text().strip().isdecimal():
            free.append(max(0, int(limit.read_text()) - int(usage.read_text())))
    return min(free)


def choose_num_threads() -> int:
    """One thread per physical core that this process may use, unless OMP_NUM_THREADS says otherwise."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and int(wanted):  # an earlier engine may have changed torch's own count
        return int(wanted)
    num_usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or num_usable, num_usable, _cpu_quota()))


def _cpu_quota() -> int:
    """Whole CPUs whose time this process may use; a large number without a quota. More threads would be throttled.

    Quotas of all enclosing groups apply. If a container sees its own group as the root, the path of its group may not
    exist there, and the root's quota applies.
    """
    quotas = [sys.maxsize]
    for line in _OWN_CGROUPS.read_text().splitlines() if _OWN_CGROUPS.exists() else ():
        _, controllers, path = line.split(":", 2)
        for controller in _QUOTA_FILES.keys() & controllers.split(","):
            root = _CGROUP / controller
            folders = [root, *(root / part for part in accumulate(Path(path).parts[1:], os.path.join))]
            quotas += filter(None, (_read_quota(folder, _QUOTA_FILES[controller]) for folder in folders))
    return min(quotas)


def _read_quota(folder: Path, names: Sequence[str]) -> int | None:
    """The whole CPUs that a quota grants, at least 1. None: the quota is "max" or -1, or there is no such file."""
    words = " ".join((folder / name).read_text() for name in names if (folder / name).exists()).split()
    return max(1, int(words[0]) // int(words[1])) if len(words) == 2 and words[0].isdecimal() else None


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
class _Rehearsable(Forward, Protocol):
    """A forward whose largest step can be run without a cache."""

    def rehearse(self, num_tokens: int, num_rows: int) -> torch.Tensor: ...


def fit_cache(
    config: EngineConfig,
    resolved: ResolvedConfig,
    model: ModelShape,
    forward: Forward,
    least: Callable[[int], int] = int,
) -> ResolvedConfig:
    """`resolved`, with as many slots as there is memory for beside the loaded model and a step.

    `least`: maps this rank's number to the lowest of all ranks.
    `ConfigurationError` if the slots that `config` asks for, or a single one, do not fit.
    """
    if isinstance(forward, _Sized):
        return _fit_host_cache(config, resolved, model, forward)
    if resolved.device == "cpu" or not isinstance(forward, _Rehearsable):
        return resolved
    fitted = fit_slots(config, resolved, model, least(_measure_free_bytes(forward, resolved)))
    logger.info(
        "%d slots of %d tokens: a cache of %s",
        fitted.num_slots,
        fitted.slot_len,
        sized(fitted.num_slots * fitted.slot_len * model.token_bytes(fitted.dtype)),
    )
    return fitted


def _fit_host_cache(
    config: EngineConfig, resolved: ResolvedConfig, model: ModelShape, forward: _Sized
) -> ResolvedConfig:
    """`resolved`, less the memory of a step, which takes gigabytes with long contexts and many threads."""
    num_step_bytes = forward.step_bytes(resolved.max_num_batched_tokens, resolved.max_batch_size, resolved.cache_tokens)
    fitted = fit_slots(config, resolved, model, _free_memory() - num_step_bytes)
    logger.info("a step takes up to %s", sized(num_step_bytes))
    return min(resolved, fitted, key=lambda each: each.kv_cache_memory_bytes)


def _measure_free_bytes(forward: _Rehearsable, config: ResolvedConfig) -> int:
    """The device's free bytes beside the weights and the largest step."""
    device = config.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    num_weight_bytes = torch.cuda.memory_allocated(device)
    try:
        with on_device(torch.device(device)), torch.inference_mode():
            logits = forward.rehearse(config.max_num_batched_tokens, config.max_batch_size)
            Sampler(logits.shape[1], len(logits), logits.device).rehearse(logits)
            del logits
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{device} ran out of memory in a step of {config.max_num_batched_tokens} tokens beside"
            f" {sized(num_weight_bytes)} of weights; lower max_num_batched_tokens or max_batch_size"
        ) from error
    num_step_bytes = torch.cuda.max_memory_allocated(device) - num_weight_bytes
    torch.cuda.empty_cache()
    num_free_bytes, num_total_bytes = torch.cuda.mem_get_info(device)
    logger.info(
        "%s: %s of %s are free beside %s of weights; a step of %d tokens needs %s of them",
        *(device, sized(num_free_bytes), sized(num_total_bytes), sized(num_weight_bytes)),
        *(config.max_num_batched_tokens, sized(num_step_bytes)),
    )
    return num_free_bytes - num_step_bytes


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
