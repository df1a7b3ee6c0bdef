"""Computes parts of a large matrix side by side: each in one thread, and as many at a time as torch has threads.

Loading a model is thousands of short operations on parts that fit a processor's cache. torch would divide each of them
among all threads, which then wait for one another after every operation.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_FEWEST_ELEMENTS = 1 << 22  # below, threads take longer to start than they save

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def compute_each(
    function: Callable[[_Part], _Result], parts: Iterable[_Part], num_elements: int, num_threads: int | None = None
) -> list[_Result]:
    """Returns the function's results in the order of the parts, and raises its first error.

    `num_elements`: of all parts together. `num_threads`: None for torch's.
    """
    given = list(parts)
    num_threads = min(len(given), num_threads or torch.get_num_threads())
    if num_threads <= 1 or num_elements < _FEWEST_ELEMENTS:
        return [function(part) for part in given]
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(num_threads, "part", torch.set_num_threads, (1,)) as pool:
            return list(pool.map(function, given))
    finally:
        torch.set_num_threads(before)  # for threads to come: those that run have numbers of their own
