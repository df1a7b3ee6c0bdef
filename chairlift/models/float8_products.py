"""Products of many rows with float8 matrices, on the units that a GPU has for these.

The inputs are rounded to float8, too: each row with a scale of its own, so that it does not depend on the others.
"""

import logging
from functools import cache

import torch

from chairlift.device import compiled_on_gpu, find_recording_obstacle
from chairlift.kernels.grouped import StoredMatrix
from chairlift.models.grouped import FLOAT8, LARGEST_FLOAT8

logger = logging.getLogger(__name__)

_ALIGNMENT = 16  # numbers in 16 bytes
_LEAST = 1e-12  # a row of zeros has a scale, too


@cache
def is_available(device: torch.device) -> bool:
    """Returns true where torch multiplies float8 matrices with scales of rows and columns, and graphs record it."""
    values = torch.zeros(64, 64, device=device).to(FLOAT8)
    matrix, x = StoredMatrix(8, values, torch.ones(64, 1, device=device)), values.to(torch.bfloat16)
    bias = x[0].clone()
    obstacle = find_recording_obstacle(lambda: Float8Products().multiply(x, matrix, bias), device)
    if obstacle is not None:
        logger.info("products of many rows with float8 matrices take numbers of 16 bits: %s", obstacle)
    return obstacle is None


def suits(matrix: StoredMatrix, dtype: torch.dtype) -> bool:
    """Returns true for a matrix that these products take: float8 with a scale for each row, beside bfloat16 inputs."""
    if dtype is not torch.bfloat16 or matrix.values.dtype is not FLOAT8 or matrix.scales is None:
        return False
    return matrix.scales.shape[1] == 1 and not matrix.num_inputs % _ALIGNMENT and not matrix.num_outputs % _ALIGNMENT


@compiled_on_gpu
def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[T, in]` -> float8 `[T, in]`, and float32 scales `[T, 1]`: the largest number of a row becomes float8's."""
    wide = x.float()
    scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=_LEAST) / LARGEST_FLOAT8
    return (wide / scales).clamp(-LARGEST_FLOAT8, LARGEST_FLOAT8).to(FLOAT8), scales


class Float8Products:
    """A `ManyRows` for matrices that these products suit."""

    def multiply(self, x: torch.Tensor, matrix: StoredMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        """See `ManyRows`."""
        assert matrix.scales is not None, "it suits"
        if not len(x):  # a step of prompts that go on has no row whose logits anyone wants
            return x.new_empty(0, matrix.num_outputs)
        rounded, scales = round_rows(x)
        product: torch.Tensor = torch._scaled_mm(
            rounded, matrix.values.t(), scale_a=scales, scale_b=matrix.scales.view(1, -1), bias=bias, out_dtype=x.dtype
        )
        return product
