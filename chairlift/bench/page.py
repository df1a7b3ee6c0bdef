"""A report as one HTML page without outside resources."""

from collections.abc import Sequence
from html import escape

from chairlift.bench.table import Row, Section

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; }
table { border-collapse: collapse; margin: 1.5rem 0; }
th, td { padding: .25rem .9rem; border-bottom: 1px solid #8884; }
th { font-weight: 600; text-align: left; }
.columns td, .columns thead th + th { text-align: right; font-variant-numeric: tabular-nums; }
.note { border-left: 4px solid #d97706; padding: .5rem 1rem; }
.tables { overflow-x: auto; }
img { width: 100%; border-radius: 6px; }
"""


def page(title: str, sections: Sequence[Section], notes: Sequence[str], plots: str) -> str:
    """The document. `plots` is the source of an image; a browser is told to load nothing else."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    paragraphs = "\n".join(f'<p class="note">{escape(note)}</p>' for note in notes)
    tables = "\n".join(_table(section) for section in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{paragraphs}
<img src="{plots}" alt="Plots of the figures in the tables below">
<div class="tables">
{tables}
</div>
</body>
</html>
"""


def _table(section: Section) -> str:
    rows = "\n".join(_row(row) for row in section.rows)
    if not section.columns:
        return f"<table>\n<tbody>\n{rows}\n</tbody>\n</table>"
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in (section.heading, *section.columns))
    return f'<table class="columns">\n<thead><tr>{names}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>'


def _row(row: Row) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
    return f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>'
