"""What tests that need a CUDA device share."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

_Test = TypeVar("_Test", bound=Callable[..., Any])

GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def needs_gpu(test: _Test) -> _Test:
    """Marks a test `gpu`, and skips it where there is no CUDA device."""
    for mark in GPU_MARKS:
        test = mark(test)
    return test


@contextmanager
def no_waiting() -> Iterator[None]:
    """A RuntimeError where the host waits for the device, as far as torch notices."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def needs_package(name: str) -> pytest.MarkDecorator:
    """Skips a test where that package is not installed."""
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs the package {name}")
