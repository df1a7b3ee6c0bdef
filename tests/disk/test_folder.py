"""Files of saved prefixes: found by exactly their tokens and salt, believed only if whole, and evicted in turn."""

import logging
import os
import random
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift.cache.prefixes import pack_tokens
from chairlift.disk.entry import SCRATCH
from chairlift.disk.folder import Item, PrefixFolder, segment_item
from chairlift.disk.keys import PrefixKeys
from chairlift.disk.reader import ItemToRead, Order, PrefixReader
from chairlift.disk.root import PrefixRoot
from chairlift.disk.writer import PrefixWriter, Save
from chairlift.errors import ConfigurationError
from chairlift.plan import SavedPart

FACTS = {"model": "one"}
SIZE = 200  # bytes of a segment here
FILE_SIZE = 284  # with the header
TOKENS = list(range(1000, 1200))


def opened(path: Path, facts: dict[str, str] = FACTS, max_bytes: int = 10**6) -> PrefixFolder:
    return PrefixFolder(PrefixRoot(path), facts, max_bytes)


def keys_of(folder: PrefixFolder, tokens: list[int] = TOKENS, salt: str = "") -> PrefixKeys:
    return folder.keys.of_segments(pack_tokens(tokens), salt)


def save(folder: PrefixFolder, used_ns: int = 10**18, tokens: list[int] = TOKENS, salt: str = "") -> PrefixKeys:
    """Saves all whole segments of these tokens."""
    keys = keys_of(folder, tokens, salt)
    for index in range(keys.num_segments):
        folder.write(segment_item(keys, index), [bytes([index]) * 150, b"x" * 50], used_ns)
    return keys


def test_what_was_saved_is_found_by_its_first_tokens_after_a_restart(tmp_path: Path) -> None:
    save(opened(tmp_path))
    folder = opened(tmp_path)
    keys = keys_of(folder)
    assert (keys.num_segments, folder.count_segments(keys), folder.num_bytes) == (3, 3, 3 * FILE_SIZE)
    content = folder.read(segment_item(keys, 1), SIZE)
    assert content is not None
    assert content == b"\1" * 150 + b"x" * 50
    assert folder.count_segments(keys_of(folder, [*TOKENS[:130], *[7] * 70])) == 2
    assert folder.count_segments(keys_of(folder, [7, *TOKENS[1:]])) == 0


@pytest.mark.parametrize("difference", ["salt", "facts", "secret"])
def test_another_salt_model_or_secret_finds_nothing(tmp_path: Path, difference: str) -> None:
    save(opened(tmp_path), salt="mine")
    if difference == "secret":
        (tmp_path / "secret").write_bytes(bytes(32))
    folder = opened(tmp_path, {"model": "two"} if difference == "facts" else FACTS)
    assert folder.count_segments(keys_of(folder, salt="yours" if difference == "salt" else "mine")) == 0


def test_states_are_found_at_any_token_the_longest_first(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    keys = save(folder)
    for num_tokens in (64, 70, 150):
        folder.write(folder.state_item(keys, num_tokens), [b"s" * 30], 10**18)
    folder = opened(tmp_path)
    found = [folder.find_state(keys, 3, most) for most in (200, 149, 69, 63)]
    assert [item and 64 * item.depth + item.num_tokens for item in found] == [150, 70, 64, None]
    assert folder.find_state(keys_of(folder, [*TOKENS[:148], 1, 2, 3]), 2, 200) == folder.state_item(keys, 70)


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(FILE_SIZE)])


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.randint(1, 9)))


def overwrite(path: Path, chance: random.Random) -> None:
    begin = chance.randrange(FILE_SIZE - 8)
    content = bytearray(path.read_bytes())
    content[begin : begin + 8] = chance.randbytes(8)
    path.write_bytes(content)


def swap(path: Path, _: random.Random) -> None:
    other = next(each for each in path.parent.glob("*.kv") if each != path)
    shutil.copy(other, path)


def link(path: Path, _: random.Random) -> None:
    other = next(each for each in path.parent.glob("*.kv") if each != path)
    path.unlink()
    path.symlink_to(other)


