"""Pauses the garbage collector while an engine is made.

A vocabulary and its merges are hundreds of thousands of objects, none of them garbage. For their number alone the
collector would walk through all objects of the process several times, a tenth of a second each.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Has no garbage collected meanwhile. Who finds the collector paused leaves it so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
