"""Attention over the cache slots: what a backend must offer (`backend`), what backends share (`batches`), and the
backends that use torch alone (`torch_sdpa`), flash-attn (`flash`) or Triton (`triton`).
"""

from chairlift.models.attention.backend import (
    AnyLength,
    Attend,
    AttentionConfig,
    Backend,
    BatchMetadata,
    Forward,
    PaddedBatch,
    PaddedForward,
    PaddingBackend,
    Projections,
    Read,
    find_head_obstacle,
)
from chairlift.models.attention.batches import (
    append_tokens,
    attend_padded,
    key_lengths,
    prepare_apart,
    token_slots,
    view_length,
)

__all__ = [
    "AnyLength",
    "Attend",
    "AttentionConfig",
    "Backend",
    "BatchMetadata",
    "Forward",
    "PaddedBatch",
    "PaddedForward",
    "PaddingBackend",
    "Projections",
    "Read",
    "append_tokens",
    "attend_padded",
    "find_head_obstacle",
    "key_lengths",
    "prepare_apart",
    "token_slots",
    "view_length",
]
