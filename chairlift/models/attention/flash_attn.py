"""Attention with the package flash-attn, version 2, on a CUDA device.

Decode rows go through `flash_attn_with_kvcache`, which appends to the slots and reads them in place. Prefill rows are
appended first and go through `flash_attn_varlen_func`, with each slot as one page of the size of the slot. A mixed
batch is computed in its two parts: the varlen kernel would give a decode row one block of threads per head, however
long its context is.
"""

from typing import Any

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.batch import Attend, BatchMetadata, append_tokens, key_lengths, view_length
from chairlift.models.attention.parts import prepare_apart


class FlashAttnBackend:
    """Strided views of the slots are taken as they are: only the last dimension must be dense."""

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """See `Backend.prepare`."""
        if batch.is_decode:
            return _prepare_decode(cache)
        if batch.num_decode_rows:
            return prepare_apart(self.prepare, batch, cache)
        return _prepare_prefill(batch, cache)


def _prepare_decode(cache: ContinuousBatchingKVCacheCollection) -> Attend:
    # The kernel does not check the capacity; `fetch` has. The view must hold the token that is appended.
    longest = view_length(cache)

    def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output: Any = flash_attn_with_kvcache(
            query.unsqueeze(1),  # [B, 1, Hq, D]
            cache.get_key_cache(layer_idx)[:, :longest],
            cache.get_value_cache(layer_idx)[:, :longest],
            k=key.unsqueeze(1),
            v=value.unsqueeze(1),
            cache_seqlens=cache.cache_lengths,
            cache_batch_idx=cache.lookup_table,
            causal=True,
        )
        return torch.as_tensor(output).squeeze(1)

    return attend


def _prepare_prefill(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
    append = append_tokens(batch, cache)
    key_offsets = torch.nn.functional.pad(torch.cumsum(key_lengths(batch, cache), 0, dtype=torch.int32), (1, 0))
    pages = cache.lookup_table.unsqueeze(1)

    def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        append(layer_idx, key, value)
        output: Any = flash_attn_varlen_func(
            query,
            cache.get_key_cache(layer_idx),
            cache.get_value_cache(layer_idx),
            cu_seqlens_q=batch.row_offsets,
            cu_seqlens_k=key_offsets,
            max_seqlen_q=cache.max_seq_length,
            max_seqlen_k=cache.max_cache_length,
            causal=True,
            block_table=pages,
        )
        return torch.as_tensor(output)

    return attend
