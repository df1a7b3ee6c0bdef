"""The products of all experts of a layer in one kernel, which reads on the device whose rows are where.

So nothing about the choice of experts comes to the host, and graphs can record steps of a mixture. For plain
matrices the kernel is torch's where it has one that a graph can record, and else one in Triton. That also multiplies
all matrices that are stored in groups or in float8.
"""

import importlib.util
import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from chairlift.device import find_compile_obstacle, find_recording_obstacle

if TYPE_CHECKING:
    from chairlift.kernels.grouped import StoredMatrix

logger = logging.getLogger(__name__)

_ALIGNMENT = 8  # elements of bfloat16 in 16 bytes


def can_multiply(num_inputs: int, num_outputs: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns true if a kernel on that device takes matrices `[out, in]` of an expert in that type."""
    return (suits(num_inputs, num_outputs, dtype) and is_available(device)) or _has_own(device)


def suits(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> bool:
    """Returns true for matrices that torch's kernel takes: bfloat16 rows of whole 16 bytes."""
    return dtype is torch.bfloat16 and num_inputs % _ALIGNMENT == 0 and num_outputs % _ALIGNMENT == 0


@cache
def is_available(device: torch.device) -> bool:
    """Returns true where torch has the kernel and a graph can record it.

    Elsewhere torch multiplies expert by expert and waits for the device.
    """
    if device.type != "cuda":
        return device.type == "meta"  # which stands for a GPU
    x = torch.zeros(16, 64, dtype=torch.bfloat16, device=device)
    weights, ends = x.new_zeros(2, 64, 64), torch.tensor([8, 16], dtype=torch.int32, device=device)
    obstacle = find_recording_obstacle(lambda: F.grouped_mm(x, weights.transpose(1, 2), offs=ends), device)
    if obstacle is not None:
        logger.info("torch has no product of all experts that a graph can record: %s", obstacle)
    return obstacle is None


def multiply(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """`[N, in]`, `[experts, out, in]` -> `[N, out]`; `ends`: int32 `[experts]`, where each expert's rows end.

    By torch's kernel or our own, for which there must be one (`can_multiply`).
    """
    _, num_outputs, num_inputs = weights.shape
    # Asked first, since the other warns where there is no kernel of our own, which then nobody needs.
    is_recordable = suits(num_inputs, num_outputs, weights.dtype) and is_available(weights.device)
    if is_recordable or not _has_own(weights.device):
        product: torch.Tensor = F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
        return product
    from chairlift.kernels.grouped import StoredMatrix  # imports Triton, which not every machine has

    return multiply_stored(x, StoredMatrix(16, weights.view(-1, num_inputs)), ends)


def multiply_stored(x: torch.Tensor, matrices: "StoredMatrix", ends: torch.Tensor) -> torch.Tensor:
    """As `multiply`, by matrices as they are stored, `[experts * out, in]`."""
    from chairlift.kernels import expert_rows

    return expert_rows.multiply(x.contiguous(), matrices, ends)


@cache
def _has_own(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "meta"
    if importlib.util.find_spec("triton") is not None and find_compile_obstacle(device) is None:
        return True
    logger.warning("no step of a mixture of experts is recorded, which is slower: Triton compiles no kernel here")
    return False
