"""Attention with flash-attn version 3 (`flash_attn_interface`), on Hopper: every batch is one ragged call.

The call appends each row's new keys and values to its slot and attends to what the slot then holds, whether the row
decodes or is prefilled.
"""

from typing import Any

import torch
from flash_attn_interface import flash_attn_with_kvcache

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.batch import Attend, BatchMetadata, view_length


class FlashAttn3Backend:
    """Strided views of the slots are taken as they are: only the last dimension must be dense."""

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """See `Backend.prepare`."""
        # The kernel does not check the capacity; `fetch` has. The view must hold the tokens that are appended.
        longest = view_length(cache)

        def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output: Any = flash_attn_with_kvcache(
                query,
                cache.get_key_cache(layer_idx)[:, :longest],
                cache.get_value_cache(layer_idx)[:, :longest],
                k=key,
                v=value,
                cache_seqlens=cache.cache_lengths,
                cache_batch_idx=cache.lookup_table,
                cu_seqlens_q=batch.row_offsets,
                cu_seqlens_k_new=batch.row_offsets,
                max_seqlen_q=cache.max_seq_length,
                causal=True,
            )
            return torch.as_tensor(output)

        return attend
