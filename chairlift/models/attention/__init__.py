"""Attention over the cache slots: one signature, several backends.

A backend's `prepare` looks at a batch once per step and returns `attend`, which every layer calls with its own
queries, keys and values: it appends keys and values to the slots in place and attends to all that each row may see.
"""

import torch

from chairlift.config import AttentionBackend
from chairlift.models.attention.batch import Attend, Backend, BatchMetadata

__all__ = ["Attend", "Backend", "BatchMetadata", "load_backend"]


def load_backend(name: AttentionBackend, head_dim: int, dtype: torch.dtype) -> Backend:
    """The chosen backend; its module is imported only now. ConfigurationError if it cannot serve this model."""
    if name is AttentionBackend.FLASH_ATTN:
        from chairlift.models.attention.flash_attn import FlashAttnBackend

        return FlashAttnBackend(head_dim, dtype)
    from chairlift.models.attention.torch_sdpa import TorchBackend

    return TorchBackend()
