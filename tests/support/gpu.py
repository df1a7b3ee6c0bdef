"""Holds what tests that need a CUDA device share."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

_LEFT_OUT = "This flash attention build does not support"  # followed by what it was built without
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


@contextmanager
def skipped_where_flash_attn_lacks_kernels() -> Iterator[None]:
    """Skips the test when flash-attn 2 is asked for a window or a soft cap and says that its build has none."""
    module = importlib.import_module("flash_attn")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):
            patch.setattr(module, name, _skipping(getattr(module, name)))
        yield


def _skipping(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of flash-attn 2: its refusal for want of kernels skips the test, and no other error does."""

    @functools.wraps(attend)
    def attend_or_skip(*args: Any, **named: Any) -> Any:
        try:
            return attend(*args, **named)
        except RuntimeError as error:
            if str(error).startswith((f"{_LEFT_OUT} local attention", f"{_LEFT_OUT} softcap")):
                pytest.skip(str(error))
            raise

    return attend_or_skip
