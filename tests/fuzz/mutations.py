"""Damages files as a hostile author or a broken disk would: any bytes, and the fields of the formats that are read.

A mutation depends on its random numbers alone, so that a case can be made again from its number.
"""

import json
import struct
from collections.abc import Callable
from pathlib import PurePath
from random import Random

from tests.fuzz.gguf_layout import Field, fields_of
from tests.fuzz.values import ODD_TEXTS, change_json, odd_bytes, odd_integer, written

_BYTES_SHARE = 0.25  # of mutations that know nothing of the format
_MOST_CHANGES = 3
_LENGTH = struct.Struct("<Q")
_KEY_TYPES = tuple(range(14))  # those of GGUF's values, and one more


def mutate(name: str, content: bytes, rng: Random) -> bytes:
    """Returns the file's content with one to three changes. `name`: the file's, whose ending tells the format."""
    change = _CHANGES.get(PurePath(name).suffix, change_bytes)
    for _ in range(rng.randrange(1, _MOST_CHANGES + 1)):
        content = (change_bytes if rng.random() < _BYTES_SHARE else change)(content, rng)
    return content


def change_bytes(content: bytes, rng: Random) -> bytes:
    """Overwrites, removes, repeats or inserts some bytes, or cuts the end off."""
    if not content:
        return rng.randbytes(rng.randrange(16))
    start = rng.randrange(len(content))
    if rng.random() < 0.5:
        start = min(start, rng.randrange(400))  # headers are where the numbers are
    size = rng.choice((1, 1, 2, 4, 8, 64))
    match rng.randrange(6):
        case 0:
            return content[:start] + bytes([content[start] ^ 1 << rng.randrange(8)]) + content[start + 1 :]
        case 1:
            return content[:start] + odd_bytes(rng, size) + content[start + size :]
        case 2:
            return content[:start] + content[start + size :]
        case 3:
            return content[: start + size] + content[start:]
        case 4:
            return content[:start] + rng.randbytes(size) + content[start:]
        case _:
            return content[: rng.choice((start, len(content) - 1, len(content) // 2))]


def _change_text(content: bytes, rng: Random) -> bytes:
    """Puts pieces of it elsewhere, as in templates."""
    start, other = rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)
    inserted = rng.choice((content[other : other + 40], rng.choice(ODD_TEXTS[:-1]).encode()))
    return content[:start] + inserted + content[start + rng.choice((0, len(inserted))) :]


def _change_json_file(content: bytes, rng: Random) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):  # an earlier change made it none
        return change_bytes(content, rng)
    return written(change_json(value, rng))


def _change_safetensors(content: bytes, rng: Random) -> bytes:
    """Changes the header's length, the header, or the numbers of the tensors."""
    if len(content) < _LENGTH.size:
        return change_bytes(content, rng)
    (length,) = _LENGTH.unpack_from(content)
    header, data = content[_LENGTH.size : _LENGTH.size + length], content[_LENGTH.size + length :]
    action = rng.randrange(8)
    if action == 0:
        return odd_bytes(rng, _LENGTH.size) + header + data
    if action == 1 and data:
        start = rng.randrange(len(data))
        return content[: _LENGTH.size + length] + data[:start] + odd_bytes(rng, 4) + data[start + 4 :]
    if action == 2:
        data = rng.choice((data + rng.randbytes(8), data[: len(data) // 2], b""))
    try:
        described = json.loads(header)
        described = _change_tensor(described, rng) if rng.random() < 0.5 else change_json(described, rng)
    except (ValueError, RecursionError):
        return change_bytes(content, rng)
    header = written(described)
    length = len(header) + (rng.randrange(-9, 9) if rng.random() < 0.1 else 0)
    return _LENGTH.pack(max(0, length)) + header + data


def _change_tensor(described: object, rng: Random) -> object:
    """Changes what a header says of one tensor: its type, shape or place, or moves dimensions to another product."""
    names = [name for name in described if name != "__metadata__"] if isinstance(described, dict) else []
    if not isinstance(described, dict) or not names:
        return change_json(described, rng)
    tensor = described[rng.choice(names)]
    try:
        match rng.randrange(5):
            case 0:
                tensor["dtype"] = rng.choice(("F64", "F32", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64"))
            case 1:
                tensor["shape"] = rng.choice(
                    ([], [0], tensor["shape"][::-1], [*tensor["shape"], 1], [2**32, 2**32], [2**63, 2], [1] * 70)
                )
            case 2:
                tensor["shape"][rng.randrange(len(tensor["shape"]))] = odd_integer(rng)
            case 3:
                tensor["data_offsets"][rng.randrange(2)] += rng.choice((-64, -1, 1, 64, 2**40, -(2**40), 2**63))
            case _:
                tensor["data_offsets"] = list(described[rng.choice(names)]["data_offsets"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # an earlier change took it away
        return change_json(described, rng)
    return described


def _change_gguf(content: bytes, rng: Random) -> bytes:
    """Writes over one field of the header. Kinds of fields are equally likely, however many a file has of each."""
    by_kind: dict[str, list[Field]] = {}
    for field in fields_of(content):
        by_kind.setdefault(field.kind, []).append(field)
    if not by_kind:
        return change_bytes(content, rng)
    fields = by_kind[rng.choice(sorted(by_kind))]
    field, other = rng.choice(fields), rng.choice(fields)
    old = content[field.start : field.start + field.size]
    if field.kind == "text":
        return _with_text(content, field, rng.choice((content[other.start : other.start + other.size], _odd_text(rng))))
    if field.kind == "type":
        new = _LENGTH.pack(rng.choice(_KEY_TYPES))[: field.size]
    elif rng.random() < 0.3:
        new = ((int.from_bytes(old, "little") + rng.choice((-32, -1, 1, 32))) % 256**field.size).to_bytes(
            field.size, "little"
        )
    else:
        new = odd_bytes(rng, field.size)
    return content[: field.start] + new + content[field.start + field.size :]


def _odd_text(rng: Random) -> bytes:
    return rng.choice((*(text.encode() for text in ODD_TEXTS[:-1]), b"\xff\xfe", b"Llama", b"general.alignment"))


def _with_text(content: bytes, field: Field, text: bytes) -> bytes:
    """Another text behind its length. What follows it moves, so the tensors are elsewhere than the header says."""
    start = field.start - _LENGTH.size
    return content[:start] + _LENGTH.pack(len(text)) + text + content[field.start + field.size :]


_CHANGES: dict[str, Callable[[bytes, Random], bytes]] = {
    ".json": _change_json_file,
    ".safetensors": _change_safetensors,
    ".gguf": _change_gguf,
    ".jinja": _change_text,
}
