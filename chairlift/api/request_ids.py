"""`X-Request-Id`: by which a client, a proxy and the log speak of the same request. Every reply carries it."""

import re
from uuid import uuid4

from aiohttp import web

REQUEST_ID_HEADER = "X-Request-Id"

_SANE = re.compile(r"[ -~]{1,128}")  # printable ASCII, not too long for a line of the log
_REQUEST_ID = web.RequestKey("chairlift_request_id", str)


def request_id_of(request: web.BaseRequest) -> str:
    """The one that the client sent if it is sane: 1 to 128 printable ASCII characters. Otherwise a new one."""
    if _REQUEST_ID not in request:
        sent = request.headers.get(REQUEST_ID_HEADER, "")
        request[_REQUEST_ID] = sent if _SANE.fullmatch(sent) else uuid4().hex
    return request[_REQUEST_ID]


async def mark_response(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Puts the id on a reply. A signal rather than a middleware: streams begin, and some errors end, out of reach of
    middlewares.
    """
    response.headers[REQUEST_ID_HEADER] = request_id_of(request)
