"""What the functions of flash-attn 2 and 3 do, argument by argument, in plain torch: slow, on any device.

Written from the packages' documented semantics and the checks that their C++ makes (2.8 and 3.0 beta). Only the
arguments that Chairlift passes exist here, so passing another one fails, as does anything that the kernels refuse or,
worse, take in silence: a dtype, a stride, an index type, a row past its view, two rows of one slot.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, cast

import pytest
import torch

_PAGE_MULTIPLE = 256
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cache_batch_idx: torch.Tensor,
    causal: bool,
    softmax_scale: float,
    softcap: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Version 2. `q` [B, n, Hq, D]; caches [N, S, H, D]; `k`, `v` [B, n, H, D].

    Row i appends its keys and values, in place, to slot `cache_batch_idx[i]` from `cache_seqlens[i]` on, and attends
    to all that the slot then holds; causal: query j of n sees all but the last n - 1 - j keys.
    """
    num_rows, num_new, _, head_dim = q.shape
    num_slots, capacity, num_kv_heads, _ = k_cache.shape
    _check_tensors(q, k_cache, v_cache, k, v)
    _check_heads(q, k_cache, v_cache)
    assert k.shape == v.shape == (num_rows, num_new, num_kv_heads, head_dim)
    _check_indices(num_rows, cache_seqlens, cache_batch_idx)
    _check_slots(cache_batch_idx, num_slots)
    output = torch.empty_like(q)
    for row, (slot, length) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        end = length + num_new
        assert length >= 0, "lengths count from 0"
        assert end <= capacity, "the kernel would write past the view"
        k_cache[slot, length:end] = k[row]
        v_cache[slot, length:end] = v[row]
        output[row] = attention(
            q[row], k_cache[slot, :end], v_cache[slot, :end], causal, softmax_scale, softcap, window_size
        )
    return output


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    softmax_scale: float,
    softcap: float,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:
    """Version 2. `q` [T, Hq, D]; `k`, `v` pages [N, P, H, D]; `block_table` [B, pages]: which hold each row's keys.

    Row i's queries are `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`; of its pages, end to end, it sees the first
    `cu_seqlens_k[i + 1] - cu_seqlens_k[i]` tokens. Nothing is appended.
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
    output = torch.empty_like(q)
    for row, pages in enumerate(block_table.tolist()):
        assert all(0 <= page < num_pages for page in pages), "the kernel would read another tensor's memory"
        start, stop = cu_seqlens_q[row : row + 2].tolist()
        length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert stop - start <= length <= min(max_seqlen_k, page_size * len(pages))
        keys, values = k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        output[start:stop] = attention(q[start:stop], keys, values, causal, softmax_scale, softcap, window_size)
    return output


def flash_attn_3_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cache_batch_idx: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k_new: torch.Tensor,
    max_seqlen_q: int,
    causal: bool,
    num_splits: int,
    softmax_scale: float,
    softcap: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Version 3, ragged. `q` [T, Hq, D]; caches [N, S, H, D]; `k`, `v` [T, H, D].

    As version 2's, where row i's queries are `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`, and its keys and values
    `cu_seqlens_k_new[i]` to `cu_seqlens_k_new[i + 1]`.
    """
    num_rows = len(cu_seqlens_q) - 1
    num_slots, capacity, num_kv_heads, head_dim = k_cache.shape
    _check_tensors(q, k_cache, v_cache, k, v)
    _check_heads(q, k_cache, v_cache)
    assert k.shape == v.shape == (len(k), num_kv_heads, head_dim)
    _check_indices(num_rows, cache_seqlens, cache_batch_idx)
    _check_indices(num_rows + 1, cu_seqlens_q, cu_seqlens_k_new)
    _check_offsets(cu_seqlens_q, len(q), max_seqlen_q)
    _check_offsets(cu_seqlens_k_new, len(k), capacity)
    _check_slots(cache_batch_idx, num_slots)
    assert max_seqlen_q <= capacity, "the kernel refuses more queries than the view has tokens"
    assert num_splits == (0 if max_seqlen_q == 1 else 1), "one block for a row, or room for a prompt's split results"
    output = torch.empty_like(q)
    for row, (slot, length) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        start, stop = cu_seqlens_q[row : row + 2].tolist()
        new_start, new_stop = cu_seqlens_k_new[row : row + 2].tolist()
        end = length + new_stop - new_start
        assert length >= 0, "lengths count from 0"
        assert end <= capacity, "the kernel would write past the view"
        k_cache[slot, length:end] = k[new_start:new_stop]
        v_cache[slot, length:end] = v[new_start:new_stop]
        output[start:stop] = attention(
            q[start:stop], k_cache[slot, :end], v_cache[slot, :end], causal, softmax_scale, softcap, window_size
        )
    return output


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    softcap: float,
    window: tuple[int, int],
) -> torch.Tensor:
    """softmax(c tanh(s q k / c)) v in float32; c of 0: no cap. `q` [n, Hq, D], `k` and `v` [m, H, D].

    The last query stands at the last key. A query sees as many keys before and behind its own as the window says (-1:
    all); causal: none behind. Query head h attends to key head `h // (Hq / H)`.
    """
    group_size = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    before, behind = window[0], 0 if causal else window[1]
    ages = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
    if behind >= 0:
        scores = scores.masked_fill(ages < -behind, -torch.inf)
    if before >= 0:
        scores = scores.masked_fill(ages > before, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(dim=-1), values).to(q.dtype)


