"""Reads what the documents say of the road: the files that ARCHITECTURE.md names, and sentences with its length."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ENGINE = ("cache", "scheduler", "models", "engine")
"""The packages that are the engine."""

_HEADING = "## The token's road\n"
_NAMED = re.compile(r"`((?:csrc/)?[\w/]+\.(?:py|cpp|h))`")
_BEGIN, _END = "<!-- road: python tools/write_road.py -->", "<!-- end of road -->"
_BLOCK = re.compile(f"{re.escape(_BEGIN)}\n(.*?)\n{re.escape(_END)}", re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*")
_EXACT_BELOW = 200  # numbers of files, which are written as they are
_TOLERANCE, _ROUNDING = 0.05, 100  # of a number of lines, and in lines: beyond both a document is stale
_SOURCES = ("*.py", "*.cpp", "*.h")
_NATIVE, _SHORT = "models/cpu/csrc/", "csrc/"


def named_files(root: Path) -> list[str]:
    """The files that ARCHITECTURE.md names on the road, as paths below `chairlift/`, in the order of the walk."""
    text = (root / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition(_HEADING)[2].partition("\n## ")[0]
    names = (re.sub(f"^{_SHORT}", _NATIVE, name) for name in _NAMED.findall(section))
    return list(dict.fromkeys(names))


def num_lines(paths: Iterable[Path]) -> int:
    """Counts the lines of all these files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@dataclass(frozen=True, slots=True)
class Length:
    """Holds how long a part of the road is: its files, their lines, and how many of these a chat runs."""

    num_files: int
    num_lines: int
    num_run: int


@dataclass(frozen=True, slots=True)
class Road:
    """Holds the lines that ran, by path below `chairlift/`, and where that package is."""

    lines: dict[str, list[int]]
    package: Path

    def length(self, *, is_native: bool) -> Length:
        """Returns the length of the part in C++, or of that in Python."""
        part = {name: ran for name, ran in self.lines.items() if name.startswith(_NATIVE) is is_native}
        return Length(len(part), num_lines(self.package / name for name in part), sum(map(len, part.values())))

    def sentence(self) -> str:
        """Says how much of the code a chat runs, with lines rounded to hundreds."""
        python, native = self.length(is_native=False), self.length(is_native=True)
        engine = num_lines(path for name in ENGINE for kind in _SOURCES for path in (self.package / name).rglob(kind))
        return (
            f"The engine (`cache/`, `scheduler/`, `models/`, `engine/`) has {_rounded(engine)} lines. One streamed chat"
            f" passes through\n{python.num_files} files of Python with {_rounded(python.num_lines)} lines, of which it"
            f" runs {_rounded(python.num_run)}, and on a CPU through {native.num_files} files of C++ with"
            f" {_rounded(native.num_lines)}\nlines, of which it runs {_rounded(native.num_run)}."
        )

    def faults(self, root: Path) -> list[str]:
        """Lists where ARCHITECTURE.md names other files than those that ran."""
        named = set(named_files(root))
        missing = [
            f"ARCHITECTURE.md does not name {name}, which a chat runs" for name in self.lines if name not in named
        ]
        idle = [f"ARCHITECTURE.md names {name}, which no chat runs" for name in sorted(named - self.lines.keys())]
        return missing + idle


def is_current(text: str, sentence: str) -> bool:
    """Returns true if a document has the sentence, its numbers about right. ValueError if it has no place for one."""
    written = _BLOCK.search(text)
    if written is None:
        raise ValueError(f"a document lacks {_BEGIN} and {_END}, each on a line of its own")
    if _words(written[1]) != _words(sentence):
        return False
    pairs = zip(_numbers(written[1]), _numbers(sentence), strict=True)
    return all(_is_near(old, new) for old, new in pairs)


def _is_near(old: int, new: int) -> bool:
    return old == new or (new >= _EXACT_BELOW and abs(old - new) <= max(_ROUNDING, _TOLERANCE * new))


def with_sentence(text: str, sentence: str) -> str:
    """Returns the document with this sentence in its place."""
    return _BLOCK.sub(lambda _: f"{_BEGIN}\n{sentence}\n{_END}", text)


def _rounded(number: int) -> str:
    return f"{round(number, -2):,}"


def _words(text: str) -> list[str]:
    return _NUMBER.sub("0", text).split()


def _numbers(text: str) -> list[int]:
    return [int(number.replace(",", "")) for number in _NUMBER.findall(text)]
