"""For tests that need the cpu backend's kernels."""

import pytest

from chairlift.models.cpu.build import CpuKernelsUnavailable, find_compiler

try:
    find_compiler()
except CpuKernelsUnavailable as error:
    _obstacle = str(error)
else:
    _obstacle = ""

HAS_COMPILER = not _obstacle

needs_kernels = pytest.mark.skipif(not HAS_COMPILER, reason=_obstacle)
