"""How many slots a GPU has memory for, once the weights are in it.

What a step allocates is not guessed: a step of the largest size runs once, and its peak is set aside. The cache takes
its share (`memory_fraction`) of what is then free; CUDA graphs and sampling live in the rest.
"""

import logging

import torch

from chairlift.config import EngineConfig, ModelFacts, ResolvedConfig, refit_slots
from chairlift.engine.forward import Forward, PlainForward
from chairlift.errors import ConfigurationError

logger = logging.getLogger(__name__)

_GIB = 2**30


def fit_cache(asked: EngineConfig, resolved: ResolvedConfig, model: ModelFacts, forward: Forward) -> ResolvedConfig:
    """`resolved` with as many slots as the GPU has memory for, or as were asked for; on a CPU as it is.

    `ConfigurationError` if those that were asked for do not fit, or not even one.
    """
    if resolved.device == "cpu" or not isinstance(forward, PlainForward):
        return resolved
    fitted = refit_slots(asked, resolved, model, _measure_free_bytes(forward, resolved))
    logger.info(
        "%d slots of %d tokens: %.0f%% of that for a cache of %.2f GiB",
        fitted.num_slots,
        fitted.slot_len,
        100 * fitted.memory_fraction,
        fitted.num_slots * fitted.slot_len * model.kv_elements_per_token * fitted.dtype.num_bytes / _GIB,
    )
    return fitted


def _measure_free_bytes(forward: PlainForward, config: ResolvedConfig) -> int:
    """Bytes of the device that neither the weights nor the largest step need."""
    device = config.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    num_weight_bytes = torch.cuda.memory_allocated(device)
    try:
        forward.rehearse(config.max_num_batched_tokens, config.max_batch_size)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{device} ran out of memory in a step of {config.max_num_batched_tokens} tokens beside"
            f" {num_weight_bytes / _GIB:.2f} GiB of weights; lower max_num_batched_tokens"
        ) from error
    num_step_bytes = torch.cuda.max_memory_allocated(device) - num_weight_bytes
    torch.cuda.empty_cache()
    num_free_bytes, num_total_bytes = torch.cuda.mem_get_info(device)
    logger.info(
        "%s: %.2f of %.2f GiB are free beside %.2f GiB of weights; a step of %d tokens needs %.2f GiB of them",
        device,
        num_free_bytes / _GIB,
        num_total_bytes / _GIB,
        num_weight_bytes / _GIB,
        config.max_num_batched_tokens,
        num_step_bytes / _GIB,
    )
    return num_free_bytes - num_step_bytes
