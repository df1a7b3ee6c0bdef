"""Server-sent events: the frame around streamed replies."""

from aiohttp import web

DONE = "[DONE]"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must pass events on as they come
}


class EventStream:
    """One reply that is written event by event."""

    def __init__(self) -> None:
        self._response = web.StreamResponse(headers=_HEADERS)

    async def open(self, request: web.Request) -> web.StreamResponse:
        """Sends the status and headers; from here on errors can only be events."""
        await self._response.prepare(request)
        return self._response

    async def send(self, *payloads: str) -> None:
        """Writes the payloads as one event each. Waits while the client reads slower than we write."""
        if payloads:
            await self._response.write("".join(f"data: {payload}\n\n" for payload in payloads).encode())

    async def close(self) -> None:
        await self._response.write_eof()
