"""Trace one streamed chat, and write into README and ARCHITECTURE how much of the code it passes through.

Prints the files with the lines that ran in each. The exit code is 1 if ARCHITECTURE.md names other files than those
that ran. With `--check` nothing is written, and it is 1 as well if a number is more than a few per cent off. It is 2 if
the road cannot be measured on this machine.
"""

import argparse
import json
import sys
from pathlib import Path

from token_road.documents import Road, is_current, with_sentence

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("README.md", "ARCHITECTURE.md")


def read_or_measure(path: Path | None) -> Road:
    """Reads the lines from an earlier call's file, or measures them and keeps them there if a file is named."""
    if path is not None and path.exists():
        return Road(json.loads(path.read_text()), ROOT / "chairlift")
    from token_road.measure import find_obstacle, measure  # imports torch

    if obstacle := find_obstacle():
        sys.stderr.write(f"{obstacle}\n")
        sys.exit(2)
    lines = measure()
    if path is not None:
        path.write_text(json.dumps(lines))
    return Road(lines, ROOT / "chairlift")


def show(road: Road) -> None:
    """Prints each file with the number of its lines that ran, and the sums."""
    for name, ran in road.lines.items():
        sys.stdout.write(f"{len(ran):6}  {name}\n")
    sys.stdout.write(f"{road.sentence()}\n")


def main() -> int:
    """Measures, prints, and writes or checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a number is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the documents are (%(default)s)")
    parser.add_argument("--measured", type=Path, help="file for the lines: it is read if it exists, else written")
    arguments = parser.parse_args()
    road = read_or_measure(arguments.measured)
    show(road)
    faults = road.faults(arguments.root)
    for document in DOCUMENTS:
        path = arguments.root / document
        text = path.read_text(encoding="utf-8")
        if is_current(text, road.sentence()):
            continue
        if arguments.check:
            faults.append(f"{document} has stale numbers of the road: python tools/write_road.py")
        else:
            path.write_text(with_sentence(text, road.sentence()), encoding="utf-8")
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