def replace_by_directory(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


CHANGES = [flip, cut, lengthen, overwrite, swap, link, replace_by_directory]


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
def test_a_changed_file_is_not_used(
    tmp_path: Path, change: Callable[[Path, random.Random], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder, chance = opened(tmp_path), random.Random(change.__name__)
    for _ in range(150):
        keys = save(folder)
        item = segment_item(keys, 1)
        path = folder.path / item.name
        change(path, chance)
        caplog.clear()
        assert folder.read(item, SIZE) is None
        assert len(caplog.records) == 1, "one line each"
        assert folder.count_segments(keys) == 1
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)


def test_a_file_of_another_cache_is_not_used(tmp_path: Path) -> None:
    folder, other = opened(tmp_path), opened(tmp_path, {"model": "two"})
    own, foreign = save(folder), save(other)
    shutil.copy(other.path / segment_item(foreign, 0).name, folder.path / segment_item(own, 0).name)
    assert folder.read(segment_item(own, 0), SIZE) is None


def test_the_prompt_that_was_not_used_for_longest_is_evicted_from_its_end(tmp_path: Path) -> None:
    other = opened(tmp_path, {"model": "two"})
    save(other, used_ns=3 * 10**18)
    folder, old, new = opened(tmp_path, max_bytes=6 * FILE_SIZE), list(range(200)), list(range(500, 700))
    save(folder, used_ns=10**18, tokens=old)
    save(folder, used_ns=2 * 10**18, tokens=new)
    counts = [folder.count_segments(keys_of(folder, tokens)) for tokens in (old, new)]
    other.refresh()
    assert (counts, other.count_segments(keys_of(other))) == ([0, 3], 3)


def test_a_prompt_that_is_too_long_keeps_its_beginning(tmp_path: Path) -> None:
    folder = opened(tmp_path, max_bytes=2 * FILE_SIZE)
    keys = save(folder)
    assert (folder.count_segments(keys), folder.num_bytes) == (2, 2 * FILE_SIZE)


def test_what_is_used_again_stays(tmp_path: Path) -> None:
    folder = opened(tmp_path, max_bytes=5 * FILE_SIZE)
    old, middle, new = ([first, *range(150)] for first in (1, 2, 3))
    for number, tokens in enumerate((old, middle)):
        save(folder, used_ns=(number + 1) * 10**18, tokens=tokens)
    keys = keys_of(folder, old)
    folder.touch([segment_item(keys, 0), segment_item(keys, 1)], 3 * 10**18)
    save(folder, used_ns=4 * 10**18, tokens=new)
    assert [folder.count_segments(keys_of(folder, tokens)) for tokens in (old, middle, new)] == [2, 0, 2]


def test_several_processes_see_and_replace_each_others_files(tmp_path: Path) -> None:
    first, second = opened(tmp_path), opened(tmp_path)
    keys = save(first)
    assert second.count_segments(keys) == 0
    second.refresh()
    assert second.count_segments(keys) == 3
    second.clear()
    assert first.read(segment_item(keys, 0), SIZE) is None  # a miss, and no error


def test_what_was_left_half_written_is_ignored_and_removed_later(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    keys = save(folder)
    left = folder.path / f"{segment_item(keys, 0).name}.0123{SCRATCH}"
    left.write_bytes(b"half")
    assert opened(tmp_path).num_bytes == 3 * FILE_SIZE
    os.utime(left, (0, 0))
    opened(tmp_path)
    assert not left.exists()


def test_files_are_the_owners_and_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path / "own")
    save(folder)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "own").rglob("*") if path.is_file()}
    assert modes == {0o600}
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(ConfigurationError, match="other users can write to"):
        opened(tmp_path / "own")


def test_a_damaged_secret_is_replaced_and_nothing_is_found(tmp_path: Path) -> None:
    save(opened(tmp_path))
    (tmp_path / "secret").write_bytes(b"short")
    folder = opened(tmp_path)
    assert folder.count_segments(keys_of(folder)) == 0
    assert len((tmp_path / "secret").read_bytes()) == 32


def order(ticket: int, keys: PrefixKeys) -> Order:
    items = (segment_item(keys, index) for index in range(keys.num_segments))
    return Order(ticket, tuple(ItemToRead(item, 64 * item.depth, 64 * item.depth + 64, SIZE) for item in items))


def test_a_reader_gives_parts_up_to_the_first_that_is_lost(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    keys = save(folder)
    (folder.path / segment_item(keys, 1).name).unlink()
    reader = PrefixReader(folder, lambda *_: None)
    reader.begin(order(5, keys))
    parts = list[SavedPart]()
    while not parts or not parts[-1].is_last:
        reader.wait(5.0)
        parts += reader.take(0)
    reader.stop()
    assert [(part.start, part.end, part.content is None) for part in parts] == [(0, 64, False), (64, 64, True)]


def test_nothing_comes_of_what_was_cancelled(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    keys = save(folder)
    reader = PrefixReader(folder, lambda *_: None)
    reader.begin(order(1, keys))
    reader.cancel(1)
    reader.begin(order(2, keys))
    parts = list[SavedPart]()
    while len(parts) < 3:
        reader.wait(5.0)
        parts += reader.take(10**6)
    reader.stop()
    assert {part.ticket for part in parts} == {2}


def test_a_writer_warns_once_when_its_directory_has_vanished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = opened(tmp_path / "here")
    keys = keys_of(folder)
    shutil.rmtree(tmp_path / "here")
    written = list[int]()
    writer = PrefixWriter(folder, lambda num_bytes, _: written.append(num_bytes))
    with caplog.at_level(logging.WARNING):
        for index in range(3):
            writer.submit(Save(segment_item(keys, index), lambda: [b"x" * SIZE], SIZE, 10**18))
        writer.wait(5.0, until_idle=True)
    writer.stop()
    assert (written, writer.is_paused, len(caplog.records)) == ([], True, 1)
    assert "No such file or directory" in caplog.text


def test_readers_and_writers_share_a_folder(tmp_path: Path) -> None:
    """Whatever another thread evicts meanwhile, what is read is what was written."""
    folder = opened(tmp_path, max_bytes=20 * FILE_SIZE)
    found = list[bytearray | None]()

    def read() -> None:
        chance = random.Random(0)
        for _ in range(300):
            first = chance.randrange(10)
            item: Item = segment_item(keys_of(folder, [first] * 64), 0)
            content = folder.read(item, SIZE) if folder.has(item) else None
            found.append(content)
            assert content in (None, bytes([first]) * SIZE)

    reading = threading.Thread(target=read)
    reading.start()
    for number in range(100):
        first = number % 10
        folder.write(segment_item(keys_of(folder, [first] * 64), 0), [bytes([first]) * SIZE], number * 10**9)
    reading.join()
    assert len(found) == 300
