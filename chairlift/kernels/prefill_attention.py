"""Causal attention of rows of several tokens, over keys and values that stay where they are in their slots.

Rows of any lengths lie end to end. A program takes some tokens of a row with all query heads that share a key/value
head, and goes through the keys in tiles (FlashAttention-2, Dao 2023): first those that all of its tokens see, without a
mask. Results do not depend on other rows.
"""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from chairlift.kernels.softmax import add_sinks, add_tile, find_scores

_QUERIES, _FEW_QUERIES = 128, 64  # rows of a program: tokens times query heads of a key/value head
_TILE_BYTES = 16_384  # of keys, and as much of values, that a program loads at a time


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    slots: torch.Tensor,
    max_new_tokens: int,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(c tanh(scale q k / c)) v: `query` `[T, Hq, D]` over `keys` and `values` `[n_slots, S, Hkv, D]`.

    Row i has the tokens from `offsets[i]` to `offsets[i + 1]`, at most `max_new_tokens` and perhaps none, and stands at
    the end of the first `lengths[i]` tokens of slot `slots[i]`: int32 `[R + 1]`, `[R]`, `[R]`. A token sees `window`
    keys up to its own (None: all). Tokens outside of all rows get no result. Strides and `sinks` are as
    `decode_attention.attend` has them, and the result is `[T, Hq, D]`, dense.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[2]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == query.stride(2) == 1
    group, padded_dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    queries = _QUERIES if max_new_tokens * group > _FEW_QUERIES else _FEW_QUERIES
    output = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    grid = triton.cdiv(max_new_tokens * group, queries), num_kv_heads, len(slots)
    _attend[grid](
        query, keys, values, offsets, lengths, slots, output if sinks is None else sinks, output, scale, softcap or 1.0,
        window or 0, query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2), HQ=num_heads,
        G=group, M=queries, D=head_dim, DP=padded_dim, N=max(16, _TILE_BYTES // (padded_dim * keys.element_size())),
        WINDOWED=window is not None, CAPS=softcap is not None, SINKS=sinks is not None,
        num_warps=8 if queries == _QUERIES else 4, num_stages=2,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize_on_alignment=["offsets", "lengths", "slots"])  # these are parts of other tensors
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, offsets: tl.tensor, lengths: tl.tensor, slots: tl.tensor,
    sinks: tl.tensor, output: tl.tensor, scale: tl.tensor, softcap: tl.tensor, window: tl.tensor, row_stride: tl.tensor,
    query_stride: tl.tensor, slot_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    HQ: tl.constexpr, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr,
    WINDOWED: tl.constexpr, CAPS: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Attends with M queries of one row and one key/value head: token after token, each with its G heads."""
    head, row = tl.program_id(1), tl.program_id(2)
    start = tl.load(offsets + row)
    num_new, length = tl.load(offsets + row + 1) - start, tl.load(lengths + row)
    num_blocks = tl.cdiv(num_new * G, M)
    if tl.program_id(0) >= num_blocks:
        return
    block = num_blocks - 1 - tl.program_id(0)  # those with the most keys begin first
    index, at = block * M + tl.arange(0, M), tl.arange(0, DP)
    token, heads = index // G, head * G + index % G
    is_query = (token < num_new)[:, None] & (at[None, :] < D)
    places = (start + token).to(tl.int64)[:, None] * row_stride + heads[:, None] * query_stride + at[None, :]
    q = tl.load(query + places, mask=is_query, other=0.0)
    num_known = length - num_new
    positions = num_known + tl.minimum(token, num_new - 1)  # so that padding sees some key, too
    first_position = num_known + block * M // G
    end = num_known + tl.minimum((block * M + M - 1) // G + 1, num_new)  # after the last token's own key
    begin = tl.maximum(first_position - window + 1, 0) // N * N if WINDOWED else 0
    seen_by_all = begin if WINDOWED else tl.minimum(first_position + 1, end) // N * N
    slot = tl.load(slots + row).to(tl.int64)
    base = slot * slot_stride + head * head_stride
    state = _visit(
        q, keys + base, values + base, token_stride, positions, begin, seen_by_all, end, window, scale, softcap,
        tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DP], tl.float32),
        D, DP, N, False, False, CAPS,
    )  # fmt: skip
    best, mass, total = _visit(
        q, keys + base, values + base, token_stride, positions, seen_by_all, end, end, window, scale, softcap,
        state[0], state[1], state[2], D, DP, N, True, WINDOWED, CAPS,
    )  # fmt: skip
    if SINKS:
        best, mass, total = add_sinks(best, mass, total, tl.load(sinks + heads))
    places = ((start + token).to(tl.int64) * HQ + heads)[:, None] * D + at[None, :]
    tl.store(output + places, (total / mass[:, None]).to(output.dtype.element_ty), mask=is_query)


@triton.jit
def _visit(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, token_stride: tl.tensor, positions: tl.tensor, begin: tl.tensor,
    stop: tl.tensor, end: tl.tensor, window: tl.tensor, scale: tl.tensor, softcap: tl.tensor, best: tl.tensor,
    mass: tl.tensor, total: tl.tensor, D: tl.constexpr, DP: tl.constexpr, N: tl.constexpr, MASKED: tl.constexpr,
    WINDOWED: tl.constexpr, CAPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Adds the keys from `begin` to `stop` to the softmax's state. Unless it is masked, every query sees them all."""
    at, tokens = tl.arange(0, DP), tl.arange(0, N)
    places = tokens[:, None] * token_stride + at[None, :]
    for first in range(begin, stop, N):
        key = first + tokens
        tile = first * token_stride.to(tl.int64)
        is_loaded = (key < end)[:, None] & (at < D)[None, :] if MASKED else (at < D)[None, :]
        k = tl.load(keys + tile + places, mask=is_loaded, other=0.0)
        scores = find_scores(q, k, scale, softcap, CAPS)
        if MASKED:
            is_seen = key[None, :] <= positions[:, None]
            if WINDOWED:
                is_seen = is_seen & (key[None, :] > positions[:, None] - window)
            scores = tl.where(is_seen, scores, -float("inf"))
        v = tl.load(values + tile + places, mask=is_loaded, other=0.0)
        best, mass, total = add_tile(best, mass, total, scores, v)
    return best, mass, total
