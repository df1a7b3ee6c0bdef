"""A client who only wants to be served while others attack. Run as a process of its own, so that nothing which the
attacker computes counts as a pause: `python bystander.py PORT KEY`.

It polls /health every 10 ms and reads one endless stream (a long one, begun anew when it ends). It says "ready" when
the stream flows, goes on until its standard input ends, and then writes what it saw as one JSON object: see `report`.
Nothing but the standard library is imported, so that it starts at once.
"""

import json
import selectors
import socket
import sys
import time
from typing import Any

POLL_INTERVAL_S = 0.01
NOTABLE_PAUSE_S = 0.03
CONNECT_TIMEOUT_S = 60.0
STREAM = {
    "prompt": "Once upon a time",
    "max_tokens": 1900,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "user": "bystander",
}


class Pauses:
    """How long one kind of news did not come, from when it was expected."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.notable: list[tuple[float, float]] = []  # begin and end of each that somebody might want to explain
        self.num_news = 0
        self.num_failures = 0
        self.failure = ""
        self._since: float | None = None

    def expect(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def note_news(self, *, is_last: bool = False) -> None:
        self.end()
        self.num_news += 1
        if not is_last:
            self.expect()

    def note_failure(self, reason: str) -> None:
        self.end()
        self.num_failures += 1
        self.failure = reason[:300]

    def end(self) -> None:
        """Nothing is expected any more. What was and did not come counts up to here."""
        if self._since is None:
            return
        now = time.monotonic()
        self.longest = max(self.longest, now - self._since)
        if now - self._since > NOTABLE_PAUSE_S:
            self.notable.append((self._since, now))
        self._since = None

    def report(self) -> dict[str, Any]:
        return {
            "longest": self.longest,
            "notable": self.notable[-200:],
            "num_news": self.num_news,
            "num_failures": self.num_failures,
            "failure": self.failure,
        }


class Bystander:
    """One connection for /health, one for the stream; both opened again when they end."""

    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._health_socket: socket.socket | None = None
        self._stream_socket: socket.socket | None = None
        self._health_bytes = b""
        self._stream_bytes = b""
        self._is_polling = False
        self._poll_time = time.monotonic()
        self._stream_time = 0.0
        self.health = Pauses()
        self.stream = Pauses()
        self.first_tokens = Pauses()  # from a stream's request to its first token: a queue is no pause

    def report(self) -> dict[str, Any]:
        for each in (self.health, self.stream, self.first_tokens):
            each.end()
        return {name: getattr(self, name).report() for name in ("health", "stream", "first_tokens")}

    def run(self) -> None:
        """Until standard input ends."""
        is_ready = False
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin, selectors.EVENT_READ, self._end)
            while True:
                self._send_what_is_due(selector)
                timeout = max(0.0, self._poll_time - time.monotonic()) if not self._is_polling else POLL_INTERVAL_S
                for event, _ in selector.select(timeout):
                    if event.data == self._end:
                        return
                    event.data(selector)
                if not is_ready and self.stream.num_news and self.health.num_news:
                    is_ready = True
                    self.health, self.stream, self.first_tokens = Pauses(), Pauses(), Pauses()
                    self.stream.expect()
                    if self._is_polling:
                        self.health.expect()
                    print("ready", flush=True)  # noqa: T201 - how it talks to whoever started it

    def _end(self, _: selectors.BaseSelector) -> None:
        """Only a mark."""

    def _send_what_is_due(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        if not self._is_polling and now >= self._poll_time:
            self._poll(selector)
        if self._stream_socket is None and now >= self._stream_time:
            self._begin_stream(selector)

    def _poll(self, selector: selectors.BaseSelector) -> None:
        self._poll_time = time.monotonic() + POLL_INTERVAL_S
        self.health.expect()
        try:
            if self._health_socket is None:
                self._health_socket = self._connect()
                selector.register(self._health_socket, selectors.EVENT_READ, self._read_health)
            self._health_socket.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            self._is_polling = True
        except OSError as error:
            self._drop_health(selector, f"/health: {error!r}")

    def _begin_stream(self, selector: selectors.BaseSelector) -> None:
        body = json.dumps(STREAM).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nAuthorization: Bearer {self._key}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._stream_bytes = b""
        self.first_tokens.expect()
        try:
            self._stream_socket = self._connect()
            selector.register(self._stream_socket, selectors.EVENT_READ, self._read_stream)
            self._stream_socket.sendall(head.encode() + body)
        except OSError as error:
            self._fail_stream(selector, f"the stream cannot begin: {error!r}")

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._port), CONNECT_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _read_health(self, selector: selectors.BaseSelector) -> None:
        assert self._health_socket is not None, "registered"
        try:
            received = self._health_socket.recv(2**16)
        except OSError as error:
            return self._drop_health(selector, f"/health: {error!r}")
        if not received:
            return self._drop_health(selector, "/health: the connection was closed")
        self._health_bytes += received
        if not self._health_bytes.endswith(b"}"):
            return None
        reply, self._health_bytes, self._is_polling = self._health_bytes, b"", False
        if reply.startswith(b"HTTP/1.1 200 "):
            self.health.note_news(is_last=True)
        else:
            self.health.note_failure(reply.decode(errors="replace"))
        return None

    def _drop_health(self, selector: selectors.BaseSelector, reason: str) -> None:
        self.health.note_failure(reason)
        self._is_polling = False
        self._health_bytes = b""
        _close(selector, self._health_socket)
        self._health_socket = None

    def _read_stream(self, selector: selectors.BaseSelector) -> None:
        assert self._stream_socket is not None, "registered"
        try:
            received = self._stream_socket.recv(2**16)
        except OSError as error:
            return self._fail_stream(selector, f"stream: {error!r}")
        self._stream_bytes = self._stream_bytes[-2000:] + received
        if not received:
            return self._fail_stream(selector, "stream: cut off: " + self._stream_bytes.decode(errors="replace")[-300:])
        if self._stream_bytes.startswith(b"HTTP/1.1 ") and not self._stream_bytes.startswith(b"HTTP/1.1 200 "):
            return self._fail_stream(selector, self._stream_bytes.decode(errors="replace"))
        if b'"error"' in received:
            return self._fail_stream(selector, received.decode(errors="replace"))
        if b"data: [DONE]" in received:
            self.stream.note_news(is_last=True)
            _close(selector, self._stream_socket)
            self._stream_socket = None
        elif b"data: " in received:
            self.first_tokens.end()
            self.stream.note_news()
        return None

    def _fail_stream(self, selector: selectors.BaseSelector, reason: str) -> None:
        self.stream.note_failure(reason)
        self.first_tokens.end()
        _close(selector, self._stream_socket)
        self._stream_socket = None
        self._stream_time = time.monotonic() + POLL_INTERVAL_S


def _close(selector: selectors.BaseSelector, connection: socket.socket | None) -> None:
    if connection is not None:
        selector.unregister(connection)
        connection.close()


if __name__ == "__main__":
    bystander = Bystander(int(sys.argv[1]), sys.argv[2])
    bystander.run()
    print(json.dumps(bystander.report()), flush=True)  # noqa: T201
