"""For tests that need the cpu backend's kernels."""

import os
import shutil

import pytest

_COMPILER = os.environ.get("CXX", "g++").split()[0]

needs_kernels = pytest.mark.skipif(shutil.which(_COMPILER) is None, reason=f"there is no C++ compiler {_COMPILER}")
