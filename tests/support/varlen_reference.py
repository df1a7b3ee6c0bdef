"""What `torch.nn.attention.varlen.varlen_attn` does with ragged keys at offsets, in plain torch, on any device."""

import torch

from tests.support.flash_attn_reference import attention


def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
) -> torch.Tensor:
    """`query` [T, Hq, D]; `key`, `value` [K, H, D]. Row i sees `seqused_k[i]` keys from `cu_seq_k[i]` on.

    A window of 0 keys ahead is causal. A call that only decodes, without a window, must not be: see `_varlen_window`.
    """
    num_rows = len(cu_seq_q) - 1
    for tensor in (query, key, value):
        assert tensor.dtype in (torch.bfloat16, torch.float16), f"the kernels do not take {tensor.dtype}"
        assert tensor.stride(-1) == 1, "the last dimension must be dense"
    out = torch.empty_like(query)
    for index, length in ((cu_seq_q, num_rows + 1), (cu_seq_k, num_rows + 1), (seqused_k, num_rows)):
        assert index.dtype == torch.int32, f"indices must be int32, not {index.dtype}"
        assert index.is_contiguous()
        assert index.shape == (length,)
    assert enable_gqa or query.shape[1] == key.shape[1]
    is_whole = window_size == (-1, -1)
    assert is_whole or window_size[1] == 0
    assert is_whole == (max_q == 1 and window_size[0] == -1), "neither groups of heads as rows nor split keys"
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(query)
    for row, (offset, length) in enumerate(zip(cu_seq_k[:-1].tolist(), seqused_k.tolist(), strict=True)):
        start, stop = cu_seq_q[row : row + 2].tolist()
        assert stop - start <= max_q
        assert length <= max_k
        assert 0 <= offset <= offset + length <= len(key), "the kernel would read another tensor's memory"
        keys, values = key[offset : offset + length], value[offset : offset + length]
        out[start:stop] = attention(query[start:stop], keys, values, False, scale, 0.0, window_size)
    return out
