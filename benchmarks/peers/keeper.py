"""Keeps a server: starts it, says when it is healthy, and ends it when standard input ends.

The driver sends one JSON line, `{"command": [...], "port": N}`, and reads one: `{"healthy_s": S, "version": "..."}`,
seconds from the start of the server's process, or `{"error": "..."}`. With `"version"` in the order the server is not
asked for it. What the server prints goes to standard error.
Standard library only: peers' interpreters run this.
"""

import http.client
import json
import socket
import subprocess
import sys
import time

_POLL_SECONDS = 0.01
_PATIENCE_S = 5.0


def free_port() -> int:
    """A port of 127.0.0.1 on which nobody listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: "subprocess.Popen[bytes]", port: int) -> None:
    """Returns once GET /health on 127.0.0.1 answers 200. Raises `RuntimeError` if the server ends before."""
    while server.poll() is None:
        try:
            status, _ = _get(port, "/health")
        except OSError:
            status = None
        if status == 200:
            return
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"the server ended with exit code {server.returncode}")


def version_of(port: int) -> str:
    """Returns what the server on that port of 127.0.0.1 answers to GET /version."""
    _, body = _get(port, "/version")
    return str(json.loads(body)["version"])


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _keep() -> None:
    """Obeys one order from standard input, see above."""
    order = json.loads(sys.stdin.readline())
    started_at = time.monotonic()
    server = subprocess.Popen(order["command"], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        wait_until_healthy(server, order["port"])
        healthy_s = time.monotonic() - started_at
        _answer({"healthy_s": healthy_s, "version": order.get("version") or version_of(order["port"])})
        sys.stdin.read()
    except RuntimeError as error:
        _answer({"error": str(error)})
    finally:
        server.kill()
        server.wait()


def _answer(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _keep()
