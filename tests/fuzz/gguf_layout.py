"""Finds the fields of a GGUF file's header, so that a mutation changes one and leaves the others where they are."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_TEXT, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes, by the type of a number
_HEADER = (("magic", 4), ("version", 4), ("number of tensors", 8), ("number of keys", 8))
_MOST_ELEMENTS = 2000  # of an array that are told apart; those behind them are left out


@dataclass(frozen=True, slots=True)
class Field:
    """A number or text of a header. Its length and type are fields of their own."""

    kind: str
    start: int
    size: int  # bytes


def fields_of(content: bytes) -> list[Field]:
    """All fields up to where the header ends, or makes no sense any more."""
    found = []
    try:
        for field in _Walk(content).fields():
            found.append(field)  # noqa: PERF402 - what was found before an error counts
    except (struct.error, KeyError):
        pass
    return found


class _Walk:
    """Reads a header from its beginning. struct.error where the file ends, KeyError for a type that is not known."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0

    def fields(self) -> Iterator[Field]:
        for kind, size in _HEADER:
            yield self._field(kind, size)
        num_tensors, num_keys = struct.unpack_from("<2Q", self._content, 8)
        for _ in range(num_keys):
            yield from self._text()
            yield self._field("type", 4)
            yield from self._value(self._last(4))
        for _ in range(num_tensors):
            yield from self._text()
            yield self._field("number of dimensions", 4)
            for _ in range(self._last(4)):
                yield self._field("dimension", 8)
            yield self._field("type of a tensor", 4)
            yield self._field("offset", 8)

    def _value(self, kind: int) -> Iterator[Field]:
        if kind == _TEXT:
            yield from self._text()
        elif kind == _ARRAY:
            yield self._field("type", 4)
            of = self._last(4)
            yield self._field("number of elements", 8)
            for index in range(self._last(8)):
                for field in self._value(of):
                    if index < _MOST_ELEMENTS:
                        yield field
        else:
            yield self._field("number", _SIZES[kind])

    def _text(self) -> Iterator[Field]:
        yield self._field("length", 8)
        yield self._field("text", self._last(8))

    def _field(self, kind: str, size: int) -> Field:
        if self._place + size > len(self._content):
            raise struct.error("the file ends here")
        field = Field(kind, self._place, size)
        self._place += size
        return field

    def _last(self, size: int) -> int:
        """The number that was taken last."""
        return int.from_bytes(self._content[self._place - size : self._place], "little")
