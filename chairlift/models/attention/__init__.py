"""Attention over the cache slots: one signature, several backends.

A backend's `prepare` looks at a batch once per step and returns `attend`, which every layer calls with its own
queries, keys and values: it appends keys and values to the slots in place and attends to all that each row may see.
"""

import importlib.util
import logging

import torch

from chairlift.config import AttentionBackend
from chairlift.errors import ConfigurationError
from chairlift.models.attention.batch import Attend, Backend, BatchMetadata

__all__ = ["Attend", "Backend", "BatchMetadata", "find_flash_attn", "load_backend"]

logger = logging.getLogger(__name__)

_FLASH_ATTN_2 = "flash_attn"
_FLASH_ATTN_3 = "flash_attn_interface"
_HOPPER = 9  # major compute capability of the GPUs that version 3 was written for
_CPU = torch.device("cpu")


def load_backend(name: AttentionBackend, head_dim: int, dtype: torch.dtype, device: torch.device = _CPU) -> Backend:
    """The chosen backend; its module is imported only now.

    `resolve` has seen to it that the choice fits model and device. `ConfigurationError` if its package cannot be
    imported.
    """
    if name is AttentionBackend.FLASH_ATTN:
        return _load_flash_attn(device)
    if device.type == "cuda":
        from chairlift.models.attention.torch_varlen import TorchVarlenBackend, is_varlen_available

        if is_varlen_available(head_dim, dtype):
            return TorchVarlenBackend()
        logger.info("attention: torch copies the slots of decode rows together, which costs bandwidth")
    from chairlift.models.attention.torch_sdpa import TorchBackend

    return TorchBackend(is_in_place=device.type == "cpu")


def find_flash_attn(capability: tuple[int, int]) -> str | None:
    """The module of flash-attn to use on a GPU of that compute capability: version 3 on Hopper if it is installed,
    else version 2; None if there is none. Nothing is imported."""
    wanted = (_FLASH_ATTN_3, _FLASH_ATTN_2) if capability[0] == _HOPPER else (_FLASH_ATTN_2,)
    return next((name for name in wanted if importlib.util.find_spec(name) is not None), None)


def _load_flash_attn(device: torch.device) -> Backend:
    module = find_flash_attn(torch.cuda.get_device_capability(device))
    try:
        if module == _FLASH_ATTN_3:
            from chairlift.models.attention.flash_attn_3 import FlashAttn3Backend

            return FlashAttn3Backend()
        from chairlift.models.attention.flash_attn import FlashAttnBackend

        return FlashAttnBackend()
    except ImportError as error:
        raise ConfigurationError(
            f"flash-attn cannot be imported ({error}): reinstall it for torch {torch.__version__},"
            " or choose attention_backend torch"
        ) from error
