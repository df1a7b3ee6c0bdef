"""Numbers in MXFP4: groups of 32 values of 4 bits (E2M1), with a power of two for each group (E8M0).

The format is the Open Compute Project's: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

import torch

from chairlift.models.grouped import GroupedWeight

GROUP_SIZE = 32
_DOUBLED = torch.tensor((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), dtype=torch.int8)
_BIAS_OF_EXPONENTS = 127


def to_groups(codes: torch.Tensor, exponents: torch.Tensor) -> GroupedWeight:
    """Returns the same numbers as integers with a scale: uint8 `[out, in]` codes, uint8 `[out, in / 32]` exponents."""
    ones = torch.ones(exponents.shape)  # float32
    scales = torch.ldexp(ones, exponents.int() - _BIAS_OF_EXPONENTS - 1)  # the table has the values doubled
    return GroupedWeight(8, _DOUBLED[codes.int()], scales)
