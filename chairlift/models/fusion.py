"""Elementwise functions that are one kernel each on a CUDA device.

A decode step of one row is a few milliseconds of reading weights, and torch's operators between the products are some
thirty kernels a layer of a few microseconds each. Compiled, they are four. On a CPU the functions run as they are:
there the whole pass is native code (`models/cpu`), or torch's operators are fast enough.
"""

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def fused(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function of tensors that torch compiles when it is first called with one on a CUDA device."""

    @functools.cache
    def compiled() -> Callable[_P, _R]:
        if (obstacle := _find_obstacle()) is not None:
            logger.warning("%s runs operator by operator, which is slower: %s", function.__name__, obstacle)
            return function
        return torch.compile(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first = args[0]
        is_cuda = isinstance(first, torch.Tensor) and first.is_cuda
        return (compiled() if is_cuda else function)(*args, **kwargs)

    return call


@functools.cache
def _find_obstacle() -> str | None:
    """Why torch.compile cannot make kernels here; None if it can. It needs Triton and a C compiler."""
    try:
        torch.compile(torch.nn.functional.silu)(torch.zeros(256, device="cuda"))
    except Exception as error:  # the compiler's own, a missing program's or library's: each means the same here
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None
