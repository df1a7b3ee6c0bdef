"""One file of a cache: a header of fixed size, and the bytes of a segment or of a state behind it.

    magic, format, tokens, cache, key, size and CRC-32 of the content | keyed hash of these | content

A file is believed only if all of that is as expected: its size before a byte of it is read, its header by the secret
of the directory, its content by the checksum. So a file that was cut, changed, renamed or brought from another cache
is refused.
"""

import os
import stat
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex

FORMAT = 1
"""Numbers the format of files. It is a part of the identity of a cache, so each format has a directory of its own."""

_MAGIC = b"chairlift-prefix"
_FIELDS = struct.Struct("<16sII16s16sQI")
_HASH_BYTES = 16
HEADER_BYTES = _FIELDS.size + _HASH_BYTES

Bytes = bytes | bytearray | memoryview


class Damaged(Exception):
    """A file whose content must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Label:
    """Says what a file must hold."""

    cache: bytes  # the identity of the cache, 16 bytes
    key: bytes  # of the tokens, 16 bytes
    num_tokens: int
    num_bytes: int  # of the content


def write_entry(path: Path, label: Label, content: Sequence[Bytes], secret: bytes) -> int:
    """Writes a file beside its place and renames it, so that it is there whole or not at all. Returns its size.

    OSError if that fails; then nothing is left of it.
    """
    checksum = 0
    for part in content:
        checksum = zlib.crc32(part, checksum)
    header = _header(label, checksum, secret)
    aside = path.with_name(f"{path.name}.{token_hex(4)}{SCRATCH}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            num_written = sum(_write(descriptor, part) for part in (header, *content))
        finally:
            os.close(descriptor)
        assert num_written == HEADER_BYTES + label.num_bytes, "the content has the size that was announced"
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return num_written


def read_entry(path: Path, label: Label, secret: bytes) -> bytearray:
    """Reads the content of a file. Damaged if it is not as the label says; OSError if it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise Damaged("it is no file")
        if info.st_size != HEADER_BYTES + label.num_bytes:
            raise Damaged(f"it has {info.st_size} bytes, not {HEADER_BYTES + label.num_bytes}")
        header, content = bytearray(HEADER_BYTES), bytearray(label.num_bytes)
        _read(descriptor, header)
        _read(descriptor, content)
    finally:
        os.close(descriptor)
    checksum = _FIELDS.unpack_from(header)[-1]
    if bytes(header) != _header(label, checksum, secret):
        raise Damaged("its header is of something else")
    if zlib.crc32(content) != checksum:
        raise Damaged("its checksum is wrong")
    return content


SCRATCH = ".writing"
"""Ends the names of files that are being written."""


def _header(label: Label, checksum: int, secret: bytes) -> bytes:
    fields = _FIELDS.pack(_MAGIC, FORMAT, label.num_tokens, label.cache, label.key, label.num_bytes, checksum)
    return fields + blake2b(fields, key=secret, digest_size=_HASH_BYTES).digest()


def _write(descriptor: int, content: Bytes) -> int:
    left = memoryview(content).cast("B")
    num_bytes = len(left)
    while left:
        left = left[os.write(descriptor, left) :]
    return num_bytes


def _read(descriptor: int, into: bytearray) -> None:
    """Fills the buffer. Damaged if the file ends before."""
    left = memoryview(into)
    while left:
        count = os.readv(descriptor, [left])
        if not count:
            raise Damaged("it was cut while it was read")
        left = left[count:]
