"""Attention with the package flash-attn, on a CUDA device.

Decode rows go through `flash_attn_with_kvcache`, which appends to the slots and reads them in place. Mixed batches
append first and go through `flash_attn_varlen_func`, with each slot as one page of the size of the slot.
"""

from typing import Any

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.errors import ConfigurationError
from chairlift.models.attention.batch import Attend, BatchMetadata, token_slots

MAX_HEAD_DIM = 256
_LENGTH_BUCKET = 256  # split-KV heuristics look at the capacity, so a view ends soon after the longest row


class FlashAttnBackend:
    """Strided views of the slots are taken as they are: only the last dimension must be dense."""

    def __init__(self, head_dim: int, dtype: torch.dtype) -> None:
        if dtype not in (torch.bfloat16, torch.float16):
            raise ConfigurationError(f"flash_attn computes in bfloat16 or float16, not {dtype}; choose one as dtype")
        if head_dim > MAX_HEAD_DIM or head_dim % 8:
            raise ConfigurationError(
                f"flash_attn takes a head_dim up to {MAX_HEAD_DIM} and divisible by 8, not {head_dim};"
                " choose attention_backend torch"
            )

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """See `Backend.prepare`."""
        if batch.num_decode_rows == len(batch.slots):
            return _prepare_decode(cache)
        return _prepare_varlen(batch, cache)


def _prepare_decode(cache: ContinuousBatchingKVCacheCollection) -> Attend:
    # The kernel does not check the capacity; `fetch` has. The view must hold the token that is appended.
    longest = min(-(-cache.max_cache_length // _LENGTH_BUCKET) * _LENGTH_BUCKET, cache.blocks.shape[3])

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


def _prepare_varlen(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
    slots, positions = token_slots(batch, cache), batch.positions
    lengths = cache.cache_lengths + batch.row_offsets[1:] - batch.row_offsets[:-1]
    key_offsets = torch.nn.functional.pad(torch.cumsum(lengths, 0, dtype=torch.int32), (1, 0))

    def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key_cache, value_cache = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
        key_cache[slots, positions] = key
        value_cache[slots, positions] = value
        output: Any = flash_attn_varlen_func(
            query,
            key_cache,
            value_cache,
            cu_seqlens_q=batch.row_offsets,
            cu_seqlens_k=key_offsets,
            max_seqlen_q=cache.max_seq_length,
            max_seqlen_k=cache.max_cache_length,
            causal=True,
            block_table=cache.lookup_table.unsqueeze(1),
        )
        return torch.as_tensor(output)

    return attend
