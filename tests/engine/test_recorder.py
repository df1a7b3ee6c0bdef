"""Tests what recording does when memory runs out, and which graph stands in for one that is missing."""

import warnings
from collections.abc import Callable

import pytest
import torch

from chairlift.engine.execution.recorder import (
    CudaRecorder,
    GraphTable,
    Replay,
    as_out_of_memory,
    ended_quietly_by_errors,
)
from tests.support.gpu import needs_gpu

BROKEN = "CUDA error: operation failed due to a previous error during capture"


class BadEnd:
    """A capture whose end fails."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        raise torch.AcceleratorError(BROKEN)


class EmptyEnd:
    """A capture in which nothing was launched. It notes which error ended it."""

    error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.error = error
        warnings.warn("The CUDA Graph is empty. This usually means a wrong device or stream.", stacklevel=2)


def test_a_graph_that_an_error_left_empty_is_not_warned_of() -> None:
    capture = EmptyEnd()
    with pytest.raises(torch.OutOfMemoryError) as caught, as_out_of_memory(), ended_quietly_by_errors(capture):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert capture.error is caught.value


def test_any_other_empty_graph_is() -> None:
    with pytest.warns(UserWarning, match="The CUDA Graph is empty"), ended_quietly_by_errors(EmptyEnd()):
        pass


def test_a_capture_that_breaks_for_lack_of_memory_is_out_of_memory() -> None:
    with (
        pytest.raises(torch.OutOfMemoryError, match="previous error during capture"),
        as_out_of_memory(),
        ended_quietly_by_errors(BadEnd()),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_so_is_one_that_the_allocator_broke_by_freeing_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError), as_out_of_memory(), ended_quietly_by_errors(BadEnd()):
        pass
    with pytest.raises(torch.OutOfMemoryError), as_out_of_memory():
        raise torch.AcceleratorError(BROKEN)


def test_so_is_one_in_which_cuda_itself_finds_no_memory() -> None:
    exhausted = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    with pytest.raises(torch.OutOfMemoryError, match="could not be recorded: CUDA error: out"), as_out_of_memory():
        raise torch.AcceleratorError(exhausted)
    with pytest.raises(torch.OutOfMemoryError), as_out_of_memory(), ended_quietly_by_errors(BadEnd()):
        raise torch.AcceleratorError(exhausted)


def test_any_other_error_in_a_capture_is_none() -> None:
    with (
        pytest.raises(torch.AcceleratorError, match=BROKEN) as caught,
        as_out_of_memory(),
        ended_quietly_by_errors(BadEnd()),
    ):
        raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    assert "not permitted" in str(caught.value.__context__)
    with pytest.raises(torch.AcceleratorError, match="illegal"), as_out_of_memory():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def table_with(*keys: tuple[int, int], room_for: Callable[[int], bool] = lambda _: True) -> GraphTable:
    def record(size: int, _: int) -> Replay:
        if not room_for(size):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: None

    table = GraphTable(record, "rows")
    for key in keys:
        table.record(*key)
    return table


def test_the_smallest_graph_that_suffices_stands_in_for_a_missing_one() -> None:
    table = table_with((8, 0), (8, 2), (16, 2))
    assert [table.find_key(*key) for key in ((8, 0), (4, 0), (4, 1), (9, 0), (17, 0))] == [
        (8, 0),
        (8, 0),
        (8, 2),
        (16, 2),
        None,
    ]
    assert table.missing == [(4, 0), (4, 1), (9, 0), (17, 0)]


def test_a_graph_without_room_is_not_tried_again() -> None:
    table = table_with((8, 0), room_for=lambda size: size == 8)
    table.find(4, 0)
    assert table.record_missing() == (4, 0)
    table.find(4, 0)
    assert table.missing == []


@needs_gpu
def test_memory_that_ends_in_a_capture_ends_that_graph_alone() -> None:
    """The recorder goes on with others, and graphs from before still run."""
    device = torch.device("cuda:0")
    recorder, total = CudaRecorder(device), torch.zeros(1, device=device)

    def add_one() -> None:
        total.add_(1)

    def grow() -> None:
        if torch.cuda.is_current_stream_capturing():
            total.add_(torch.ones(2**28, device=device).sum())

    first = recorder.record(add_one)
    room = torch.cuda.memory_reserved(device) + 2**29
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(device).total_memory)
    stream = torch.cuda.current_stream(device)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            recorder.record(grow)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.current_stream(device) == stream
    second = recorder.record(add_one)
    total.zero_()
    first()
    second()
    assert total.item() == 2
