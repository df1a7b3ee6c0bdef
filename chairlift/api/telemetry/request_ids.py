"""A request's id, which the client, proxies and the log share."""

import re
from uuid import uuid4

from aiohttp import web

REQUEST_ID_HEADER = "X-Request-Id"
HEADERS_OF_IDS = (
    REQUEST_ID_HEADER,
    "Request-Id",
)  # clients of OpenAI's API read the first, clients of Anthropic's the second
_SANE_ID = re.compile(r"[ -~]{1,128}")  # printable ASCII, not too long for a line of the log
_REQUEST_ID = web.RequestKey("chairlift_request_id", str)


def request_id_of(request: web.BaseRequest) -> str:
    """The id that the client sent if it is 1 to 128 printable ASCII characters, otherwise a new one."""
    if _REQUEST_ID not in request:
        sent = request.headers.get(REQUEST_ID_HEADER, "")
        request[_REQUEST_ID] = sent if _SANE_ID.fullmatch(sent) else uuid4().hex
    return request[_REQUEST_ID]
