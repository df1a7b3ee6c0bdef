"""Computes parts of a large matrix side by side: each in one thread, and as many at a time as torch has threads.

Loading a model is thousands of short operations on parts that fit a processor's cache. torch would divide each of them
among all threads, which then wait for one another after every operation.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

_FEWEST_ELEMENTS = 1 << 22  # below, threads take longer to start than they save
_FEWEST_KEPT_ELEMENTS = 1 << 19  # likewise, if they are there
_SMALLEST_PART, _LARGEST_PART = 1 << 18, 1 << 20  # elements of what native code does in one call

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def elements_of_part(num_elements: int) -> int:
    """Says how many of these a thread should give native code at a time, which has no intermediate results.

    Threads wait for the interpreter before and after each call, so parts are as large as there are threads for them.
    """
    return min(max(num_elements // torch.get_num_threads(), _SMALLEST_PART), _LARGEST_PART)


class _Kept(threading.local):
    """The threads that a thread keeps for what it computes."""

    pool: ThreadPoolExecutor | None = None


_kept = _Kept()


@contextmanager
def kept_threads() -> Iterator[None]:
    """Has this thread's calls of `compute_each` meanwhile use the same threads, as many as torch has.

    Starting them takes as long as packing a small matrix.
    """
    if torch.get_num_threads() == 1:
        yield
        return
    with _started(torch.get_num_threads()) as _kept.pool:
        try:
            yield
        finally:
            _kept.pool = None


@contextmanager
def _started(num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads in each of which torch computes alone."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, "part", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)  # for threads to come: those that run have numbers of their own


def compute_each(
    function: Callable[[_Part], _Result], parts: Iterable[_Part], num_elements: int, num_threads: int | None = None
) -> list[_Result]:
    """Returns the function's results in the order of the parts, and raises its first error.

    `num_elements`: of all parts together. `num_threads`: None for torch's, or those that are kept.
    """
    given = list(parts)
    if num_threads is None and _kept.pool is not None and len(given) > 1 and num_elements >= _FEWEST_KEPT_ELEMENTS:
        return list(_kept.pool.map(function, given))
    num_threads = min(len(given), num_threads or torch.get_num_threads())
    if num_threads <= 1 or num_elements < _FEWEST_ELEMENTS:
        return [function(part) for part in given]
    with _started(num_threads) as pool:
        return list(pool.map(function, given))
