"""A table: which document shows it, and its rows and columns; how it is written between its marks."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .source import Source

_BEGIN, _END = "<!-- table {mark}: python tools/write_tables.py -->", "<!-- end of table -->"


class Column(NamedTuple):
    """A heading, and the text of a record's cell."""

    head: str
    cell: Callable[[Any], str]


@dataclass(frozen=True, slots=True)
class Table:
    """A row for each record, or a column with `is_transposed`: then the first of `columns` heads them."""

    document: str
    mark: str
    source: Source
    records: Callable[[Any], Sequence[Any]]
    columns: Sequence[Column]
    is_transposed: bool = False

    def lines(self, root: Path) -> list[str]:
        """The table in Markdown, and its caption."""
        data = self.source.read(root)
        records = self.records(data)
        cells = [[column.head, *map(column.cell, records)] for column in self.columns]
        rows = cells if self.is_transposed else [list(row) for row in zip(*cells, strict=True)]
        rows.insert(1, ["---"] * len(rows[0]))
        up = "../" * (len(Path(self.document).parts) - 1)
        return [*map(_line, rows), "", self.source.caption(data, f"{up}{self.source.path}")]


def with_tables(text: str, tables: Sequence[Table], root: Path) -> str:
    """The document's text with these tables between their marks; a `ValueError` if the marks are others."""
    marks = re.findall(_BEGIN.format(mark=r"([\w-]+)"), text)
    if sorted(marks) != sorted(table.mark for table in tables):
        raise ValueError(
            f"{tables[0].document} has marks of {sorted(marks)}, tables are {sorted(t.mark for t in tables)}"
        )
    for table in tables:
        begin = _BEGIN.format(mark=table.mark)
        head, _, rest = text.partition(begin)
        inside, end, tail = rest.partition(_END)
        if not end or "<!--" in inside:
            raise ValueError(f"{table.document} has no end of table {table.mark}")
        text = "\n".join([head + begin, *table.lines(root), end + tail])
    return text


def _line(cells: Sequence[str]) -> str:
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"
