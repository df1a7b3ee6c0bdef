"""`chairlift cache` lists and removes what servers have saved."""

from pathlib import Path

import pytest

from chairlift.__main__ import main
from tests.disk.test_folder import FILE_SIZE, keys_of, opened, save


def test_caches_are_listed_and_removed_by_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = opened(tmp_path), opened(tmp_path, {"model": "two", "version": "9"})
    save(one, used_ns=2 * 10**18)
    save(two, used_ns=10**18)
    assert main(["cache", str(tmp_path)]) == 0
    first, second, total = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{one.identity[:8]}  {3 * FILE_SIZE} bytes  3 files  2033-05-18")
    assert (second.split("  ")[-1], total) == ("two, 9", "1.66 KiB saved in 2 caches")
    assert main(["cache", str(tmp_path), "--clear", "--only", two.identity[:6]]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{3 * FILE_SIZE} bytes removed in 1 cache"
    one.refresh()
    assert (one.count_segments(keys_of(one)), two.path.exists()) == (3, False)


def test_a_server_saves_again_after_its_cache_was_removed(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    save(folder)
    assert main(["cache", str(tmp_path), "--clear"]) == 0
    folder.refresh()
    assert folder.count_segments(keys_of(folder)) == 0
    keys = save(folder)
    assert opened(tmp_path).count_segments(keys) == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["/nowhere/at/all"], "/nowhere/at/all: No such file or directory"),
        (["{}", "--only", "zz"], "no cache in {} has an id that begins with zz"),
    ],
)
def test_what_is_not_there_is_an_error(
    tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", *(flag.format(tmp_path) for flag in flags)]) == 2
    assert capsys.readouterr().err == f"chairlift: error: {message.format(tmp_path)}\n"
