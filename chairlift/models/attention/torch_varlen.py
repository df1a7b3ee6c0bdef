"""Attention with torch's own flash kernels, on a CUDA device without the package flash-attn (torch >= 2.12).

The kernels read ragged keys at offsets, a row's from the token `cu_seq_k[row]` on, and as many as `seqused_k[row]`
says. All slots of a layer are one long run of tokens for them, with the other layers' tokens in between: slot n begins
at token `n * 2 * num_layers * slot_len`, for keys as for values and in every layer.
"""

import torch
from torch.nn.attention import varlen

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.config import FLASH_HEAD_DIM_ALIGNMENT, FLASH_MAX_HEAD_DIM
from chairlift.models.attention.batch import Attend, BatchMetadata, append_tokens, key_lengths, view_length
from chairlift.models.attention.parts import prepare_apart

_CAUSAL_WINDOW = (-1, 0)
_MAX_OFFSET = torch.iinfo(torch.int32).max


def is_varlen_available(head_dim: int, dtype: torch.dtype) -> bool:
    """True if this torch has the kernels, for heads of that size in that format."""
    return (
        hasattr(varlen, "varlen_attn_out")
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim <= FLASH_MAX_HEAD_DIM
        and head_dim % FLASH_HEAD_DIM_ALIGNMENT == 0
    )


class TorchVarlenBackend:
    """Reads and writes the slots in place. Decode rows apart from prefill rows, so that kernels can split long ones."""

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """See `Backend.prepare`."""
        if 0 < batch.num_decode_rows < len(batch.slots):
            return prepare_apart(self.prepare, batch, cache)
        append = append_tokens(batch, cache)
        lengths = key_lengths(batch, cache)
        slot_stride = cache.blocks.stride(0) // cache.blocks.stride(3)  # in tokens
        # With heads of 64 bytes or more this takes a cache of a hundred gigabytes.
        assert slot_stride * cache.blocks.shape[0] <= _MAX_OFFSET, "the kernels count tokens in 32 bits"
        offsets = torch.nn.functional.pad(cache.lookup_table * slot_stride, (0, 1))  # int32 [B + 1]; the last is unused
        longest = view_length(cache)

        def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            append(layer_idx, key, value)
            output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            varlen.varlen_attn_out(
                output,
                query,
                _as_tokens(cache.get_key_cache(layer_idx)),
                _as_tokens(cache.get_value_cache(layer_idx)),
                batch.row_offsets,
                offsets,
                cache.max_seq_length,
                longest,
                window_size=_CAUSAL_WINDOW,
                enable_gqa=True,
                seqused_k=lengths,
            )
            return output

        return attend


def _as_tokens(slots: torch.Tensor) -> torch.Tensor:
    """A layer's slots `[n_slots, S, H, D]` as one run of tokens `[*, H, D]`, a view that ends with the last slot."""
    slot_stride, token_stride, head_stride, _ = slots.stride()
    num_slots, slot_len, num_heads, head_dim = slots.shape
    num_tokens = (num_slots - 1) * (slot_stride // token_stride) + slot_len
    return slots.as_strided((num_tokens, num_heads, head_dim), (token_stride, head_stride, 1))
