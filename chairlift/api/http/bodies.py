"""Request bodies: which are accepted, how many bytes of them may be pending, and how they are read and checked."""

import asyncio
import re
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from chairlift.api.answers.text import whole_characters
from chairlift.errors import ClientTooBusy, EngineClosed, InvalidRequest, ServerTooBusy

MAX_WAITING_BYTES = 2**28
"""Limit on the bytes of all bodies whose replies have not begun; half of it for one client."""

MAX_JSON_VALUES = 2**18
"""Limit on the numbers in a body: checking so many blocks all other threads for 50 ms. Other values cost more."""

_LARGE_BODY_BYTES = 2**16
_PIECE_BYTES = 2**16
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_COSTS = {b",": 1, b"[": 4, b":": 8, b"{": 4}  # the cost of checking a value, a list, a name, an object
_SURROGATES = re.compile(
    rb"(?P<pair>\\u[Dd][89ABab][0-9A-Fa-f]{2}\\u[Dd][C-Fc-f][0-9A-Fa-f]{2})|\\u[Dd][89A-Fa-f][0-9A-Fa-f]{2}"
)
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}

_Body = TypeVar("_Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class RawBody:
    """A body as it was received."""

    data: bytes
    encoding: str | None  # of its content: gzip, x-gzip or deflate
    max_bytes: int

    @property
    def is_large(self) -> bool:
        """True if checking and using it may take longer than other requests should wait."""
        return self.encoding is not None or len(self.data) > _LARGE_BODY_BYTES

    def parse(self, model: type[_Body]) -> _Body:
        """The checked body. Takes up to a second, so it belongs off the event loop."""
        data = self.data if self.encoding is None else _inflate(self.data, self.encoding, self.max_bytes)
        if cost_of(data) > MAX_JSON_VALUES:
            raise InvalidRequest(
                f"the body has too many JSON values: {MAX_JSON_VALUES} numbers or some {MAX_JSON_VALUES // 25} messages"
                " at most; send it in several requests, or text instead of token ids"
            )
        try:
            return model.model_validate_json(data)
        except ValidationError as error:
            if error.error_count() > 1 or "hex escape" not in error.errors(include_url=False)[0]["msg"]:
                raise
        return model.model_validate_json(_without_half_pairs(data))


class BodyReader:
    """Reads the bodies of one application's requests. What is read counts as waiting until the reply begins."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self.max_waiting = MAX_WAITING_BYTES  # bytes; a single body may always wait
        self._num_waiting = 0  # bytes
        self._num_waiting_of: Counter[str] = Counter()  # by client
        self._deadlines: set[asyncio.Timeout] = set()  # of bodies that are being read
        self._is_closed = False

    async def read(self, request: web.Request, client: str) -> RawBody:
        """Reads the whole body; aiohttp keeps no copy.

        Raises what becomes a 415 if it is not JSON, 413 if its actual or declared size is too large, 408 if it arrives
        too late (that reply is the connection's last), 429 and 503 if too many bytes are pending already.
        """
        encoding = _checked_encoding(request)
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_bytes, request.content_length)
        request[_PENDING] = pending = _PendingBody(client)
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                self._deadlines.add(deadline)
                try:
                    while chunk := await request.content.readany():
                        self._count(pending, len(chunk))
                        chunks.append(chunk)
                finally:
                    self._deadlines.discard(deadline)
        except web.RequestPayloadError:
            _end_body(request)
            raise
        except TimeoutError:
            _end_body(request)
            if self._is_closed:
                raise EngineClosed("the server is shutting down; try again later, or another server") from None
            raise web.HTTPRequestTimeout(text=f"the body did not come within {self._timeout_s:g} s") from None
        return RawBody(b"".join(chunks), encoding, self._max_bytes)

    def close(self) -> None:
        """Drops incomplete bodies: the server is shutting down."""
        self._is_closed = True
        for deadline in self._deadlines:
            deadline.reschedule(asyncio.get_running_loop().time())

    async def release(self, request: web.Request, _: web.StreamResponse | None = None) -> None:
        """Stops counting the body's bytes: the reply begins, or there will be none."""
        pending = request.get(_PENDING)
        if pending is not None:
            self._num_waiting -= pending.num_bytes
            self._num_waiting_of[pending.client] -= pending.num_bytes
            pending.num_bytes = 0
            if not self._num_waiting_of[pending.client]:
                del self._num_waiting_of[pending.client]

    def _count(self, pending: "_PendingBody", num_bytes: int) -> None:
        if pending.num_bytes + num_bytes > self._max_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_bytes, pending.num_bytes + num_bytes)
        if self._num_waiting_of[pending.client] + num_bytes > max(self.max_waiting // 2, self._max_bytes):
            raise ClientTooBusy("too many bytes of your requests are pending; send fewer at once")
        if self._num_waiting + num_bytes > max(self.max_waiting, self._max_bytes):
            raise ServerTooBusy("too many request bytes are pending; try again later")
        self._num_waiting += num_bytes
        self._num_waiting_of[pending.client] += num_bytes
        pending.num_bytes += num_bytes


@dataclass(slots=True)
class _PendingBody:
    """One body's share of the pending bytes."""

    client: str
    num_bytes: int = 0


_PENDING = web.RequestKey("chairlift_pending_body", _PendingBody)


def _checked_encoding(request: web.Request) -> str | None:
    """Allows only JSON: foreign web pages may send text and forms to any server, but JSON only where it allows them."""
    kind = request.content_type
    if not (kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))):
        declared = whole_characters(request.headers.get("Content-Type", ""))
        sent = f"not {declared}" if "Content-Type" in request.headers else "and has none"
        raise web.HTTPUnsupportedMediaType(text=f"the body must be sent as Content-Type: application/json, {sent}")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        charset = whole_characters(request.charset or "")
        raise web.HTTPUnsupportedMediaType(text=f"the body must be sent as UTF-8, not {charset}")
    encoding = whole_characters(request.headers.get("Content-Encoding", "identity")).strip().lower()
    if encoding != "identity" and encoding not in _WINDOW_BITS:
        known = ", ".join(_WINDOW_BITS)
        raise web.HTTPUnsupportedMediaType(text=f"Content-Encoding {encoding} is not known here; known are {known}")
    return None if encoding == "identity" else encoding


