"""The recurrence of a Gated DeltaNet (Yang et al., "Gated Delta Networks", 2024) over ragged rows, one launch a layer.

    S = exp(g) S;   S = S + k (beta (v - S' k))';   output = S' q

with g = -exp(A_log) softplus(decay + dt_bias) and beta = sigmoid(gate). Keys and queries have length 1, and queries are
divided by the square root of their size. A program has some columns of one head's matrix S in registers, and takes the
row's inputs one after the other; columns do not depend on each other.
"""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chairlift.kernels.ragged import LayerStates, RaggedRows, load_known, load_row, only_if, place_of, sigmoid, softplus

_ELEMENTS = 1024  # of the matrix, that a warp has in registers: a single prompt needs many programs


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """Heads of a layer. Value heads share key heads, the next ones or, if tiled, every `num_key_heads`-th."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    is_tiled: bool


def advance(
    rows: RaggedRows,
    states: LayerStates,
    convolved: torch.Tensor,
    inputs: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    heads: DeltaHeads,
    *,
    length_eps: float,
) -> torch.Tensor:
    """Takes the matrices, the last elements of each state, through a batch in place: float32 `[T, Hv * Dv]`.

    `convolved`: of new and replayed tokens, query, key and value. `inputs`: `[T, ... + 2 Hv]`, of which the gates and
    decays of heads are last, as in `states.pending`. `a_log` and `dt_bias`: `[Hv]`. `length_eps`: added to
    squares of lengths.
    """
    num_tokens, most = len(rows.row_of), states.pending.shape[1]
    num_values = heads.num_value_heads * heads.value_dim
    output = torch.empty(num_tokens, num_values, dtype=torch.float32, device=inputs.device)
    keys = triton.next_power_of_2(heads.key_dim)
    values = min(triton.next_power_of_2(heads.value_dim), max(1, _ELEMENTS // keys))
    matrices = states.live[:, states.live.shape[1] - num_values * heads.key_dim :]
    _advance[(triton.cdiv(heads.value_dim, values), heads.num_value_heads, rows.num_rows)](
        convolved,
        inputs,
        inputs.stride(0),
        states.pending,
        states.pending.stride(0),
        states.pending.stride(1),
        matrices,
        matrices.stride(0),
        a_log,
        dt_bias,
        output,
        rows.table,
        num_tokens,
        length_eps,
        HK=heads.num_key_heads,
        HV=heads.num_value_heads,
        DK=heads.key_dim,
        DV=heads.value_dim,
        IS_TILED=heads.is_tiled,
        MOST=most,
        KEYS=keys,
        VALUES=values,
        num_warps=1,
    )
    return output


@triton.jit
def _load_token(
    index: tl.tensor,
    num_replayed: tl.tensor,
    replayed_at: tl.tensor,
    new_at: tl.tensor,
    convolved: tl.tensor,
    inputs: tl.tensor,
    inputs_stride: tl.tensor,
    pending: tl.tensor,
    pending_stride: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    is_key: tl.tensor,
    is_value: tl.tensor,
    gate: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Loads an input's query, key, value, gate and decay for one head."""
    place = place_of(index, num_replayed, replayed_at, new_at)
    own = convolved + place * (2 * HK * DK + HV * DV)
    query = tl.load(own + keys, mask=is_key, other=0.0)
    key = tl.load(own + HK * DK + keys, mask=is_key, other=0.0)
    value = tl.load(own + 2 * HK * DK + values, mask=is_value, other=0.0)
    beta = load_known(index, gate, gate >= 0, num_replayed, pending, pending_stride, inputs, inputs_stride)
    decay = load_known(index, gate + HV, gate >= 0, num_replayed, pending, pending_stride, inputs, inputs_stride)
    return query, key, value, beta, decay


@triton.jit
def _normalise(x: tl.tensor, eps: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, 0) + eps)


@triton.jit(do_not_specialize=["num_tokens"])
def _advance(
    convolved: tl.tensor,
    inputs: tl.tensor,
    inputs_stride: tl.tensor,
    pending: tl.tensor,
    pending_slot_stride: tl.tensor,
    pending_stride: tl.tensor,
    matrices: tl.tensor,
    matrices_stride: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    output: tl.tensor,
    table: tl.tensor,
    num_tokens: tl.tensor,
    length_eps: tl.tensor,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    IS_TILED: tl.constexpr,
    MOST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    """A program for each block of columns, value head and row. An input is loaded while the one before is taken."""
    head, row = tl.program_id(1), tl.program_id(2)
    key_head = head % HK if IS_TILED else head // (HV // HK)
    in_key, in_value = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = in_key < DK, in_value < DV
    keys, values, gate = key_head * DK + in_key, head * DV + in_value, 2 * HK * DK + HV * DV + head
    slot, is_started, first, num_replayed, num_stored, num_inputs = load_row(table, row)
    if num_inputs == 0:  # a row of a padded step, which may begin behind the last token
        return
    replayed_at, pending = num_tokens + row * MOST, pending + slot * pending_slot_stride
    inputs += first.to(tl.int64) * inputs_stride
    matrix_at = matrices + slot * matrices_stride + (head * DK + in_key[:, None]) * DV + in_value[None, :]
    is_in = is_key[:, None] & is_value[None, :]
    matrix = tl.load(matrix_at, mask=only_if(is_started, is_in), other=0.0)
    rate, bias = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    # fmt: off
    query, key, value, beta, decay = _load_token(
        0, num_replayed, replayed_at, first, convolved, inputs, inputs_stride, pending, pending_stride,
        keys, values, is_key, is_value, gate, HK, HV, DK, DV,
    )
    for index in range(num_inputs):
        next_query, next_key, next_value, next_beta, next_decay = _load_token(
            tl.minimum(index + 1, num_inputs - 1), num_replayed, replayed_at, first, convolved, inputs, inputs_stride,
            pending, pending_stride, keys, values, is_key, is_value, gate, HK, HV, DK, DV,
        )
        # fmt: on
        query, key = _normalise(query, length_eps) * (DK**-0.5), _normalise(key, length_eps)
        matrix = matrix * tl.exp(rate * softplus(decay + bias))
        correction = (value - tl.sum(matrix * key[:, None], 0)) * sigmoid(beta)
        matrix = matrix + key[:, None] * correction[None, :]
        answer = tl.sum(matrix * query[:, None], 0)
        at = output + (first + index - num_replayed).to(tl.int64) * (HV * DV) + values
        tl.store(at, answer, mask=only_if(index >= num_replayed, is_value))
        if index + 1 == num_stored:
            tl.store(matrix_at, matrix, mask=is_in)
        query, key, value, beta, decay = next_query, next_key, next_value, next_beta, next_decay
