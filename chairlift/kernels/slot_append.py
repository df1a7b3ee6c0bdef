"""Writes the keys and values of new tokens into their slots, both in one kernel."""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

_FEW_TOKENS = 512  # up to here each token has a program of its own, so that many processors take part
_TILE_SIZE = 4096  # numbers that a program copies of more tokens: each thread has several loads in flight
_SIZE_OF_A_WARP = 1024  # numbers that one warp copies at once


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Writes `key` and `value`, `[T, Hkv, D]`, into `keys` and `values`, `[n_slots, S, Hkv, D]`, in place.

    Token t goes to position `positions[t]` of slot `slots[t]`; both are `[T]`, of any integers. The elements of a head
    are dense, and all other strides are free.
    """
    num_tokens, num_heads, head_dim = key.shape
    assert keys.stride(3) == values.stride(3) == key.stride(2) == value.stride(2) == 1
    padded_heads, padded_dim = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    token_size = padded_heads * padded_dim
    per_program = 1 if num_tokens <= _FEW_TOKENS else max(1, _TILE_SIZE // token_size)
    _append[(triton.cdiv(num_tokens, per_program), 2)](
        keys, values, key, value, slots, positions, num_tokens, *keys.stride()[:3], *values.stride()[:3],
        *key.stride()[:2], *value.stride()[:2], T=per_program, H=num_heads, D=head_dim, HP=padded_heads, DP=padded_dim,
        num_warps=1 if per_program * token_size <= _SIZE_OF_A_WARP else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots", "positions"])
def _append(
    keys: tl.tensor, values: tl.tensor, key: tl.tensor, value: tl.tensor, slots: tl.tensor, positions: tl.tensor,
    num_tokens: tl.tensor, slot_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    value_slot_stride: tl.tensor, value_token_stride: tl.tensor, value_head_stride: tl.tensor, new_stride: tl.tensor,
    new_head_stride: tl.tensor, new_value_stride: tl.tensor, new_value_head_stride: tl.tensor, T: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr,
) -> None:  # fmt: skip
    """Copies the keys of T tokens (or their values, if the second program id is 1), a head in each row of a tile."""
    row, at = tl.arange(0, T * HP), tl.arange(0, DP)[None, :]
    token, head = (tl.program_id(0) * T + row // HP).to(tl.int64), row % HP
    is_row = (token < num_tokens) & (head < H)
    slot = tl.load(slots + token, mask=is_row, other=0).to(tl.int64)
    position = tl.load(positions + token, mask=is_row, other=0).to(tl.int64)
    is_in = is_row[:, None] & (at < D)
    if tl.program_id(1) == 0:
        new = tl.load(key + (token * new_stride + head * new_head_stride)[:, None] + at, mask=is_in)
        place = slot * slot_stride + position * token_stride + head * head_stride
        tl.store(keys + place[:, None] + at, new, mask=is_in)
    else:
        new = tl.load(value + (token * new_value_stride + head * new_value_head_stride)[:, None] + at, mask=is_in)
        place = slot * value_slot_stride + position * value_token_stride + head * value_head_stride
        tl.store(values + place[:, None] + at, new, mask=is_in)
