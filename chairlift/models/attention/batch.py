"""What a forward pass knows of its batch, and what an attention backend must offer.

Tokens of all rows lie end to end, decode rows first:

    tokens       | d0 | d1 | d2 | p3 p3 p3 p3 | p4 p4 |        T = num_tokens
    row_offsets  0    1    2    3             7       9        B + 1
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from chairlift.cache.collection import ContinuousBatchingKVCacheCollection

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`attend(layer_idx, query [T, Hq, D], key [T, Hkv, D], value [T, Hkv, D]) -> [T, Hq, D]`; appends key and value."""


@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """Where each row's tokens lie, on the device and (known ahead without asking the device) on the host."""

    row_offsets: torch.Tensor  # int32 [B + 1]
    positions: torch.Tensor  # int64 [T]: of each token in its sequence
    slots: tuple[int, ...]  # row -> slot
    num_new_tokens: tuple[int, ...]  # row -> tokens in this step
    num_cached_tokens: tuple[int, ...]  # row -> tokens in its slot before this step
    num_decode_rows: int  # the first rows, of one new token each


class Backend(Protocol):
    """An attention implementation, bound to a model's shape."""

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        """Does once per step what all layers share."""
        ...


def token_slots(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> torch.Tensor:
    """The slot of each token: int64 `[T]`, on the device."""
    row_lengths = batch.row_offsets[1:] - batch.row_offsets[:-1]
    num_tokens = batch.positions.shape[0]
    return torch.repeat_interleave(cache.lookup_table.long(), row_lengths, output_size=num_tokens)
