"""The causal convolution of recurrent layers: each feature of an input, weighted with the same of the last few.

A state begins with its window: the inputs of the last `taps - 1` tokens, `[taps - 1, features]`, the oldest first.
`convolve` reads states and pending inputs and changes neither. `settle` moves both behind the batch, so it comes after
everything that reads them.
"""

# mypy: disable-error-code="untyped-decorator"

import torch
import triton
import triton.language as tl

from chairlift.kernels.ragged import LayerStates, RaggedRows, load_known, load_row, only_if

_CONVOLVED_TOGETHER = 512  # features of a program
_SETTLED_TOGETHER = 256


def convolve(
    rows: RaggedRows,
    states: LayerStates,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_gated: bool,
    is_replayed: bool,
) -> torch.Tensor:
    """Convolves the first features of `inputs`, `[T, at least features]`: float32 `[T + replayed, features]`.

    `weights`: `[features, 1, taps]`, `bias`: `[features]`. `is_gated`: SiLU follows. `is_replayed`: further rows of the
    result are those of pending inputs, as many for each row of the batch as a slot can have; else there are none.
    """
    num_tokens, most = len(rows.row_of), states.pending.shape[1]
    num_features, _, num_taps = weights.shape
    num_places = num_tokens + (rows.num_rows * most if is_replayed else 0)
    output = torch.empty(num_places, num_features, dtype=torch.float32, device=inputs.device)
    block = min(_CONVOLVED_TOGETHER, triton.next_power_of_2(num_features))
    _convolve[(num_places, triton.cdiv(num_features, block))](
        inputs,
        inputs.stride(0),
        states.pending,
        states.pending.stride(0),
        states.pending.stride(1),
        states.live,
        states.live.stride(0),
        weights,
        weights if bias is None else bias,
        output,
        rows.table,
        rows.row_of,
        num_tokens,
        num_features,
        TAPS=num_taps,
        MOST=most,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        BLOCK=block,
        num_warps=max(1, block // 128),
    )
    return output


def settle(rows: RaggedRows, states: LayerStates, inputs: torch.Tensor, weights: torch.Tensor) -> None:
    """Moves windows behind the inputs that states take, and leaves the tentative inputs pending. In place.

    `inputs`: `[T, num_inputs]`, of which the first ones are convolved with `weights`, `[features, 1, taps]`.
    """
    num_features, _, num_taps = weights.shape
    num_inputs = states.pending.shape[2]
    block = min(_SETTLED_TOGETHER, triton.next_power_of_2(num_inputs))
    _settle[(rows.num_rows, triton.cdiv(num_inputs, block))](
        inputs,
        inputs.stride(0),
        states.pending,
        states.pending.stride(0),
        states.pending.stride(1),
        states.live,
        states.live.stride(0),
        rows.table,
        num_features,
        num_inputs,
        TAPS=num_taps,
        BLOCK=block,
        num_warps=max(1, block // 128),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _convolve(
    inputs: tl.tensor,
    inputs_stride: tl.tensor,
    pending: tl.tensor,
    pending_slot_stride: tl.tensor,
    pending_stride: tl.tensor,
    live: tl.tensor,
    live_stride: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    table: tl.tensor,
    row_of: tl.tensor,
    num_tokens: tl.tensor,
    num_features: tl.tensor,
    TAPS: tl.constexpr,
    MOST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program for each place of the output and block of features."""
    place = tl.program_id(0)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = features < num_features
    is_new = place < num_tokens
    replayed = tl.maximum(place - num_tokens, 0)
    row = tl.where(is_new, tl.load(row_of + place, mask=is_new, other=0), replayed // MOST)
    slot, is_started, first, num_replayed, _, _ = load_row(table, row)
    index = tl.where(is_new, num_replayed + place - first, replayed % MOST)
    if (place >= num_tokens) & (index >= num_replayed):
        return
    window = live + slot * live_stride
    pending += slot * pending_slot_stride
    inputs += first.to(tl.int64) * inputs_stride
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        source = index - (TAPS - 1) + tap
        known = load_known(source, features, is_in, num_replayed, pending, pending_stride, inputs, inputs_stride)
        is_kept = only_if(is_started & (source < 0), is_in)
        kept = tl.load(window + (TAPS - 1 + source) * num_features + features, mask=is_kept, other=0.0)
        weight = tl.load(weights + features * TAPS + tap, mask=is_in, other=0.0).to(tl.float32)
        total += (known + kept) * weight
    if HAS_BIAS:
        total += tl.load(bias + features, mask=is_in, other=0.0).to(tl.float32)
    if IS_GATED:
        total = total / (1.0 + tl.exp(-total))
    tl.store(output + place.to(tl.int64) * num_features + features, total, mask=is_in)


@triton.jit
def _settle(
    inputs: tl.tensor,
    inputs_stride: tl.tensor,
    pending: tl.tensor,
    pending_slot_stride: tl.tensor,
    pending_stride: tl.tensor,
    live: tl.tensor,
    live_stride: tl.tensor,
    table: tl.tensor,
    num_features: tl.tensor,
    num_inputs: tl.tensor,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A program for each row and block of features. Each element moves towards the front, the first one first."""
    row = tl.program_id(0)
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, is_started, first, num_replayed, num_stored, num_taken = load_row(table, row)
    window = live + slot * live_stride
    pending += slot * pending_slot_stride
    inputs += first.to(tl.int64) * inputs_stride
    is_in = only_if(num_stored > 0, features < num_features)
    for place in tl.static_range(TAPS - 1):
        source = num_stored - (TAPS - 1) + place
        known = load_known(source, features, is_in, num_replayed, pending, pending_stride, inputs, inputs_stride)
        is_kept = only_if(is_started & (source < 0), is_in)
        kept = tl.load(window + (TAPS - 1 + source) * num_features + features, mask=is_kept, other=0.0)
        tl.store(window + place * num_features + features, known + kept, mask=is_in)
    is_in = features < num_inputs
    for place in range(num_taken - num_stored):
        source = num_stored + place
        left = load_known(source, features, is_in, num_replayed, pending, pending_stride, inputs, inputs_stride)
        tl.store(pending + place * pending_stride + features, left, mask=is_in)
