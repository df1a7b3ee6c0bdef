"""Engines that are killed while they save leave nothing that makes an answer wrong, or a start fail."""

from pathlib import Path

import pytest

from tests.disk.kills import kill_again_and_again
from tests.support.kernels import HAS_COMPILER


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler")
def test_killed_engines_leave_nothing_wrong(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    num_right, num_reading = kill_again_and_again(tmp_path, 5)
    assert num_right >= 5
    assert num_reading > 0
