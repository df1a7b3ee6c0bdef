"""Attention with this project's own Triton kernels on a CUDA device, which need no package but those of torch.

Rows that decode are divided into chunks by the device, so no launch depends on how long the rows are: a recorded step
serves all lengths, and rows of uneven lengths occupy the whole GPU. Prompts go to another backend if there is a faster
one.
"""

import importlib.util
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
from chairlift.device import find_compile_obstacle
from chairlift.models.attention.backend import (
    Attend,
    AttentionConfig,
    BatchMetadata,
    PaddedBatch,
    PaddingBackend,
    Projections,
    Read,
    find_head_obstacle,
)
from chairlift.models.attention.batches import attend_padded, key_lengths, prepare_apart, token_slots

if TYPE_CHECKING:
    from chairlift.kernels.decode_attention import Chunks

_HEAD_DIM_ALIGNMENT = 8
_AMPERE = (8, 0)  # compute capability of the first GPUs that the kernels were written for


def find_obstacle(head_dims: Iterable[int], device: str) -> str | None:
    """Says why these kernels cannot run a model with heads of those sizes on that device; None if they can."""
    if device == "cpu":
        return "it runs on a CUDA device, and the device is cpu"
    if obstacle := find_head_obstacle(head_dims, _HEAD_DIM_ALIGNMENT):
        return obstacle
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed, which torch's builds for CUDA bring along"
    if obstacle := find_compile_obstacle(torch.device(device)):
        return f"kernels cannot be compiled: {obstacle}"
    return None


class TritonBackend:
    """Appends to the slots and reads them in place. Slots and heads have any strides, but elements of a head are dense.

    Results depend on other rows of the batch by rounding only (`kernels/decode_attention.py`).
    """

    is_any_length = True  # see `AnyLength`

    def __init__(self, layers: Mapping[int, AttentionConfig], prompts: PaddingBackend | None = None) -> None:
        """`prompts`: computes rows of several tokens; None: a kernel of this project."""
        from chairlift.kernels import decode_attention, prefill_attention, slot_append

        self._layers = layers
        self.prompts = prompts
        self._decoding, self._prefilling, self._appending = decode_attention, prefill_attention, slot_append

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        if batch.is_decode:
            return self._prepare_decode(cache)
        if batch.num_decode_rows:
            return prepare_apart(self.prepare, batch, cache)
        return self._prepare_prefill(batch, cache) if self.prompts is None else self.prompts.prepare(batch, cache)

    def _prepare_decode(self, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        slots, positions, lengths = cache.lookup_table, cache.cache_lengths, cache.cache_lengths + 1
        plans: dict[tuple[int, int | None], Chunks] = {}

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            config = self._layers[layer_idx]
            keys, values = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
            if new.own is not None:
                self._appending.append(keys, values, *new.own, slots, positions)
            kind = keys.shape[2], config.window
            if kind not in plans:  # all layers of that kind have one
                plans[kind] = self._decoding.plan_chunks(lengths, slots, *kind)
            attended: torch.Tensor = self._decoding.attend(
                new.query, keys, values, plans[kind], scale=config.scale, softcap=config.softcap, sinks=new.sinks
            )
            return attended

        return attend

    def _prepare_prefill(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        slots, lengths = token_slots(batch, cache), key_lengths(batch, cache)

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            config = self._layers[layer_idx]
            keys, values = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
            if new.own is not None:
                self._appending.append(keys, values, *new.own, slots, batch.positions)
            attended: torch.Tensor = self._prefilling.attend(
                new.query,
                keys,
                values,
                batch.row_offsets,
                lengths,
                cache.lookup_table,
                cache.max_seq_length,
                scale=config.scale,
                window=config.window,
                softcap=config.softcap,
                sinks=new.sinks,
            )
            return attended

        return attend

    def prepare_padded(self, batch: PaddedBatch, blocks: torch.Tensor) -> Attend:
        """See `PaddingBackend`."""
        plans: dict[tuple[int, int | None], Chunks] = {}

        def decode(
            layer_idx: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            config = self._layers[layer_idx]
            kind = keys.shape[2], config.window
            if kind not in plans:  # all layers of that kind have one
                plans[kind] = self._decoding.plan_chunks(batch.decode_lengths, batch.decode_slots, *kind)
            attended: torch.Tensor = self._decoding.attend(
                query, keys, values, plans[kind], scale=config.scale, softcap=config.softcap, sinks=sinks
            )
            return attended

        return attend_padded(batch, blocks, decode, self.read_prompts(batch, blocks), self._appending.append)

    def read_prompts(self, batch: PaddedBatch, blocks: torch.Tensor) -> Read:
        """See `PaddingBackend`."""
        if self.prompts is not None:
            return self.prompts.read_prompts(batch, blocks)
        rows = batch.prompt_offsets, batch.prompt_lengths, batch.prompt_slots, batch.max_new_tokens

        def prefill(
            layer_idx: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            config = self._layers[layer_idx]
            attended: torch.Tensor = self._prefilling.attend(
                query,
                keys,
                values,
                *rows,
                scale=config.scale,
                window=config.window,
                softcap=config.softcap,
                sinks=sinks,
            )
            return attended

        return prefill
