"""The recurrence of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024) over ragged rows, one launch a layer.

    S = exp(-dt exp(A_log)) S + (dt x) B';   output = S C + D x

with dt = softplus(gate + dt_bias) between two limits. A program has some rows of one head's matrix S in registers, and
takes the inputs of a batch's row one after the other; rows of S do not depend on each other.
"""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from chairlift.kernels.ragged import LayerStates, RaggedRows, load_known, load_row, only_if, place_of, softplus

_ELEMENTS = 1024  # of the matrix, that a warp has in registers: a single prompt needs many programs


@dataclass(frozen=True, slots=True)
class MambaHeads:
    """Heads of a layer. Neighbours share the B and C of a group."""

    num_heads: int
    num_groups: int
    head_dim: int
    state_size: int
    dt_limits: tuple[float, float]


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Holds what heads do not compute, `[H]` each."""

    a_log: torch.Tensor
    skips: torch.Tensor
    dt_bias: torch.Tensor


def advance(
    rows: RaggedRows,
    states: LayerStates,
    convolved: torch.Tensor,
    inputs: torch.Tensor,
    weights: MambaWeights,
    heads: MambaHeads,
) -> torch.Tensor:
    """Takes the matrices, the last elements of each state, through a batch in place: float32 `[T, H * P]`.

    `convolved`: of new and replayed tokens, x, B and C. `inputs`: `[T, ... + H]`, of which the gates of heads are last,
    as in `states.pending`.
    """
    num_tokens, most = len(rows.row_of), states.pending.shape[1]
    num_features = heads.num_heads * heads.head_dim
    output = torch.empty(num_tokens, num_features, dtype=torch.float32, device=inputs.device)
    columns = triton.next_power_of_2(heads.state_size)
    features = min(triton.next_power_of_2(heads.head_dim), max(1, _ELEMENTS // columns))
    matrices = states.live[:, states.live.shape[1] - num_features * heads.state_size :]
    _advance[(triton.cdiv(heads.head_dim, features), heads.num_heads, rows.num_rows)](
        convolved,
        inputs,
        inputs.stride(0),
        states.pending,
        states.pending.stride(0),
        states.pending.stride(1),
        matrices,
        matrices.stride(0),
        weights.a_log,
        weights.skips,
        weights.dt_bias,
        output,
        rows.table,
        num_tokens,
        *heads.dt_limits,
        H=heads.num_heads,
        G=heads.num_groups,
        P=heads.head_dim,
        N=heads.state_size,
        MOST=most,
        FEATURES=features,
        COLUMNS=columns,
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
    features: tl.tensor,
    shared: tl.tensor,
    is_feature: tl.tensor,
    is_shared: tl.tensor,
    gate: tl.tensor,
    NUM_FEATURES: tl.constexpr,
    NUM_SHARED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Loads an input's x, B, C and gate for one head."""
    place = place_of(index, num_replayed, replayed_at, new_at)
    own = convolved + place * (NUM_FEATURES + 2 * NUM_SHARED)
    x = tl.load(own + features, mask=is_feature, other=0.0)
    entering = tl.load(own + NUM_FEATURES + shared, mask=is_shared, other=0.0)
    leaving = tl.load(own + NUM_FEATURES + NUM_SHARED + shared, mask=is_shared, other=0.0)
    dt = load_known(index, gate, gate >= 0, num_replayed, pending, pending_stride, inputs, inputs_stride)
    return x, entering, leaving, dt


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
    skips: tl.tensor,
    dt_bias: tl.tensor,
    output: tl.tensor,
    table: tl.tensor,
    num_tokens: tl.tensor,
    least_dt: tl.tensor,
    most_dt: tl.tensor,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    MOST: tl.constexpr,
    FEATURES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A program for each block of features, head and row. An input is loaded while the one before is taken."""
    head, row = tl.program_id(1), tl.program_id(2)
    in_head = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    column = tl.arange(0, COLUMNS)
    is_feature, is_shared = in_head < P, column < N
    features, shared, gate = head * P + in_head, head // (H // G) * N + column, H * P + 2 * G * N + head
    slot, is_started, first, num_replayed, num_stored, num_inputs = load_row(table, row)
    if num_inputs == 0:  # a row of a padded step, which may begin behind the last token
        return
    replayed_at, pending = num_tokens + row * MOST, pending + slot * pending_slot_stride
    inputs += first.to(tl.int64) * inputs_stride
    matrix_at = matrices + slot * matrices_stride + features[:, None] * N + column[None, :]
    is_in = is_feature[:, None] & is_shared[None, :]
    matrix = tl.load(matrix_at, mask=only_if(is_started, is_in), other=0.0)
    rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    skip, bias = tl.load(skips + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    # fmt: off
    x, entering, leaving, dt = _load_token(
        0, num_replayed, replayed_at, first, convolved, inputs, inputs_stride, pending, pending_stride,
        features, shared, is_feature, is_shared, gate, H * P, G * N,
    )
    for index in range(num_inputs):
        next_x, next_entering, next_leaving, next_dt = _load_token(
            tl.minimum(index + 1, num_inputs - 1), num_replayed, replayed_at, first, convolved, inputs, inputs_stride,
            pending, pending_stride, features, shared, is_feature, is_shared, gate, H * P, G * N,
        )
        # fmt: on
        dt = tl.minimum(tl.maximum(softplus(dt + bias), least_dt), most_dt)
        matrix = matrix * tl.exp(dt * rate) + (x * dt)[:, None] * entering[None, :]
        answer = tl.sum(matrix * leaving[None, :], 1) + x * skip
        at = output + (first + index - num_replayed).to(tl.int64) * (H * P) + features
        tl.store(at, answer, mask=only_if(index >= num_replayed, is_feature))
        if index + 1 == num_stored:
            tl.store(matrix_at, matrix, mask=is_in)
        x, entering, leaving, dt = next_x, next_entering, next_leaving, next_dt
