"""Write the tables of README and docs/ from the JSON files of benchmarks/results. Run from anywhere.

Each stands between two comments; `benchmark_tables` lists the tables. With `--check` nothing is written: the exit code
is 1 if a document is not what would be written.
"""

import argparse
import sys
from pathlib import Path

from benchmark_tables import of_formats, of_schedulers, of_servers, on_gpus, on_processors
from benchmark_tables.table import with_tables

TABLES = (
    *on_processors.TABLES,
    *on_gpus.TABLES,
    *of_formats.TABLES,
    *of_servers.TABLES,
    *of_schedulers.TABLES,
)


def main() -> int:
    """Writes or checks every document that has tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and exit with 1 if a table is another")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the repository (%(default)s)")
    arguments = parser.parse_args()
    is_stale = False
    for document in dict.fromkeys(table.document for table in TABLES):
        path = arguments.root / document
        text = path.read_text(encoding="utf-8")
        written = with_tables(text, [each for each in TABLES if each.document == document], arguments.root)
        if written != text:
            is_stale = True
            sys.stdout.write(
                f"{document}: {'not what tools/write_tables.py writes' if arguments.check else 'written'}\n"
            )
        if not arguments.check:
            path.write_text(written, encoding="utf-8")
    return int(is_stale and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
