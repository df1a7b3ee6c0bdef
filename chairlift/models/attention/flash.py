"""Attention with flash kernels on a CUDA device: those of the package flash-attn (2, or 3 on Hopper), or torch's own.

All read the slots in place, as strided views whose last dimension is dense. None checks the capacity of a slot: `fetch`
does. A mixed batch takes a call for its decode rows and one for its prefill rows. In one ragged call versions other
than 3 would give a decode row one block of threads per head, however long its context is. Version 3 splits keys there,
too, but reserves results of all queries for as many splits as one row could have: for prompts, gigabytes.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from chairlift.cache import ContinuousBatchingKVCacheCollection
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
from chairlift.models.attention.batches import (
    append_tokens,
    attend_padded,
    key_lengths,
    prepare_apart,
    view_length,
    without_sinks,
)
from chairlift.models.attention.flash_builds import (
    HEAD_DIM_ALIGNMENT,
    Demands,
    find_flash_attn,
    is_version_2_installed,
    is_version_3,
)
from chairlift.models.attention.sinks import join_sinks

PAGE_SIZE = 256  # flash-attn 2 reads a slot as a page, whose size must be a multiple of this

_MAX_OFFSET = torch.iinfo(torch.int32).max
_SPLITS_AS_IT_SEES_FIT = 0
_RETURNS_SUMS = "return_softmax_lse"


def load_flash_attn(layers: Mapping[int, AttentionConfig], demands: Demands, device: torch.device) -> PaddingBackend:
    """The installed version for that device, of which there must be one, or both. ImportError if it does not load."""
    module = find_flash_attn(torch.cuda.get_device_capability(device), demands)
    if module is None or not is_version_3(module):
        return FlashAttnBackend(layers)
    return FlashAttn3Backend(layers, module, FlashAttnBackend(layers) if is_version_2_installed() else None)


def is_varlen_available(head_dims: Iterable[int], dtype: torch.dtype, *, has_softcap: bool = False) -> bool:
    """True if this torch has ragged flash kernels (2.12) for such heads in that format without a soft cap.

    `varlen_attn_out` came with them. It is not used: according to its source it writes into a copy of `out` where the
    heads of a group are rows.
    """
    is_taken = not has_softcap and dtype in (torch.bfloat16, torch.float16)
    if not is_taken or find_head_obstacle(head_dims, HEAD_DIM_ALIGNMENT):
        return False
    from torch.nn.attention import varlen

    return hasattr(varlen, "varlen_attn_out")


class FlashAttnBackend:
    """Version 2. Its decode call appends to the slots; prefill appends separately, and reads slots as pages."""

    def __init__(self, layers: Mapping[int, AttentionConfig]) -> None:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        options = _options(layers)
        # Results beside the sums: probabilities, which without dropout are empty.
        self._attend_to_pages = partial(_attend, flash_attn_varlen_func, "return_attn_probs", options)
        self._attend_to_slots = partial(_attend, _one_query_each(flash_attn_with_kvcache), _RETURNS_SUMS, options)

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        if batch.is_decode:
            return self._prepare_decode(cache)
        if batch.num_decode_rows:
            return prepare_apart(self.prepare, batch, cache)
        return self._prepare_prefill(batch, cache)

    def _prepare_decode(self, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        longest = view_length(cache)  # holds the token that is appended, too
        # To split a single page between blocks of threads takes longer (140 tokens on an H200: 9.9 instead of 8.3 us).
        num_splits = 1 if longest == PAGE_SIZE else _SPLITS_AS_IT_SEES_FIT

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            key, value = _own(new)
            return self._attend_to_slots(
                layer_idx,
                new.query,
                cache.get_key_cache(layer_idx)[:, :longest],
                cache.get_value_cache(layer_idx)[:, :longest],
                new.sinks,
                k=key.unsqueeze(1),
                v=value.unsqueeze(1),
                cache_seqlens=cache.cache_lengths,
                cache_batch_idx=cache.lookup_table,
                num_splits=num_splits,
            )

        return attend

    def _prepare_prefill(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        append = append_tokens(batch, cache)
        key_offsets = torch.nn.functional.pad(torch.cumsum(key_lengths(batch, cache), 0, dtype=torch.int32), (1, 0))
        pages = cache.lookup_table.unsqueeze(1)

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            append(layer_idx, *_own(new))
            return self._attend_to_pages(
                layer_idx,
                new.query,
                cache.get_key_cache(layer_idx),
                cache.get_value_cache(layer_idx),
                new.sinks,
                cu_seqlens_q=batch.row_offsets,
                cu_seqlens_k=key_offsets,
                max_seqlen_q=cache.max_seq_length,
                max_seqlen_k=cache.max_cache_length,
                block_table=pages,
            )

        return attend

    def prepare_padded(self, batch: PaddedBatch, blocks: torch.Tensor) -> Attend:
        """See `PaddingBackend`."""
        return attend_padded(batch, blocks, self.read_decode_rows(batch), self.read_prompts(batch, blocks))

    def read_decode_rows(self, batch: PaddedBatch) -> Read:
        """The attention of a padded step's rows that decode, whose tokens have been appended."""

        return partial(
            self._attend_to_slots,
            cache_seqlens=batch.decode_lengths,
            cache_batch_idx=batch.decode_slots,
            num_splits=_SPLITS_AS_IT_SEES_FIT,
        )

    def read_prompts(self, batch: PaddedBatch, blocks: torch.Tensor) -> Read:
        """See `PaddingBackend`."""
        key_offsets = torch.nn.functional.pad(torch.cumsum(batch.prompt_lengths, 0, dtype=torch.int32), (1, 0))
        return partial(
            self._attend_to_pages,
            cu_seqlens_q=batch.prompt_offsets,
            cu_seqlens_k=key_offsets,
            max_seqlen_q=batch.max_new_tokens,
            max_seqlen_k=blocks.shape[3],
            block_table=batch.prompt_slots.unsqueeze(1),
        )


