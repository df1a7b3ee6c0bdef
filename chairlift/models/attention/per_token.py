"""Attention of each token by itself: the call's shape depends on the token's position and on nothing else.

This is what makes a batch-invariant forward pass possible: however a prompt is cut into chunks, and whoever else is in
the batch, a token's queries meet the same keys in a call of the same shape.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection
from chairlift.models.attention.batch import Attend


def attend_alone(slots: torch.Tensor, positions: torch.Tensor, cache: ContinuousBatchingKVCacheCollection) -> Attend:
    """For tokens (int64 `[T]` both) of which those of one slot come in order; the last may be repeated as padding."""
    ends = list(zip(slots.tolist(), (positions + 1).tolist(), strict=True))

    def attend(layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
        keys[slots, positions] = key
        values[slots, positions] = value
        num_kv_heads, head_dim = keys.shape[2:]
        grouped = query.view(len(ends), num_kv_heads, -1, head_dim)
        output = torch.empty_like(grouped)
        for row, (slot, end) in enumerate(ends):
            if row and ends[row - 1] == (slot, end):
                output[row] = output[row - 1]
            else:
                output[row] = scaled_dot_product_attention(
                    grouped[row : row + 1],
                    keys[slot, :end].transpose(0, 1).unsqueeze(0),
                    values[slot, :end].transpose(0, 1).unsqueeze(0),
                )[0]
        return output.view_as(query)

    return attend
