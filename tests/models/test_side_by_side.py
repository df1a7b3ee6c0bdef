"""Parts of a large matrix are computed side by side, each in one thread of torch."""

import threading

import pytest
import torch

from chairlift.models.side_by_side import compute_each, kept_threads
from tests.models.cpu.support import threads

LARGE, SMALL = 1 << 22, 100


def test_results_are_in_the_order_of_the_parts() -> None:
    assert compute_each(lambda part: part * part, range(5), LARGE, 3) == [0, 1, 4, 9, 16]
    assert compute_each(lambda part: part * part, [], LARGE, 3) == []


def test_each_part_has_one_thread_and_others_keep_theirs() -> None:
    before = torch.get_num_threads()
    assert compute_each(lambda _: torch.get_num_threads(), range(3), LARGE, 2) == [1, 1, 1]
    assert torch.get_num_threads() == before
    new = compute_each(lambda _: _threads_of_a_new_thread(), range(1), SMALL, 2)
    assert new == [before]


def test_several_parts_are_computed_at_a_time() -> None:
    both = threading.Barrier(2, timeout=60)
    assert sorted(compute_each(lambda _: both.wait(), range(2), LARGE, 2)) == [0, 1]


def test_small_matrices_are_computed_where_they_are_asked_for() -> None:
    assert set(compute_each(lambda _: threading.get_ident(), range(3), SMALL, 2)) == {threading.get_ident()}


def test_threads_that_are_kept_are_started_once() -> None:
    with threads(2):
        with kept_threads():
            used = [compute_each(lambda _: threading.current_thread(), range(8), LARGE) for _ in range(3)]
            few = compute_each(lambda _: threading.current_thread(), range(8), SMALL)
        assert torch.get_num_threads() == 2
        afterwards = compute_each(lambda _: threading.current_thread(), range(8), LARGE)
    kept = {thread for each in used for thread in each}
    assert 1 <= len(kept) <= 2
    assert not kept & {threading.current_thread(), *few, *afterwards}


def test_the_first_error_is_raised() -> None:
    def fail(part: int) -> None:
        if part:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 1"):
        compute_each(fail, range(4), LARGE, 2)


def _threads_of_a_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]