class FlashAttn3Backend:
    """Version 3: a ragged call appends to the slots and attends to what they then hold.

    It is the fastest for prompts, and slower than version 2 for rows that decode, unless their lengths are uneven.
    """

    def __init__(
        self,
        layers: Mapping[int, AttentionConfig],
        module: str = "flash_attn_interface",
        version_2: FlashAttnBackend | None = None,
    ) -> None:
        """`module`: the build's name; `version_2`: takes rows that decode, if it is there."""
        kernel: Any = importlib.import_module(module).flash_attn_with_kvcache
        self._attend_to_slots = partial(_attend, kernel, _RETURNS_SUMS, _options(layers))
        self._version_2 = version_2

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        if 0 < batch.num_decode_rows < len(batch.slots):
            return prepare_apart(self.prepare, batch, cache)
        if batch.is_decode and self._version_2 is not None:
            return self._version_2.prepare(batch, cache)
        longest = view_length(cache)  # holds the tokens that are appended, too

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            key, value = _own(new)
            return self._attend_to_slots(
                layer_idx,
                new.query,
                cache.get_key_cache(layer_idx)[:, :longest],
                cache.get_value_cache(layer_idx)[:, :longest],
                new.sinks,
                k=key,
                v=value,
                cache_seqlens=cache.cache_lengths,
                cache_batch_idx=cache.lookup_table,
                cu_seqlens_q=batch.row_offsets,
                cu_seqlens_k_new=batch.row_offsets,
                max_seqlen_q=cache.max_seq_length,
                num_splits=_splits_of(cache.max_seq_length),
            )

        return attend

    def prepare_padded(self, batch: PaddedBatch, blocks: torch.Tensor) -> Attend:
        """See `PaddingBackend`."""
        if self._version_2 is not None:
            decode = self._version_2.read_decode_rows(batch)
        else:
            each_row = torch.arange(len(batch.decodes) + 1, dtype=torch.int32, device=blocks.device)
            decode = self._read_rows(batch.decode_slots, batch.decode_lengths, each_row, 1)
        return attend_padded(batch, blocks, decode, self.read_prompts(batch, blocks))

    def read_prompts(self, batch: PaddedBatch, blocks: torch.Tensor) -> Read:  # noqa: ARG002
        """See `PaddingBackend`."""
        return self._read_rows(batch.prompt_slots, batch.prompt_lengths, batch.prompt_offsets, batch.max_new_tokens)

    def _read_rows(self, slots: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, most: int) -> Read:
        """Attends to what slots hold, for rows of up to `most` tokens."""
        return partial(
            self._attend_to_slots,
            cache_seqlens=lengths,
            cache_batch_idx=slots,
            cu_seqlens_q=offsets,
            max_seqlen_q=most,
            num_splits=_splits_of(most),
        )


def _attend(
    kernel: Callable[..., Any],
    returns_sums: str,
    options: Mapping[int, dict[str, Any]],
    layer_idx: int,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    **how: Any,
) -> torch.Tensor:
    """Attends with the queries of all rows, and joins the layer's sinks: `[T, Hq, D] -> [T, Hq, D]`

    `returns_sums`: asks the kernel for the logarithms of the sums `[Hq, T]`, too, behind which there may be more.
    """
    if sinks is None:
        return torch.as_tensor(kernel(query, keys, values, causal=True, **options[layer_idx], **how))
    output, sums, *_ = kernel(query, keys, values, causal=True, **{returns_sums: True}, **options[layer_idx], **how)
    return join_sinks(output, sums, sinks)


def _one_query_each(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Makes version 2's function for rows `[B, T, Hq, D]` one for rows of one query, `[B, Hq, D]`."""

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: Any) -> Any:
        result = kernel(query.unsqueeze(1), keys, values, **how)
        if isinstance(result, torch.Tensor):
            return result.squeeze(1)
        output, sums = result  # [B, 1, Hq, D], [B, Hq, 1]
        return output.squeeze(1), sums.squeeze(2).T

    return attend


