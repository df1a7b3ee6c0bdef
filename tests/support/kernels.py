"""For tests that need the cpu backend's kernels."""

import os
import shutil

import pytest

_COMPILER = os.environ.get("CXX", "g++").split()[0]

HAS_COMPILER = shutil.which(_COMPILER) is not None

needs_kernels = pytest.mark.skipif(not HAS_COMPILER, reason=f"there is no C++ compiler {_COMPILER}")
