"""The inputs of the guided fuzzer: the name of a file of the corpus, a zero byte, and what stands in its place."""

from collections.abc import Iterator
from functools import cache
from random import Random

from tests.fuzz.cases import CORPUS, list_files
from tests.fuzz.mutations import mutate

_END = b"\0"


def join(name: str, content: bytes) -> bytes:
    """Writes an input."""
    return name.encode() + _END + content


def split(data: bytes) -> tuple[str, bytes] | None:
    """Reads an input. None if it names no file of the corpus."""
    name, end, content = data.partition(_END)
    known = _names().get(name)
    return (known, content) if end and known is not None else None


def seeds(only: str) -> Iterator[tuple[str, bytes]]:
    """The corpus as it is: the files that have this in their names, and their content."""
    for name in list_files():
        if only in name:
            yield name, (CORPUS / name).read_bytes()


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """Changes an input by its format. What names no file becomes a file of the corpus."""
    rng = Random(seed)
    name, content = split(data) or rng.choice(list(seeds("")))
    return join(name, mutate(name, content, rng))[:most]


def crossed(one: bytes, other: bytes, most: int, seed: int) -> bytes:
    """Puts a part of one input into another, if both are in place of files of one kind."""
    rng, first, second = Random(seed), split(one), split(other)
    if first is None or second is None or first[0].rpartition(".")[2] != second[0].rpartition(".")[2]:
        return one[:most]
    begin, end = sorted(rng.randrange(len(first[1]) + 1) for _ in range(2))
    part = rng.randrange(len(second[1]) + 1)
    inserted = second[1][part : part + max(end - begin, rng.randrange(64))]
    return join(first[0], first[1][:begin] + inserted + first[1][end:])[:most]


@cache
def _names() -> dict[bytes, str]:
    return {name.encode(): name for name in list_files()}
