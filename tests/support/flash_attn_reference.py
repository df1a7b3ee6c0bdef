"""Says what flash-attn 2 and 3, and torch's ragged kernels, do argument by argument, in plain torch: slow, on any
device.

Written from the packages' documented semantics and the checks that their C++ makes (2.8 and 3.0 beta). Only the
arguments that Chairlift passes exist here, so passing another one fails, as does anything that the kernels refuse or,
worse, take in silence: a dtype, a stride, an index type, a row past its view, two rows that append to one slot. What is
passed as `how` are the last arguments of `attention`: it refuses others. Results of queries that belong to no row are
NaN, as the kernels leave them unwritten.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import Tensor

_PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8

DTYPES = {torch.bfloat16, torch.float16}  # that the kernels take

Functions = Mapping[str, Callable[..., Any]]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    num_splits: int,
    return_softmax_lse: bool = False,
    **how: Any,
) -> Any:
    """Version 2. `q` [B, n, Hq, D]; caches [N, S, H, D]; `k`, `v` [B, n, H, D]; `how` also has what follows.

    Returns also the logarithms of the sums of softmax, [B, Hq, n], if these are asked for.

    Row i appends its keys and values, in place, to slot `cache_batch_idx[i]` from `cache_seqlens[i]` on, and attends
    to all that the slot then holds; causal: query j of n sees all but the last n - 1 - j keys. Without `k` and `v`
    nothing is appended.
    """
    assert 0 <= num_splits <= 128  # 0: as it sees fit
    offsets = q.shape[1] * torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
    queries = q.flatten(0, 1)
    if k is None or v is None:
        output, sums = _attend_to_slots(queries, k_cache, v_cache, offsets, **how)
    else:
        assert k.shape == v.shape == (*q.shape[:2], *k_cache.shape[2:])
        keys, values = k.flatten(0, 1), v.flatten(0, 1)
        output, sums = _append_and_attend(queries, keys, values, k_cache, v_cache, (offsets, offsets), **how)
    output = output.view_as(q)
    return (output, sums.view(-1, *q.shape[:2]).transpose(0, 1)) if return_softmax_lse else output


def flash_attn_3_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int,
    num_splits: int,
    return_softmax_lse: bool = False,
    **how: Any,
) -> Any:
    """Version 3, ragged. `q` [T, Hq, D]; caches [N, S, H, D]; `k`, `v` [T, H, D].

    As version 2's, where row i's queries are `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, and its keys and values
    `cu_seqlens_k_new[i]` to `cu_seqlens_k_new[i + 1]`. The logarithms are [Hq, T], and what it accumulates follows.
    """
    capacity, num_rows = k_cache.shape[1], len(how["cache_seqlens"])
    _check_indices(num_rows + 1, cu_seqlens_q)
    _check_offsets(cu_seqlens_q, len(q), max_seqlen_q)
    assert max_seqlen_q <= capacity, "the kernel refuses more queries than the view has tokens"
    assert num_splits == (0 if max_seqlen_q == 1 else 1), "one block for a row, or room for a prompt's split results"
    if k is None or v is None or cu_seqlens_k_new is None:
        output, sums = _attend_to_slots(q, k_cache, v_cache, cu_seqlens_q, **how)
    else:
        _check_indices(num_rows + 1, cu_seqlens_k_new)
        _check_offsets(cu_seqlens_k_new, len(k), capacity)
        output, sums = _append_and_attend(q, k, v, k_cache, v_cache, (cu_seqlens_q, cu_seqlens_k_new), **how)
    return (output, sums, None, None) if return_softmax_lse else output


def _append_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    offsets: tuple[Tensor, Tensor],  # of each row's queries, and of its keys and values
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    num_slots, capacity, num_kv_heads, head_dim = k_cache.shape
    _check_tensors(k, v)
    assert k.shape == v.shape == (len(k), num_kv_heads, head_dim)
    _check_indices(len(offsets[1]) - 1, cache_seqlens, cache_batch_idx)
    assert all(0 <= slot < num_slots for slot in cache_batch_idx), "the kernel would write another tensor's memory"
    slots = [slot for slot in cache_batch_idx.tolist() if slot < num_slots - 1]  # the last may be for padding
    assert len(set(slots)) == len(slots), "rows of one slot race in the kernel"
    lengths = cache_seqlens + offsets[1].diff()
    for row, (slot, length) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        start, stop = offsets[1][row : row + 2].tolist()
        end = int(lengths[row])
        assert length >= 0, "lengths count from 0"
        assert end <= capacity, "the kernel would write past the view"
        k_cache[slot, length:end] = k[start:stop]
        v_cache[slot, length:end] = v[start:stop]
    rows = {"cache_seqlens": lengths, "cache_batch_idx": cache_batch_idx}
    return _attend_to_slots(q, k_cache, v_cache, offsets[0], **rows, **how)


def _attend_to_slots(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    offsets: Tensor,  # of each row's queries
    *,
    cache_seqlens: Tensor,
    cache_batch_idx: Tensor,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    num_slots, capacity, _, _ = k_cache.shape
    _check_tensors(q, k_cache, v_cache)
    _check_heads(q, k_cache, v_cache)
    _check_indices(len(offsets) - 1, cache_seqlens, cache_batch_idx)
    output, sums = _unwritten(q)
    for row, (slot, length) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        start, stop = offsets[row : row + 2].tolist()
        assert 0 <= slot < num_slots, "the kernel would read another tensor's memory"
        assert stop - start <= length <= capacity, "the kernel would read past the view"
        keys, values = k_cache[slot, :length], v_cache[slot, :length]
        output[start:stop], sums[:, start:stop] = attention(q[start:stop], keys, values, **how)
    return output, sums


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    block_table: Tensor,
    return_attn_probs: bool = False,
    **how: Any,
) -> Any:
    """Version 2. `q` [T, Hq, D]; `k`, `v` pages [N, P, H, D]; `block_table` [B, pages]: which hold each row's keys.

    Row i's queries are `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`; of its pages, end to end, it sees the first
    `cu_seqlens_k[i + 1] - cu_seqlens_k[i]` tokens. Nothing is appended. With probabilities, which do not exist without
    dropout, come the logarithms of the sums of softmax, [Hq, T].
    """
    num_rows = len(cu_seqlens_q) - 1
    num_pages, page_size, _, _ = k.shape
    _check_tensors(q, k, v)
    _check_heads(q, k, v)
    _check_indices(num_rows + 1, cu_seqlens_q, cu_seqlens_k)
    _check_offsets(cu_seqlens_q, len(q), max_seqlen_q)
    assert page_size % _PAGE_MULTIPLE == 0, "the page size must be a multiple of 256"
    assert block_table.dtype == torch.int32, f"indices must be int32, not {block_table.dtype}"
    assert block_table.shape[0] == num_rows
    assert block_table.stride(-1) == 1, "the last dimension must be dense"
    assert cu_seqlens_k[0] == 0, "offsets begin at 0"
    output, sums = _unwritten(q)
    for row, pages in enumerate(block_table.tolist()):
        assert all(0 <= page < num_pages for page in pages), "the kernel would read another tensor's memory"
        start, stop = cu_seqlens_q[row : row + 2].tolist()
        length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert stop - start <= length <= min(max_seqlen_k, page_size * len(pages))
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        output[start:stop], sums[:, start:stop] = attention(q[start:stop], keys, values, **how)
    return (output, sums, None) if return_attn_probs else output


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` with ragged keys at offsets.

    `query` [T, Hq, D]; `key`, `value` [K, H, D]. Row i sees `seqused_k[i]` keys from `cu_seq_k[i]` on.

    A window of 0 keys ahead is causal. A call that only decodes, without a window, must not be: see `_varlen_window`.
    """
    num_rows = len(cu_seq_q) - 1
    _check_tensors(query, key, value)
    _check_indices(num_rows + 1, cu_seq_q, cu_seq_k)
    _check_indices(num_rows, seqused_k)
    out = torch.full_like(query, torch.nan)
    assert enable_gqa or query.shape[1] == key.shape[1]
    is_whole = window_size == (-1, -1)
    assert is_whole or window_size[1] == 0
    assert is_whole == (max_q == 1 and window_size[0] == -1), "neither groups of heads as rows nor split keys"
    _check_offsets(cu_seq_q, len(query), max_q)
    for row, (offset, length) in enumerate(zip(cu_seq_k[:-1].tolist(), seqused_k.tolist(), strict=True)):
        start, stop = cu_seq_q[row : row + 2].tolist()
        assert stop - start <= length <= max_k
        assert 0 <= offset <= offset + length <= len(key), "the kernel would read another tensor's memory"
        keys, values = key[offset : offset + length], value[offset : offset + length]
        out[start:stop], _ = attention(
            query[start:stop], keys, values, causal=False, softmax_scale=scale, softcap=0.0, window_size=window_size
        )
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, softcap: float, window_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """softmax(c tanh(s q k / c)) v in float32; c of 0: no cap. `q` [n, Hq, D], `k` and `v` [m, H, D].

    Returns that and the logarithms of the sums of softmax, float32 [Hq, n].

    The last query stands at the last key. A query sees as many keys before and behind its own as the window says (-1:
    all); causal: none behind. Query head h attends to key head `h // (Hq / H)`.
    """
    group_size = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    before, behind = window_size[0], 0 if causal else window_size[1]
    ages = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    if behind >= 0:
        scores = scores.masked_fill(ages < -behind, -torch.inf)
    if before >= 0:
        scores = scores.masked_fill(ages > before, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), values).to(q.dtype), scores.logsumexp(dim=-1)


def _unwritten(q: Tensor) -> tuple[Tensor, Tensor]:
    """Results and logarithms of sums that no row has written."""
    return torch.full_like(q, torch.nan), torch.full(q.shape[1::-1], torch.nan, device=q.device)


VERSION_3: Functions = {"flash_attn_with_kvcache": flash_attn_3_with_kvcache}


@contextmanager
def installed() -> Iterator[None]:
    """Lets `import flash_attn` and `import flash_attn_interface` find these functions."""
    functions: tuple[Callable[..., Any], ...] = (flash_attn_with_kvcache, flash_attn_varlen_func)
    version_2 = {function.__name__: function for function in functions}
    with module("flash_attn", version_2), module("flash_attn_interface", VERSION_3):
        yield


@contextmanager
def module(name: str, functions: Mapping[str, Any] | None) -> Iterator[None]:
    """That module holds these functions; None: it is not installed."""
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__dict__.update(functions or {})
    with pytest.MonkeyPatch.context() as patch:  # None is what the import system has for what is not to be found
        patch.setitem(sys.modules, name, made if functions is not None else cast("ModuleType", None))
        yield


def _check_tensors(q: Tensor, *others: Tensor) -> None:
    for tensor in (q, *others):
        assert tensor.dtype in DTYPES, f"the kernels do not take {tensor.dtype}"
        assert tensor.dtype == q.dtype, "all tensors must have one dtype"
        assert tensor.device == q.device, "all tensors must be on one device"
        assert tensor.stride(-1) == 1, "the last dimension must be dense"


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    head_dim = q.shape[-1]
    assert k.shape == v.shape
    assert k.shape[-1] == head_dim <= _MAX_HEAD_DIM
    assert head_dim % _HEAD_DIM_MULTIPLE == 0
    assert q.shape[-2] % k.shape[-2] == 0, "query heads must share key heads evenly"


def _check_indices(length: int, *indices: Tensor) -> None:
    for index in indices:
        assert index.dtype == torch.int32, f"indices must be int32, not {index.dtype}"
        assert index.is_contiguous(), "indices must be contiguous"
        assert index.shape == (length,)


def _check_offsets(offsets: Tensor, num_tokens: int, longest: int) -> None:
    assert offsets[0] >= 0, "offsets count from 0"
    assert offsets[-1] == num_tokens, "offsets end with the last token"
    lengths = offsets.diff()
    assert lengths.min() >= 0, "offsets do not go back"
    assert lengths.max() <= longest