def _own(new: Projections) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer that these kernels take."""
    assert new.own is not None, "models with layers that read the keys of others are refused"
    return new.own


def _splits_of(most_queries: int) -> int:
    """Parts that version 3 divides the keys of rows of up to so many tokens into: prompts make enough blocks."""
    return _SPLITS_AS_IT_SEES_FIT if most_queries == 1 else 1


class TorchVarlenBackend:
    """Torch's own kernels, which read ragged keys at offsets: row i's `seqused_k[i]` keys from token `cu_seq_k[i]` on.

    All slots of a layer are one long run of tokens for them, with the other layers' tokens, which must be of the same
    size, in between: slot n begins at token `n * 2 * num_layers * slot_len`, for keys as for values and in every layer.
    """

    def __init__(self, layers: Mapping[int, AttentionConfig]) -> None:
        assert all(each.softcap is None for each in layers.values()), "these kernels have no soft cap"
        self._layers = layers

    def prepare(self, batch: BatchMetadata, cache: ContinuousBatchingKVCacheCollection) -> Attend:
        if 0 < batch.num_decode_rows < len(batch.slots):
            return prepare_apart(self.prepare, batch, cache)
        append = append_tokens(batch, cache)
        rows = _slot_offsets(cache.blocks, cache.lookup_table), key_lengths(batch, cache), batch.row_offsets
        read = self._read_rows(*rows, cache.max_seq_length, view_length(cache))

        def attend(layer_idx: int, new: Projections) -> torch.Tensor:
            append(layer_idx, *_own(new))
            keys, values = cache.get_key_cache(layer_idx), cache.get_value_cache(layer_idx)
            return read(layer_idx, new.query, keys, values, new.sinks)

        return attend

    def prepare_padded(self, batch: PaddedBatch, blocks: torch.Tensor) -> Attend:
        """See `PaddingBackend`."""
        each_row = torch.arange(len(batch.decodes) + 1, dtype=torch.int32, device=blocks.device)
        decode_rows = _slot_offsets(blocks, batch.decode_slots), batch.decode_lengths, each_row
        decode = self._read_rows(*decode_rows, 1, blocks.shape[3])
        return attend_padded(batch, blocks, decode, self.read_prompts(batch, blocks))

    def read_prompts(self, batch: PaddedBatch, blocks: torch.Tensor) -> Read:
        """See `PaddingBackend`."""
        rows = _slot_offsets(blocks, batch.prompt_slots), batch.prompt_lengths, batch.prompt_offsets
        return self._read_rows(*rows, batch.max_new_tokens, blocks.shape[3])

    def _read_rows(
        self, key_offsets: torch.Tensor, lengths: torch.Tensor, offsets: torch.Tensor, most: int, longest: int
    ) -> Read:
        """Attends to what slots hold, up to `longest` tokens, for rows of up to `most` tokens."""
        from torch.nn.attention import varlen

        def read(layer_idx: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            output = varlen.varlen_attn(
                query,
                _as_tokens(keys),
                _as_tokens(values),
                offsets,
                key_offsets,
                most,
                longest,
                scale=self._layers[layer_idx].scale,
                window_size=_varlen_window(self._layers[layer_idx].window, most),
                enable_gqa=True,
                seqused_k=lengths,
            )
            assert isinstance(output, torch.Tensor), "nothing else was asked for"
            return output

        return without_sinks(read)


def _slot_offsets(blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The tokens of a layer before those of each slot, int32 `[B]`: int32 `[B + 1]`, of which the last is unused."""
    slot_stride = blocks.stride(0) // blocks.stride(3)  # in tokens
    # With heads of 64 bytes or more, only a cache of a hundred gigabytes exceeds this.
    assert slot_stride * blocks.shape[0] <= _MAX_OFFSET, "the kernels count tokens in 32 bits"
    return torch.nn.functional.pad(slots * slot_stride, (0, 1))


def _varlen_window(window: int | None, most_queries: int) -> tuple[int, int]:
    """Tokens back and ahead, as torch's ragged kernels take them (-1: all), for rows of up to so many queries.

    A row's only query sees all keys, its own being the last, and must not be called causal: only without any window the
    kernels take the heads of a group as rows of one product, and split the keys of long rows between blocks.
    """
    return (-1, -1) if window is None and most_queries == 1 else (_tokens_back(window), 0)


def _options(layers: Mapping[int, AttentionConfig]) -> dict[int, dict[str, Any]]:
    """By layer: what flash-attn calls the scale, the soft cap (0: none) and the window (tokens back, tokens ahead)."""
    return {
        layer_idx: {
            "softmax_scale": config.scale,
            "softcap": config.softcap or 0.0,
            "window_size": (_tokens_back(config.window), -1 if config.window is None else 0),
        }
        for layer_idx, config in layers.items()
    }


def _tokens_back(window: int | None) -> int:
    """Keys that a query sees before its own; -1: all."""
    return -1 if window is None else window - 1


def _as_tokens(slots: torch.Tensor) -> torch.Tensor:
    """A layer's slots `[n_slots, S, H, D]` as one run of tokens `[*, H, D]`, a view that ends with the last slot."""
    slot_stride, token_stride, head_stride, _ = slots.stride()
    num_slots, slot_len, num_heads, head_dim = slots.shape
    num_tokens = (num_slots - 1) * (slot_stride // token_stride) + slot_len
    return slots.as_strided((num_tokens, num_heads, head_dim), (token_stride, head_stride, 1))
