"""A disk that is full, read-only or gone while an engine serves: one line in the log, and the same answers."""

import errno
import logging
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chairlift import LLM
from chairlift.engine.core import EngineCore
from tests.engine.support import core_of
from tests.engine.test_poison import choices_of
from tests.engine.test_saved_prefixes import PROMPT, answered, ask, saving

OTHER_PROMPT = PROMPT[::-1]
DISK_BYTES = 80 * 2**10  # of which a segment takes some 33 kB


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which has room for a segment and not for three."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def save_all(core: EngineCore) -> None:
    """Saves what is warm, as an engine at rest does."""
    while core.save_next(0.01):
        pass
    while not core.has_saved_all():
        pass


def assert_served(llm: LLM, native: str, tmp_path: Path) -> None:
    """Answers are those of an engine whose disk is well."""
    found = [ask(llm), ask(llm, OTHER_PROMPT)]
    save_all(core_of(llm))
    found.append(ask(llm))
    expected = [answered(native, tmp_path / "well", prompt) for prompt in (PROMPT, OTHER_PROMPT)]
    assert choices_of(found) == choices_of([*expected, expected[0]])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fill(_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_entry(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("chairlift.disk.folder.write_entry", write_entry)


def remove(path: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(path)


@pytest.mark.parametrize(("harm", "reason"), [(fill, "No space left on device"), (remove, "No such file or directory")])
def test_a_directory_that_is_full_or_gone_is_told_once(
    native: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    with saving(native, tmp_path / "saved") as llm:
        with pytest.MonkeyPatch.context() as monkeypatch:
            harm(tmp_path / "saved", monkeypatch)
            ask(llm)
            save_all(core_of(llm))
        assert_served(llm, native, tmp_path)
        (warning,) = warnings_in(caplog)
        assert warning.startswith("prefixes cannot be saved")
        assert warning.endswith(reason)


def test_a_small_disk_that_fills_up_is_told_once_and_keeps_what_it_has(
    native: str, disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with saving(native, disk) as llm:
        assert_served(llm, native, tmp_path)
        (warning,) = warnings_in(caplog)
        assert warning.endswith("No space left on device")
    assert len(list(disk.glob("*/*.kv"))) in (1, 2)
    assert not list(disk.glob("*/*.writing"))
    cached = answered(native, disk).num_cached_tokens, answered(native, disk, OTHER_PROMPT).num_cached_tokens
    assert max(cached) >= 64


def test_a_read_only_disk_is_told_once_and_still_read(
    native: str, disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = answered(native, disk)
    caplog.clear()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with saving(native, disk) as llm:
        warm = ask(llm)
        assert warm.num_cached_tokens >= 64
        assert choices_of([warm]) == choices_of([first])
        assert_served(llm, native, tmp_path)
        (warning,) = warnings_in(caplog)
        assert warning.endswith("Read-only file system")
