"""Numbers in MXFP4: groups of 32 values of 4 bits (E2M1), with a power of two for each group (E8M0).

The format is the Open Compute Project's: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

import torch

from chairlift.models.grouped import POWERS_OF_TWO

GROUP_SIZE = 32
TABLE = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
"""Twice the numbers that the codes stand for."""


def scales_of(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 of any shape -> E8M0: the factors of the numbers in the table, which are 2^-127 at least."""
    return (exponents - exponents.clamp(max=1)).view(POWERS_OF_TWO)
