"""A borrowed view of one device's cache for one batch."""

from dataclasses import dataclass

import torch

from chairlift.cache.ledger import Reservation


@dataclass(frozen=True, slots=True)
class ContinuousBatchingKVCacheCollection:
    """One device's cache as a forward pass sees it: the blocks, and where its rows live in them. Owns nothing.

    Keys and values of row i occupy `blocks[lookup_table[i], :, layer, :cache_lengths[i]]`; the forward appends after
    them. What lies beyond is stale and must never be read.
    """

    blocks: torch.Tensor  # [n_slots, 2, num_layers, max_seq_len, n_kv_heads_per_device, head_dim]
    cache_lengths: torch.Tensor  # int32 [batch], on the device: tokens committed before this forward
    lookup_table: torch.Tensor  # int32 [batch], on the device: row -> slot
    is_cache_empty: bool  # True only if every row has length 0
    max_seq_length: int  # most new tokens of any row
    max_cache_length: int  # largest length of any row after this forward
    reservation: Reservation | None = None  # the host's side of the fetch; `step` needs it

    def get_key_cache(self, layer_idx: int) -> torch.Tensor:
        """Keys of one layer: a strided view `[n_slots, max_seq_len, heads, head_dim]`, no copy."""
        return self._layer(0, layer_idx)

    def get_value_cache(self, layer_idx: int) -> torch.Tensor:
        """Values of one layer: a strided view `[n_slots, max_seq_len, heads, head_dim]`, no copy."""
        return self._layer(1, layer_idx)

    def cache_length(self, batch_idx: int) -> int:
        """Tokens of that row before this forward. Waits for the device."""
        return int(self.cache_lengths[batch_idx])

    def _layer(self, kv_idx: int, layer_idx: int) -> torch.Tensor:
        num_layers = self.blocks.shape[2]
        if not 0 <= layer_idx < num_layers:
            raise IndexError(f"layer {layer_idx} is not in [0, {num_layers})")
        return self.blocks[:, kv_idx, layer_idx]
