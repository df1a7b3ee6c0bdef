"""The files of one cache. An index of their names is kept in memory, so that a lookup waits for no disk.

    <key>.kv                     the keys and values of the segment that ends with this key
    <key>.<nn>.<key>.state       the recurrent state `nn` tokens after the segment with the first key, and the keys and
                                 values of these tokens; the second key is its own

A file's time of modification says when it was last used. In a prefix, later segments count as used a little earlier, so
that what is evicted first is an end and not a beginning, without which the rest is of no use. The index learns of other
processes' files now and then (`refresh`); a file that has gone meanwhile is a miss.
"""

import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from chairlift.disk.entry import HEADER_BYTES, SCRATCH, Bytes, Damaged, Label, read_entry, write_entry
from chairlift.disk.keys import SEGMENT_TOKENS, KeyMaker, PrefixKeys
from chairlift.disk.root import SECRET_BYTES, PrefixRoot, files_of

logger = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT}
_KEPT_SHARE = 0.95  # of the budget, after an eviction
_SCRATCH_S = 600.0  # so old, a file that is being written has been left by a process that was killed
_STATE_NAME = re.compile(r"([0-9a-f]{32})\.([0-9]{2})\.[0-9a-f]{32}\.state")
_STEP_NS = 1000  # by which each further segment of a prefix counts as used earlier


@dataclass(frozen=True, slots=True)
class Item:
    """A file that is there or may be: a segment, or a state with the tokens that lead to it."""

    name: str
    key: bytes
    num_tokens: int  # whose keys and values it has
    depth: int  # segments before it
    has_state: bool = False


def segment_item(keys: PrefixKeys, index: int) -> Item:
    """Names the segment with this number."""
    key = keys.ends[index + 1]
    return Item(f"{key.hex()}.kv", key, SEGMENT_TOKENS, index)


