"""Print pip's option for the index of torch's builds for CPUs, where they are the ones to install; else nothing.

    pip install $(python tools/torch_index.py) torch

On Linux pip's default build is for NVIDIA GPUs and takes gigabytes more. It stays where there is such a GPU, where
other indexes are named by pip's variables, and where this one does not answer, as behind a mirror of registries.
"""

import os
import sys
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 3
DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # of the driver for Linux, and of Windows' for Linux on it
VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX")


def options(index: str = INDEX, devices: Sequence[Path] = DEVICES, system: str = sys.platform) -> list[str]:
    """Returns the options for pip: that index beside its own ones, or none.

    `devices`: files that a driver makes. `system`: as `sys.platform` names it.
    """
    has_device = any(path.exists() for path in devices)
    is_chosen = any(os.environ.get(name) for name in VARIABLES)
    if system != "linux" or has_device or is_chosen or not _answers(f"{index}/torch/"):
        return []
    return ["--extra-index-url", index]


def _answers(url: str) -> bool:
    """True if a GET of it succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return True
    except (OSError, HTTPException):
        return False


if __name__ == "__main__":
    print(*options())