@contextmanager
def installed() -> Iterator[None]:
    """Lets `import flash_attn` and `import flash_attn_interface` find these functions."""
    version_2: dict[str, Callable[..., Any]] = {
        "flash_attn_with_kvcache": flash_attn_with_kvcache,
        "flash_attn_varlen_func": flash_attn_varlen_func,
    }
    with (
        module("flash_attn", version_2),
        module("flash_attn_interface", {"flash_attn_with_kvcache": flash_attn_3_with_kvcache}),
    ):
        yield


@contextmanager
def module(name: str, functions: Mapping[str, Callable[..., Any]] | None) -> Iterator[None]:
    """That module holds these functions; None: it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, name, _module_of(name, functions))
        yield


def _module_of(name: str, functions: Mapping[str, Callable[..., Any]] | None) -> ModuleType:
    if functions is None:
        return cast("ModuleType", None)  # as the import system has it: not to be found
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    made.__dict__.update(functions)
    return made


def _check_tensors(q: torch.Tensor, *others: torch.Tensor) -> None:
    for tensor in (q, *others):
        assert tensor.dtype in (torch.bfloat16, torch.float16), f"the kernels do not take {tensor.dtype}"
        assert tensor.dtype == q.dtype, "all tensors must have one dtype"
        assert tensor.device == q.device, "all tensors must be on one device"
        assert tensor.stride(-1) == 1, "the last dimension must be dense"


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    head_dim = q.shape[-1]
    assert k.shape == v.shape
    assert k.shape[-1] == head_dim <= _MAX_HEAD_DIM
    assert head_dim % _HEAD_DIM_MULTIPLE == 0
    assert q.shape[-2] % k.shape[-2] == 0, "query heads must share key heads evenly"


def _check_indices(length: int, *indices: torch.Tensor) -> None:
    for index in indices:
        assert index.dtype == torch.int32, f"indices must be int32, not {index.dtype}"
        assert index.is_contiguous(), "indices must be contiguous"
        assert index.shape == (length,)


def _check_slots(slots: torch.Tensor, num_slots: int) -> None:
    assert all(0 <= slot < num_slots for slot in slots.tolist()), "the kernel would read another tensor's memory"
    assert len(set(slots.tolist())) == len(slots), "rows of one slot race in the kernel"


def _check_offsets(offsets: torch.Tensor, num_tokens: int, longest: int) -> None:
    assert offsets[0] == 0, "offsets begin at 0"
    assert offsets[-1] == num_tokens, "offsets end with the last token"
    lengths = offsets.diff()
    assert lengths.min() >= 1, "every row has a token"
    assert lengths.max() <= longest
