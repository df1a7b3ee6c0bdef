"""Times work on a CUDA device, without the host's part of it."""

import statistics
from collections.abc import Callable

import torch


def measure(work: Callable[[], object], num_replays: int = 7) -> float:
    """Returns the median microseconds of what `work` launches on the current device, recorded as a CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        work()  # compiles what is compiled at the first call
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    spans = [_Span() for _ in range(num_replays)]
    for span in spans:
        span.begin.record()
        graph.replay()
        span.end.record()
    torch.cuda.synchronize()
    return statistics.median(span.microseconds() for span in spans)


class _Span:
    """Two events around a replay."""

    def __init__(self) -> None:
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def microseconds(self) -> float:
        """The time between them, once both have happened."""
        milliseconds: float = self.begin.elapsed_time(self.end)
        return 1000 * milliseconds
