"""Drives recurrent layers on a CUDA device: all tokens of a batch in a few launches of a layer's kernels.

It reads tensors only, in fixed sizes, so that graphs can record what it launches. See `recurrence` for the order in
which a row's inputs are taken, which is the same here.
"""

import importlib.util
from functools import cache

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.device import find_compile_obstacle, to_device
from chairlift.models.attention import BatchMetadata
from chairlift.models.recurrence import Recur, Recurrent


@cache
def is_available(device: torch.device) -> bool:
    """Returns true where Triton, which the kernels are written in, is installed and can compile for the device."""
    if importlib.util.find_spec("triton") is None:
        return False
    return device.type != "cuda" or find_compile_obstacle(device) is None


def prepare(batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Recur:
    """Computes once per step what all layers share."""
    from chairlift.kernels.ragged import LayerStates, RaggedRows

    states = cache.states
    assert states is not None, "no layer has a state"
    counts = states.counts
    if counts is None:
        counts = to_device((states.num_replayed, states.num_tentative), torch.int32, states.live.device)
        if states.has_ended is not None:
            counts[1].masked_fill_(states.has_ended, 1)
    num_tokens = len(batch.positions)
    rows = RaggedRows.of(cache.lookup_table, cache.cache_lengths, batch.row_offsets, counts, num_tokens)

    def recur(layer_idx: int, inputs: torch.Tensor, block: Recurrent) -> torch.Tensor:
        place = states.place(layer_idx)
        live = states.live[:, place.offset : place.offset + place.num_elements]
        pending = states.pending[:, :, place.input_offset : place.input_offset + place.num_inputs]
        return block.advance(rows, LayerStates(live, pending), inputs)

    return recur
