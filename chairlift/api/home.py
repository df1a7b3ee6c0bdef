"""`/`: the page that shows a chat and the batch. Its files lie in `page/` and are served as they are.

The browser is told to load from this server only, and to run no script or style that stands in the page itself.
"""

from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

_FOLDER = Path(__file__).parent / "page"
_INDEX = "index.html"
_FILES = {"/" if path.name == _INDEX else f"/page/{path.name}": path for path in sorted(_FOLDER.iterdir())}

PAGE_PATHS = frozenset(_FILES)
"""What a browser fetches before anybody could have given it a key."""

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # kept, but asked for again: another version may be served from here tomorrow
}


def add_page_routes(app: web.Application) -> None:
    """Serves the page and its files, to which browsers come without a key."""
    for path, file in _FILES.items():
        app.router.add_get(path, _serving(file))


def _serving(file: Path) -> Handler:
    async def serve(_: web.Request) -> web.FileResponse:
        return web.FileResponse(file, headers=_HEADERS)

    return serve
