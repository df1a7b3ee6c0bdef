"""The tables of docs/api.md, which say what becomes of each field of a request."""

from chairlift.api.fields import FieldRow, fields_of, parts_of
from chairlift.api.routes import ROUTES, Route

_BEGIN, _END = "<!-- tables -->\n", "<!-- end of tables -->"


def page_with_tables(page: str) -> str:
    """The page with its tables as the code has them now."""
    before, rest = page.split(_BEGIN)
    _, after = rest.split(_END)
    sections = [_section(route) for route in ROUTES]
    parts = parts_of(*(route.body for route in ROUTES if route.body is not None))
    sections += ["## Parts of bodies\n", *(f"### {part.__name__}\n\n{_table(part)}" for part in parts)]
    return before + _BEGIN + "\n" + "\n".join(sections) + "\n" + _END + after


def _section(route: Route) -> str:
    heading = f"## {route.method} {route.path}\n\n{route.summary}.\n"
    return heading if route.body is None else f"{heading}\n{_table(route.body)}"


def _table(body: type) -> str:
    return "\n".join(["| Field | Type | |", "|---|---|---|", *map(_line, fields_of(body)), ""])


def _line(row: FieldRow) -> str:
    fate = "required" if row.is_required else row.fate.value
    described = f"**{fate}**: {row.description}" if row.description else f"**{fate}**"
    return " | ".join(("", f"`{row.name}`", row.type.replace("|", "or"), described, "")).strip()
