"""Writes the keys and values of new tokens into their slots, both in one kernel."""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl


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
    _append[(num_tokens, 2)](
        keys, values, key, value, slots, positions, *keys.stride()[:3], *values.stride()[:3], *key.stride()[:2],
        *value.stride()[:2], H=num_heads, D=head_dim, HP=triton.next_power_of_2(num_heads),
        DP=triton.next_power_of_2(head_dim), num_warps=1 if num_heads * head_dim <= 1024 else 4,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _append(
    keys: tl.tensor, values: tl.tensor, key: tl.tensor, value: tl.tensor, slots: tl.tensor, positions: tl.tensor,
    slot_stride: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, value_slot_stride: tl.tensor,
    value_token_stride: tl.tensor, value_head_stride: tl.tensor, new_stride: tl.tensor, new_head_stride: tl.tensor,
    new_value_stride: tl.tensor, new_value_head_stride: tl.tensor, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr,
    DP: tl.constexpr,
) -> None:  # fmt: skip
    """Copies one token's keys (or values, if the second program id is 1)."""
    token = tl.program_id(0).to(tl.int64)
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token).to(tl.int64)
    heads, at = tl.arange(0, HP)[:, None], tl.arange(0, DP)[None, :]
    is_in = (heads < H) & (at < D)
    if tl.program_id(1) == 0:
        new = tl.load(key + token * new_stride + heads * new_head_stride + at, mask=is_in)
        tl.store(keys + slot * slot_stride + position * token_stride + heads * head_stride + at, new, mask=is_in)
    else:
        new = tl.load(value + token * new_value_stride + heads * new_value_head_stride + at, mask=is_in)
        place = slot * value_slot_stride + position * value_token_stride
        tl.store(values + place + heads * value_head_stride + at, new, mask=is_in)