class PrefixFolder:
    """The files of a cache. Any thread may ask; only one thread may write."""

    def __init__(self, root: PrefixRoot, facts: Mapping[str, str], max_bytes: int) -> None:
        """`max_bytes`: that all caches of the directory may take together. OSError if it cannot be used."""
        secret = root.prepare()
        self.root, self.path, self._max_bytes = root, root.folder_of(facts), max_bytes
        self.identity, self._facts = self.path.name, facts
        self._secret = blake2b(self.identity.encode(), key=secret, digest_size=SECRET_BYTES).digest()
        self.keys = KeyMaker(self._secret)
        self._lock = threading.Lock()
        self._used: dict[str, int] = {}  # by name: when it was last used, in ns
        self._sizes: dict[str, int] = {}
        self._states: dict[bytes, set[int]] = {}  # by a segment's key: tokens behind it after which there is a state
        self._num_bytes = 0  # their sum
        self._num_foreign_bytes = 0  # of other caches
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """Bytes of this cache's files."""
        return self._num_bytes

    def has(self, item: Item) -> bool:
        """Returns true if the file was there when the index was last renewed, or was written since."""
        return item.name in self._used

    def used_before(self, item: Item, ns: int) -> bool:
        """Returns true if the file was not used since then."""
        return self._used.get(item.name, ns) < ns

    def count_segments(self, keys: PrefixKeys) -> int:
        """Counts the first segments that are there."""
        used = self._used
        missing = (index for index in range(keys.num_segments) if segment_item(keys, index).name not in used)
        return next(missing, keys.num_segments)

    def state_item(self, keys: PrefixKeys, num_tokens: int) -> Item:
        """Names the state after the first `num_tokens` tokens."""
        depth, rest = divmod(num_tokens, SEGMENT_TOKENS)
        key = self.keys.of_state(keys, num_tokens)
        return Item(f"{keys.ends[depth].hex()}.{rest:02}.{key.hex()}.state", key, rest, depth, has_state=True)

    def find_state(self, keys: PrefixKeys, num_segments: int, most: int) -> Item | None:
        """Finds the longest state after at most `most` tokens whose segments are the first `num_segments`, or fewer."""
        for depth in range(num_segments, -1, -1):
            with self._lock:
                rests = sorted(self._states.get(keys.ends[depth], ()), reverse=True)
            for rest in rests:
                num_tokens = depth * SEGMENT_TOKENS + rest
                if 0 < num_tokens <= most and self.has(item := self.state_item(keys, num_tokens)):
                    return item
        return None

    def read(self, item: Item, num_bytes: int) -> bytearray | None:
        """Reads a file's content of `num_bytes` bytes. None if it is gone, or damaged, which is logged."""
        path = self.path / item.name
        try:
            return read_entry(path, self._label(item, num_bytes), self._secret)
        except Damaged as error:
            logger.warning("%s is not used and removed: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        except FileNotFoundError:  # another process has evicted it
            pass
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error.strerror)
        self._forget(item.name)
        return None

    def write(self, item: Item, content: Sequence[Bytes], used_ns: int) -> int:
        """Writes a file and returns its size; evicts what was not used for longer, if need be.

        Returns 0 if everything else was used later. OSError if it fails, or the disk is full of something else.
        """
        self._restore_folder()
        num_bytes = sum(len(memoryview(part).cast("B")) for part in content)
        used_ns -= item.depth * _STEP_NS
        room = self._max_bytes - HEADER_BYTES - num_bytes
        if self._num_foreign_bytes + self.num_bytes > room and not self.evict(room, used_ns):
            return 0
        path = self.path / item.name
        try:
            size = write_entry(path, self._label(item, num_bytes), content, self._secret)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self.evict(self.num_bytes - num_bytes, used_ns)
            size = write_entry(path, self._label(item, num_bytes), content, self._secret)
        self._note(item.name, size, used_ns)
        self._date(item.name, used_ns)
        return size

    def touch(self, items: Iterable[Item], used_ns: int) -> None:
        """Records that files are used. That some cannot be dated is no matter: they are evicted sooner."""
        for item in items:
            if self.has(item):
                self._used[item.name] = used_ns - item.depth * _STEP_NS
                self._date(item.name, self._used[item.name])

    def refresh(self) -> None:
        """Renews the index, and removes what killed processes have left half written. OSError if that fails."""
        self._restore_folder()
        oldest = time.time_ns() - int(_SCRATCH_S * 1e9)
        found = list(files_of(self.path))
        for file in found:
            if file.path.name.endswith(SCRATCH) and file.used_ns < oldest:
                with contextlib.suppress(OSError):
                    file.path.unlink(missing_ok=True)
        own = {file.path.name: file for file in found if not file.path.name.endswith(SCRATCH)}
        others = [file for folder in self.root.folders() if folder != self.path for file in files_of(folder)]
        with self._lock:
            self._used = {name: file.used_ns for name, file in own.items()}
            self._sizes = {name: file.num_bytes for name, file in own.items()}
            self._num_bytes = sum(self._sizes.values())
            self._states = {}
            for name in own:
                self._note_state(name)
            self._num_foreign_bytes = sum(file.num_bytes for file in others)

    def evict(self, most: int, before_ns: int) -> bool:
        """Removes files of any cache that were last used before, the first of them first, until all have `most` bytes
        or a little less.

        False if all have more in the end, as when another process is at it. OSError if that fails.
        """
        with self.root.locked() as is_held:
            if not is_held:
                return False
            files = [file for folder in self.root.folders() for file in files_of(folder)]
            files.sort(key=lambda file: file.used_ns)
            num_bytes = sum(file.num_bytes for file in files)
            goal = most if num_bytes <= most else max(0, most) * _KEPT_SHARE
            for file in files:
                if num_bytes <= goal or file.used_ns >= before_ns:
                    break
                file.path.unlink(missing_ok=True)
                num_bytes -= file.num_bytes
        self.refresh()
        return num_bytes <= most

    def hide(self, items: Iterable[Item]) -> None:
        """Takes files out of the index, before `remove`."""
        for item in items:
            self._forget(item.name)

    def remove(self, items: Iterable[Item]) -> None:
        """Removes files. OSError if that fails."""
        for item in items:
            (self.path / item.name).unlink(missing_ok=True)
            self._forget(item.name)

    def forget(self) -> None:
        """Empties the index, before `clear`."""
        with self._lock:
            self._used, self._sizes, self._states, self._num_bytes = {}, {}, {}, 0

    def clear(self) -> None:
        """Removes all files. OSError if that fails."""
        self.forget()
        for file in list(files_of(self.path)):
            file.path.unlink(missing_ok=True)

    def measure(self, num_bytes: int) -> float | None:
        """Returns the seconds in which a file of so many bytes is read, once it was written. None if that fails."""
        item = Item(f"measure.{os.getpid()}{SCRATCH}", bytes(16), 0, 0)
        label = self._label(item, num_bytes)
        try:
            write_entry(self.path / item.name, label, [bytes(num_bytes)], self._secret)
            begin = time.perf_counter()
            read_entry(self.path / item.name, label, self._secret)
            return time.perf_counter() - begin
        except (OSError, Damaged):
            return None
        finally:
            with contextlib.suppress(OSError):
                (self.path / item.name).unlink(missing_ok=True)

    def _restore_folder(self) -> None:
        """Makes the folder again if somebody has removed it from the directory (`chairlift cache --clear`)."""
        if not self.path.is_dir() and self.root.has_secret:
            self.root.folder_of(self._facts)

    def _label(self, item: Item, num_bytes: int) -> Label:
        return Label(bytes.fromhex(self.identity), item.key, item.num_tokens, num_bytes)

    def _date(self, name: str, used_ns: int) -> None:
        with contextlib.suppress(OSError):
            os.utime(self.path / name, ns=(used_ns, used_ns))

    def _note(self, name: str, size: int, used_ns: int) -> None:
        with self._lock:
            self._num_bytes += size - self._sizes.get(name, 0)
            self._used[name], self._sizes[name] = used_ns, size
            self._note_state(name)

    def _note_state(self, name: str) -> None:
        if (found := _STATE_NAME.fullmatch(name)) is not None:
            self._states.setdefault(bytes.fromhex(found[1]), set()).add(int(found[2]))

    def _forget(self, name: str) -> None:
        with self._lock:
            self._used.pop(name, None)
            self._num_bytes -= self._sizes.pop(name, 0)
