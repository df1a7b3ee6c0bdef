"""Not an engine: measures what the machine does right now. Each request is one measurement, whatever its prompts.

Memory: the float32 sum of 2 GiB, by all threads. Reading limits it, not adding: from the second-level cache one thread
sums 50 GB/s where memory gives it 10 to 20. Matrices: a product of 2,048-cubes in the weights' number format,
or in float32 where oneDNN has none in bfloat16 (with AVX2 alone): torch's own takes minutes there.
The best of several tries counts, as a ceiling is asked for.
"""

import time
from collections.abc import Callable
from typing import Any

from peers.workers.protocol import Generate, Session, Settings, serve

_READ_BYTES = 2 << 30
_CUBE = 2048
_NUM_TRIES = 5


def load(session: Session) -> Generate:
    """The two `counts` of an answer are bytes per second and FLOPs per second."""
    import torch

    session.imported(torch=torch.__version__)
    torch.set_num_threads(session.settings.num_threads)
    buffer = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    multiply = _product(session.settings)

    def measure(_prompts: list[list[int]], _num_tokens: int) -> list[int]:
        return [
            round(_READ_BYTES / _least_seconds(buffer.sum)),
            round(2 * _CUBE**3 / _least_seconds(multiply)),
        ]

    return measure


def _product(settings: Settings) -> Callable[[], Any]:
    import torch

    if settings.quantization == "int8":
        left, right = (torch.randint(-8, 8, (_CUBE, _CUBE), dtype=torch.int8) for _ in range(2))
        return lambda: torch._int_mm(left, right)
    is_slow = settings.dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.float32 if is_slow else getattr(torch, settings.dtype)
    first, second = (torch.randn(_CUBE, _CUBE, dtype=dtype) for _ in range(2))
    return lambda: first @ second


def _least_seconds(work: Callable[[], object]) -> float:
    work()
    seconds = []
    for _ in range(_NUM_TRIES):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    serve(load)
