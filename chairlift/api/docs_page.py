"""`/docs`: the endpoints and their fields on one page, without scripts or outside resources."""

from functools import cache
from html import escape

from aiohttp import web

from chairlift.api.fields import FieldRow, fields_of, parts_of
from chairlift.api.routes import ROUTES, Route

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid #8886; } h2 code { font-size: 1em; }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 0.9em; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #8883; }
.refused, .accepted { opacity: 0.65; }
"""


def render_page() -> web.Response:
    """The page as a reply."""
    return web.Response(text=_page(), content_type="text/html", charset="utf-8", headers=_HEADERS)


@cache
def _page() -> str:
    sections = "\n".join(_section(route) for route in ROUTES)
    parts = parts_of(*(route.body for route in ROUTES if route.body is not None))
    sections += "\n".join(f"<h2><code>{part.__name__}</code></h2>{_table(part)}" for part in parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Chairlift: the HTTP API</title><style>{_STYLE}</style></head><body><main>"
        "<h1>Chairlift: the HTTP API</h1><p>As OpenAI specifies it, with vLLM's extensions. A field that is not listed"
        ' is refused with a 400 that names it. The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{sections}</main></body></html>"
    )


def _section(route: Route) -> str:
    heading = f"<h2><code>{route.method} {escape(route.path)}</code></h2><p>{escape(route.summary)}.</p>"
    return heading if route.body is None else heading + _table(route.body)


def _table(body: type) -> str:
    rows = "".join(_row(row) for row in fields_of(body))
    head = "<tr><th>Field</th><th>Type</th><th>What becomes of it</th></tr>"
    return f'<div class="table"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _row(row: FieldRow) -> str:
    fate = "required" if row.is_required else row.fate.value
    described = f"{fate}: {row.description}" if row.description else fate
    return (
        f'<tr class="{row.fate.value.split()[0].strip(",")}"><td><code>{escape(row.name)}</code></td>'
        f"<td>{escape(row.type)}</td><td>{escape(described)}</td></tr>"
    )
