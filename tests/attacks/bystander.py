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
from threading import Thread
from typing import Any, NoReturn

INTERVAL_S = 0.01
NOTABLE_PAUSE_S = 0.03
CONNECT_TIMEOUT_S = 60.0
OPTIONS = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True, "user": "bystander"}
POLL = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Pauses:
    """Says how long one kind of news did not come, from when it was expected. One thread notes; another one reports."""

    def __init__(self) -> None:
        self.since: float | None = None  # when the next news was expected
        self.pauses: list[tuple[float, float]] = []
        self.failures: list[tuple[float, str]] = []

    def expect(self) -> None:
        self.since = self.since or time.monotonic()

    def end(self, *, is_next_expected: bool = False) -> None:
        """Notes that what was expected has come, or is expected no more."""
        now = time.monotonic()
        if self.since is not None:
            self.pauses.append((self.since, now))
        self.since = now if is_next_expected else None

    def note_failure(self, reason: str) -> None:
        self.end()
        self.failures.append((time.monotonic(), reason[:300]))

    def report(self, begin: float) -> dict[str, Any]:
        """Returns what was since then. Times in seconds; `notable` has the pauses that somebody might want to
        explain.
        """
        since, now = self.since, time.monotonic()
        pauses = [*self.pauses, *([] if since is None else [(since, now)])]
        pauses = [(max(begin, first), last) for first, last in pauses if last > begin]
        failures = [reason for at, reason in self.failures if at > begin]
        return {
            "longest": max((last - first for first, last in pauses), default=0.0),
            "notable": [(first, last) for first, last in pauses if last - first > NOTABLE_PAUSE_S][-200:],
            "num_failures": len(failures),
            "failure": failures[-1] if failures else "",
        }


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
                health.end()
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
            stream.end(is_next_expected=b"data: [DONE]" not in reply)
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
    while seen["stream"].since is None or not seen["health"].pauses:
        time.sleep(INTERVAL_S)
    begin = time.monotonic()
    print("ready", flush=True)  # noqa: T201 - how it talks to whoever started it
    sys.stdin.read()
    print(json.dumps({name: each.report(begin) for name, each in seen.items()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
