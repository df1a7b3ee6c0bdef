"""A client who only wants to be served while others attack. Run as a process of its own, so that nothing which the
attacker computes counts as a pause: `python bystander.py PORT KEY`.

It polls /health every 10 ms and reads one endless stream (a long one, begun anew when it ends). It says "ready" when
the stream flows, goes on until its standard input ends, and then writes what it saw as one JSON object: of each kind of
news what `Pauses.report` says. Nothing but the standard library is imported, so that it starts at once.
"""

import json
import socket
import sys
import time
from threading import Lock, Thread
from typing import Any, NoReturn

INTERVAL_S = 0.01
NOTABLE_PAUSE_S = 0.03
CONNECT_TIMEOUT_S = 60.0
OPTIONS = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True, "user": "bystander"}
POLL = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Pauses:
    """How long one kind of news did not come, from when it was expected."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._since: float | None = None
        self._clear()

    def expect(self) -> None:
        with self._lock:
            self._since = self._since or time.monotonic()

    def note_news(self, *, is_last: bool = False) -> None:
        """What was expected has come, and unless it is the last the next is expected."""
        with self._lock:
            self._end()
            self.num_news += 1
            self._since = None if is_last else time.monotonic()

    def note_failure(self, reason: str) -> None:
        with self._lock:
            self._end()
            self._num_failures += 1
            self._failure = reason[:300]

    def end(self) -> None:
        """Nothing is expected any more. What was and did not come counts up to here."""
        with self._lock:
            self._end()

    def restart(self) -> None:
        """Forgets what was seen so far; what is expected is expected from now on."""
        with self._lock:
            self._clear()
            self._since = self._since and time.monotonic()

    def report(self) -> dict[str, Any]:
        """Times in seconds; `notable` has the begin and end of each pause that somebody might want to explain."""
        with self._lock:
            self._end()
            return {
                "longest": self._longest,
                "notable": self._notable[-200:],
                "num_failures": self._num_failures,
                "failure": self._failure,
            }

    def _clear(self) -> None:
        self.num_news = self._num_failures = 0
        self._longest, self._failure = 0.0, ""
        self._notable: list[tuple[float, float]] = []

    def _end(self) -> None:
        if self._since is not None:
            begin, now = self._since, time.monotonic()
            self._longest = max(self._longest, now - begin)
            if now - begin > NOTABLE_PAUSE_S:
                self._notable.append((begin, now))
            self._since = None


def poll_health(port: int, health: Pauses) -> NoReturn:
    """On one connection, which is opened again when it ends."""
    connection: socket.socket | None = None
    while True:
        due_at = time.monotonic() + INTERVAL_S
        health.expect()
        try:
            connection = connection or connect(port)
            connection.sendall(POLL)
            reply = b""
            while not reply.endswith(b"}"):
                reply += receive(connection)
            if reply.startswith(b"HTTP/1.1 200 "):
                health.note_news(is_last=True)
            else:
                health.note_failure(reply.decode(errors="replace"))
        except OSError as error:
            health.note_failure(f"/health: {error!r}")
            if connection is not None:
                connection.close()
            connection = None
        time.sleep(max(0.0, due_at - time.monotonic()))


def read_streams(port: int, key: str, stream: Pauses, first_tokens: Pauses) -> NoReturn:
    """One after the other. From a request to its first token counts apart: a queue is no pause."""
    body = json.dumps({"prompt": "Once upon a time", **OPTIONS}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    while True:
        first_tokens.expect()
        try:
            with connect(port) as connection:
                connection.sendall(head.encode() + body)
                read_stream(connection, stream, first_tokens)
        except OSError as error:
            stream.note_failure(f"stream: {error!r}")
            first_tokens.end()
            time.sleep(INTERVAL_S)


def read_stream(connection: socket.socket, stream: Pauses, first_tokens: Pauses) -> None:
    """To its end. Raises `OSError` if that is not a good one."""
    reply = b""
    while b"data: [DONE]" not in reply:
        received = receive(connection)
        is_refusal = not reply and not received.startswith(b"HTTP/1.1 200 ")
        reply = reply[-2000:] + received
        if is_refusal or b'"error"' in received:
            raise OSError(reply.decode(errors="replace")[-300:])
        if b"data: " in received:
            first_tokens.end()
            stream.note_news(is_last=b"data: [DONE]" in reply)
    stream.end()


def receive(connection: socket.socket) -> bytes:
    received = connection.recv(2**16)
    if not received:
        raise OSError("the connection was closed")
    return received


def connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), CONNECT_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def main() -> None:
    port, key = int(sys.argv[1]), sys.argv[2]
    seen = {name: Pauses() for name in ("stream", "health", "first_tokens")}
    Thread(target=poll_health, args=(port, seen["health"]), daemon=True).start()
    Thread(target=read_streams, args=(port, key, seen["stream"], seen["first_tokens"]), daemon=True).start()
    while not (seen["stream"].num_news and seen["health"].num_news):
        time.sleep(INTERVAL_S)
    for each in seen.values():
        each.restart()
    print("ready", flush=True)  # noqa: T201 - how it talks to whoever started it
    sys.stdin.read()
    print(json.dumps({name: each.report() for name, each in seen.items()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
