"""Describes ragged batches of recurrent layers to kernels: whose tokens are whose, and where the states of slots are.

A row takes its pending inputs first, and then its new ones. Its inputs are numbered through both of them:

    pending of its slot   new tokens of the row     source
    r r                   n n n t t                 0 1 | 2 3 4 5 6

Its stored state takes all but the tentative ones (t), which are pending afterwards. Rows may have no inputs. Everything
that varies from step to step is in tensors, so what is launched can be recorded and replayed with other rows. What a
token gets does not depend on how its sequence is cut into rows, nor on the other rows: each element is computed by one
program, which takes the inputs of the row in order.
"""

# mypy: disable-error-code="untyped-decorator"

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """The rows of a batch of T new tokens, int32 on one device."""

    table: torch.Tensor  # [R, 6]: slot, has a state, first new token, replayed inputs, inputs stored, inputs
    row_of: torch.Tensor  # [T]: the row of each new token

    @classmethod
    def of(
        cls, slots: torch.Tensor, starts: torch.Tensor, offsets: torch.Tensor, counts: torch.Tensor, num_tokens: int
    ) -> Self:
        """Makes it without waiting for the device.

        `slots` and `starts`, the position of the first new token: int32 `[R]`. `offsets`: int32 `[R + 1]`, where the
        new tokens of each row begin. `counts`: int32 `[2, R]`, replayed inputs, and new ones that are left pending.
        """
        num_replayed, num_tentative = counts
        num_inputs = num_replayed + offsets[1:] - offsets[:-1]
        num_stored, has_state = num_inputs - num_tentative, (starts > num_replayed).int()
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=offsets.device)
        row_of = torch.searchsorted(offsets[1:].contiguous(), tokens, right=True, out_int32=True)
        return cls(torch.stack((slots, has_state, offsets[:-1], num_replayed, num_stored, num_inputs), dim=1), row_of)

    @property
    def num_rows(self) -> int:
        return len(self.table)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """A layer's part of all states and pending inputs: float32 views, whose last dimensions are contiguous."""

    live: torch.Tensor  # [slots, elements]
    pending: torch.Tensor  # [slots, most of them, inputs]


@triton.jit
def load_row(table: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, ...]:
    """Loads slot (int64), has a state, first new token, replayed inputs, inputs stored, inputs."""
    own = table + row * 6
    return (
        tl.load(own).to(tl.int64),
        tl.load(own + 1) != 0,
        tl.load(own + 2),
        tl.load(own + 3),
        tl.load(own + 4),
        tl.load(own + 5),
    )


@triton.jit
def only_if(condition: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Masks everything unless a condition, a single number, holds. Triton's interpreter needs the comparison."""
    return (mask & condition) != 0


@triton.jit
def place_of(source: tl.tensor, num_replayed: tl.tensor, replayed_at: tl.tensor, new_at: tl.tensor) -> tl.tensor:
    """Locates a row's input among those of all rows, int64. Its replayed ones and its new ones are in two places."""
    return tl.where(source < num_replayed, replayed_at + source, new_at + source - num_replayed).to(tl.int64)


@triton.jit
def load_known(
    source: tl.tensor,
    features: tl.tensor,
    mask: tl.tensor,
    num_replayed: tl.tensor,
    pending: tl.tensor,
    pending_stride: tl.tensor,
    inputs: tl.tensor,
    inputs_stride: tl.tensor,
) -> tl.tensor:
    """Loads features of a row's input in float32; 0 where masked, and of inputs before the first.

    `pending`: of its slot; `inputs`: of its first new token.
    """
    is_new = source >= num_replayed
    is_old = only_if((source >= 0) & (source < num_replayed), mask)
    old = tl.load(pending + source * pending_stride + features, mask=is_old, other=0.0)
    new = tl.load(inputs + (source - num_replayed) * inputs_stride + features, mask=only_if(is_new, mask), other=0.0)
    return tl.where(is_new, new.to(tl.float32), old)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)), exact for small exp(x) too, where 1 + exp(x) has lost digits; x for large x."""
    exponential = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + exponential
    lost = tl.where(rounded == 1.0, 1.0, rounded - 1.0)
    return tl.where(x > 20.0, x, tl.where(rounded == 1.0, exponential, tl.log(rounded) * (exponential / lost)))


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-x))"""
    return 1.0 / (1.0 + tl.exp(-x))