def _inflate(data: bytes, encoding: str, max_bytes: int) -> bytes:
    bits = _WINDOW_BITS[encoding]
    if encoding == "deflate" and data[:1] and data[0] & 0x0F != 8:  # clients may send a raw stream, without a header
        bits = -bits
    stream = zlib.decompressobj(bits)
    try:
        inflated = stream.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest("the body cannot be decoded; check its Content-Encoding") from error
    if len(inflated) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, len(inflated))
    if not stream.eof or stream.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding} stream; check its Content-Encoding")
    return inflated


def cost_of(data: bytes, enough: int = MAX_JSON_VALUES, piece: int = _PIECE_BYTES) -> int:
    """Computes the cost of checking a JSON text's values; an upper bound if that is at most `enough` already.

    `piece`: bytes that are looked at before other threads may run.
    """
    bound = _cost_of_separators(data)
    if bound <= enough:
        return bound
    total, is_in_string, start = 0, False, 0
    while start < len(data):
        end = start + piece
        num_backslashes = end - len(data[start:end].rstrip(b"\\")) - start
        end += num_backslashes % 2  # an escape is not cut in two
        parts = _ESCAPE.sub(b"", data[start:end]).split(b'"')
        total += _cost_of_separators(b"".join(parts[is_in_string::2]))
        is_in_string ^= len(parts) % 2 == 0
        start = end
    return total


def _without_half_pairs(data: bytes) -> bytearray:
    """A JSON text with U+FFFD for each escaped half of a surrogate pair: clients cut texts in the middle of a pair.

    It grows in place: to join a list of its parts would take 80 bytes for each of them.
    """
    text = bytearray()
    begin = 0
    at = data.find(b"\\u")
    while at >= 0:
        end = at + 2
        first = at
        while first > begin and data[first - 1 : first] == b"\\":
            first -= 1
        escape = _SURROGATES.match(data, at)
        if escape is not None and (at - first) % 2 == 0:
            end = escape.end()
            if escape["pair"] is None:
                text += data[begin:at]
                text += b"\\ufffd"
                begin = end
        at = data.find(b"\\u", end)
    text += data[begin:]
    return text


def _cost_of_separators(data: bytes) -> int:
    return sum(data.count(separator) * cost for separator, cost in _COSTS.items())


def _end_body(request: web.Request) -> None:
    """Otherwise aiohttp would wait for the rest only to discard it. The reply is the connection's last."""
    request.content.feed_eof()
    request.protocol.close()
