"""Engines that are killed while they save leave nothing that makes an answer wrong, or a start fail."""

from pathlib import Path

import pytest

from tests.disk.kills import kill_again_and_again
from tests.support.kernels import HAS_COMPILER


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_engines_leave_nothing_wrong(tmp_path: Path, num_ranks: int) -> None:
    (tmp_path / "model").mkdir()
    num_right, num_reading = kill_again_and_again(tmp_path, 5, num_ranks)
    assert num_right >= 5
    assert num_reading > 0
