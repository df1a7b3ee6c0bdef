"""Print lines, files, the longest of each kind, import directions and the road, each limit beside what there is.

Exit with 1 beyond a limit, or where modules import each other in a circle, an `__init__.py` is more than a door, a
comment parts a file into sections, or a docstring of the package begins with one of the words of `WITHOUT_VERB`;
`--quiet` prints nothing but that. Only single files, classes and functions have limits: the package as a whole may
grow, and so may the road, whose files `write_road.py` compares with those that a chat runs.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from graphlib import CycleError, TopologicalSorter
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from token_road.documents import named_files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "chairlift"
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CLASS_LINES = 400, 60, 250
SHORT_FILE_LINES = 40
NUM_SHOWN = 10
OTHERS = ("tests", "benchmarks", "tools", "examples")
LAZY_NAMES = "__getattr__"  # of a door that loads what it names on first use
TOLD = ("ARCHITECTURE.md", "CONTRIBUTING.md", "docs/decisions/*.md")  # documents that name files of the package
NAMED = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|h|cpp))`")
BASES = (".", "chairlift", "chairlift/models/cpu")  # below which documents name files
WITHOUT_VERB = ("What ", "How ", "Whether ", "Why ", "Where ", "When ", "Which ", "Who ", "Of ")
PARTITION = re.compile(r"^\s*# ---", re.MULTILINE)


class Entry(NamedTuple):
    lines: int
    name: str


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def definitions(path: Path) -> Iterator[tuple[bool, Entry]]:
    """Classes (True) and functions (False) of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield isinstance(node, ast.ClassDef), Entry(length, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parent.as_posix()


def file_of(name: str) -> Path:
    """The file of a module, or of the module that holds this name."""
    path = ROOT.joinpath(*name.split("."))
    while not path.is_dir() and not path.with_suffix(".py").is_file():
        path = path.parent
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imported_files(path: Path) -> set[Path]:
    """Files that a file imports from when the program runs, in functions too, but not for type checking alone."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    for_types = {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import) and node not in for_types:
            names += [alias.name for alias in node.names]
    return {file_of(name) for name in names if name.split(".")[0] == PACKAGE.name} - {path}


def imported_rooms(path: Path) -> set[str]:
    """The other rooms that a file imports from."""
    return set(map(room_of, imported_files(path))) - {room_of(path)}


def find_circle(files: list[Path]) -> list[str]:
    """A fault if files import each other in a circle, with their names in order; else nothing."""
    try:
        TopologicalSorter({path: imported_files(path) for path in files}).prepare()
    except CycleError as error:
        return [f"an import circle: {' <- '.join(str(path.relative_to(ROOT)) for path in error.args[1])}"]
    return []


def find_misshapen(files: list[Path]) -> list[str]:
    """Faults: an `__init__.py` that defines something, and comments that part a file into sections."""
    doors = [path for path in files if path.name == "__init__.py" and path.is_relative_to(PACKAGE)]
    rooms = {path for path in doors for _, entry in definitions(path) if entry.name.split()[-1] != LAZY_NAMES}
    faults = [f"{path.relative_to(ROOT)} defines something: move it into a file, and import it" for path in rooms]
    parted = [path for path in files if PARTITION.search(path.read_text())]
    return faults + [f"{path.relative_to(ROOT)} has sections: make files of them" for path in parted]


def find_openings(files: list[Path]) -> list[str]:
    """Finds docstrings that begin with what they are about, not with what the code does."""
    faults = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if text.startswith(WITHOUT_VERB):
                    faults.append(f"{path.relative_to(ROOT)}: {text[:40]!r} begins without a verb")
    return faults


def find_wrong_names() -> list[str]:
    """Faults: files that documents name and that do not exist."""
    documents = [path for pattern in TOLD for path in sorted(ROOT.glob(pattern))]
    named = [(path, name) for path in documents for name in dict.fromkeys(NAMED.findall(path.read_text()))]
    return [
        f"{path.relative_to(ROOT)} names {name}, which does not exist"
        for path, name in named
        if not any((ROOT / base / name).is_file() for base in BASES)
    ]


def show(title: str, entries: list[Entry]) -> None:
    sys.stdout.write(f"\n{title}\n" + "".join(f"{lines:7,}  {name}\n" for lines, name in entries))


def show_rooms(files: list[Path]) -> None:
    rooms: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files:
        rooms[room_of(path)].append(path)
    sums = [Entry(sum(map(num_lines, held)), f"{len(held):3} files  {room}") for room, held in sorted(rooms.items())]
    show(f"chairlift/: {sum(map(num_lines, files)):,} lines in {len(files)} files", sums)
    others = {name: list((ROOT / name).rglob("*.py")) for name in OTHERS}
    show(
        "beside it", [Entry(sum(map(num_lines, held)), f"{len(held):3} files  {name}") for name, held in others.items()]
    )
    sys.stdout.write("\nimport directions\n")
    for room, held in sorted(rooms.items()):
        sys.stdout.write(f"  {room} -> {', '.join(sorted(set().union(*map(imported_rooms, held)))) or 'nothing'}\n")


def show_limits(longest: list[tuple[list[Entry], int]]) -> None:
    """The longest of each kind beside its limit."""
    rows = [(entries[0].name, entries[0].lines, limit) for entries, limit in longest]
    sys.stdout.write("\nlimits\n" + "".join(f"{value:7,} of {limit:6,}  {name}\n" for name, value, limit in rows))


def inspect() -> list[str]:
    """Prints the report; what exceeds a limit."""
    files = sorted(PACKAGE.rglob("*.py"))
    sizes = sorted((Entry(num_lines(path), str(path.relative_to(ROOT))) for path in files), reverse=True)
    found = sorted((each for path in files for each in definitions(path)), key=lambda each: each[1], reverse=True)
    functions = [entry for is_class, entry in found if not is_class]
    classes = [entry for is_class, entry in found if is_class]
    road = [PACKAGE / name for name in named_files(ROOT)]
    show_rooms(files)
    for title, entries in (("functions", functions), ("classes", classes), ("files", sizes)):
        show(f"longest {title}", entries[:NUM_SHOWN])
    show(f"files under {SHORT_FILE_LINES} lines", [entry for entry in sizes if entry.lines < SHORT_FILE_LINES])
    road_lines = sum(num_lines(path) for path in road if path.is_file())
    show("the token's road", [Entry(road_lines, f"in the {len(road)} files that ARCHITECTURE.md names")])
    longest = [(sizes, MAX_FILE_LINES), (functions, MAX_FUNCTION_LINES), (classes, MAX_CLASS_LINES)]
    show_limits(longest)
    beyond = [(entry, limit) for entries, limit in longest for entry in entries if entry.lines > limit]
    faults = [f"{entry.lines:,} lines of {entry.name}, {limit:,} at most" for entry, limit in beyond]
    faults += find_circle(files)
    faults += find_misshapen([*files, *(path for name in OTHERS for path in (ROOT / name).rglob("*.py"))])
    faults += find_openings(files)
    faults += find_wrong_names()
    faults += [] if road else ["ARCHITECTURE.md names no file of the token's road"]
    return faults


def main() -> int:
    with redirect_stdout(StringIO()) if "--quiet" in sys.argv[1:] else nullcontext():
        faults = inspect()
    sys.stdout.write("\n".join(faults or ["every limit of the house is met"]) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
