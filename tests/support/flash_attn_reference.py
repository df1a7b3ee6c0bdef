"""What flash-attn's two functions do, argument by argument, in plain torch: slow, on any device.

Written from the package's documented semantics. Only the arguments that Chairlift passes exist here, so passing
another one fails, as does anything that the kernels refuse (a dtype, a stride, an index type).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch


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
) -> torch.Tensor:
    """`q` [B, 1, Hq, D]; caches [N, S, H, D]; appends `k`, `v` at `cache_seqlens` in place, then attends."""
    _check_kernel_inputs(q, k_cache, v_cache, cache_seqlens, cache_batch_idx)
    assert causal
    assert len(set(cache_batch_idx.tolist())) == len(cache_batch_idx), "duplicate rows race in the kernel"
    output = torch.empty_like(q)
    for row, (slot, length) in enumerate(zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)):
        assert length + q.shape[1] <= k_cache.shape[1], "the kernel would write past the view"
        end = length + q.shape[1]
        k_cache[slot, length:end] = k[row]
        v_cache[slot, length:end] = v[row]
        output[row] = _attend(q[row], k_cache[slot, :end], v_cache[slot, :end])
    return output


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    block_table: torch.Tensor,
) -> torch.Tensor:
    """`q` [T, Hq, D]; `k`, `v` pages [N, P, H, D]; `block_table` [B, pages]: which pages hold each row's keys."""
    _check_kernel_inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, block_table)
    assert causal
    assert k.shape[1] % 256 == 0, "page size must be a multiple of 256"
    output = torch.empty_like(q)
    for row, pages in enumerate(block_table.tolist()):
        start, stop = cu_seqlens_q[row : row + 2].tolist()
        length = int(cu_seqlens_k[row + 1] - cu_seqlens_k[row])
        assert stop - start <= max_seqlen_q
        assert length <= max_seqlen_k
        keys, values = k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        output[start:stop] = _attend(q[start:stop], keys, values)
    return output


@contextmanager
def installed() -> Iterator[None]:
    """Lets `import flash_attn` find these functions."""
    module = ModuleType("flash_attn")
    module.__dict__["flash_attn_with_kvcache"] = flash_attn_with_kvcache
    module.__dict__["flash_attn_varlen_func"] = flash_attn_varlen_func
    ours = "chairlift.models.attention.flash_attn"
    saved = {name: sys.modules.pop(name, None) for name in ("flash_attn", ours)}
    sys.modules["flash_attn"] = module
    try:
        yield
    finally:
        for name, old in saved.items():
            sys.modules.pop(name, None)
            if old is not None:
                sys.modules[name] = old


def _check_kernel_inputs(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *indices: torch.Tensor) -> None:
    for tensor in (q, k_cache, v_cache):
        assert tensor.dtype in (torch.bfloat16, torch.float16), f"the kernels do not take {tensor.dtype}"
        assert tensor.stride(-1) == 1, "the last dimension must be dense"
    for index in indices:
        assert index.dtype == torch.int32, f"indices must be int32, not {index.dtype}"


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`q` [n, Hq, D], `k` and `v` [m, H, D]: causal, the last query sees all keys."""
    group_size = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), keys) * q.shape[-1] ** -0.5
    is_hidden = ~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    weights = scores.masked_fill(is_hidden, -torch.inf).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, values).to(q.dtype)
