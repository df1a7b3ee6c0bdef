"""What is made once and kept in the user's cache directory: whole or not at all, and in nobody else's reach.

Who may write to the directory is tested with the kernels (`cpu/test_build.py`), which are kept there, too.
"""

import os
import stat
import sys
from pathlib import Path

import pytest

from chairlift.models.user_cache import CacheUnusable, cache_directory, kept_folder
from tests.support.server_process import start_python

# Waits until the other process has begun as well, notes that it writes, and writes what nobody else would.
WRITER = """
import os, sys, time
from pathlib import Path
from chairlift.models.user_cache import kept_folder

begun = Path(sys.argv[1])

def write(folder):
    (begun / f"wrote-{os.getpid()}").touch()
    (folder / "content").write_text(str(os.getpid()))

(begun / f"ready-{os.getpid()}").touch()
while len(list(begun.glob("ready-*"))) < 2:
    time.sleep(0.001)
content = (kept_folder("thing", write) / "content").read_text()
(begun / f"got-{os.getpid()}").write_text(content)
"""
KILLED = """
import os, signal
from chairlift.models.user_cache import kept_folder

def write(folder):
    (folder / "content").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

kept_folder("thing", write)
"""


class Writer:
    """Fills a folder with two files, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, folder: Path) -> None:
        self.num_calls += 1
        (folder / "content").write_bytes(b"0123456789" * 1000)
        (folder / "notes.json").write_text("{}")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory that does not exist yet."""
    directory = tmp_path / "cache" / "chairlift"
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(directory))
    return directory


def test_the_users_cache_directory_is_taken_if_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/chairlift")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_directory() == Path("/home/someone/.cache/chairlift")


def test_a_folder_is_written_once_for_its_owner_alone(cache: Path) -> None:
    write = Writer()
    folder = kept_folder("thing", write)
    assert folder == cache / "thing"
    assert sorted(path.name for path in folder.iterdir()) == ["content", "notes.json", "sha256.json"]
    assert kept_folder("thing", write) == folder
    assert write.num_calls == 1
    assert [stat.S_IMODE(path.stat().st_mode) for path in (cache, folder)] == [0o700, 0o700]


@pytest.mark.parametrize("damage", ["cut off", "changed", "removed", "without digests", "digests cut off", "empty"])
@pytest.mark.usefixtures("cache")
def test_a_folder_that_is_no_longer_whole_is_written_again(damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write = Writer()
    folder = kept_folder("thing", write)
    content, digests = folder / "content", folder / "sha256.json"
    whole = content.read_bytes()
    match damage:
        case "cut off":
            os.truncate(content, 9_999)
        case "changed":
            content.write_bytes(whole[:5000] + b"x" + whole[5001:])
        case "removed":
            content.unlink()
        case "without digests":
            digests.unlink()
        case "digests cut off":
            os.truncate(digests, 20)
        case "empty":
            for path in folder.iterdir():
                path.unlink()
    assert kept_folder("thing", write) == folder
    assert write.num_calls == 2
    assert content.read_bytes() == whole
    assert f"{folder} is damaged: it is written again" in caplog.text
    kept_folder("thing", write)
    assert write.num_calls == 2


def test_of_a_writer_that_fails_nothing_stays_and_the_next_succeeds(cache: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "content").write_text("half")
        raise KeyError("something")

    with pytest.raises(KeyError, match="something"):
        kept_folder("thing", fail)
    assert [path.name for path in cache.iterdir()] == ["thing.lock"]
    assert (kept_folder("thing", Writer()) / "content").stat().st_size == 10_000


def test_of_a_process_that_was_killed_nothing_is_taken_for_whole(cache: Path) -> None:
    assert start_python(KILLED, [], os.environ, sys.stderr.fileno()).wait(60) == -9
    assert (cache / "thing.partial" / "content").read_text() == "half"
    assert (kept_folder("thing", Writer()) / "content").stat().st_size == 10_000
    assert sorted(path.name for path in cache.iterdir()) == ["thing", "thing.lock"]


@pytest.mark.usefixtures("cache")
def test_of_two_processes_one_writes_and_both_get_the_same(tmp_path: Path) -> None:
    processes = [start_python(WRITER, [str(tmp_path)], os.environ, sys.stderr.fileno()) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    (writer,) = (path.name.removeprefix("wrote-") for path in tmp_path.glob("wrote-*"))
    assert [path.read_text() for path in tmp_path.glob("got-*")] == [writer, writer]


def test_a_directory_that_others_can_write_to_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(CacheUnusable) as caught:
        kept_folder("thing", Writer())
    assert str(caught.value) == (
        f"{cache}: other users can write to it, and may have; delete it, or name another in $CHAIRLIFT_CACHE_DIR"
    )
    assert list(cache.iterdir()) == []


def test_a_disk_that_takes_no_more_is_one_line_that_says_what_to_do(cache: Path) -> None:
    def fill(_: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheUnusable) as caught:
        kept_folder("thing", fill)
    assert str(caught.value) == (
        f"{cache}: [Errno 28] No space left on device; free space there, or set $CHAIRLIFT_CACHE_DIR"
    )


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CHAIRLIFT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(CacheUnusable, match=r"file/cache: \[Errno 20\] Not a directory: "):
        kept_folder("thing", Writer())
