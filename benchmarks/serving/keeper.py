"""Keeps a server: starts it, says when it is healthy, and ends it when standard input ends.

The driver sends one JSON line, `{"command": [...], "port": N}`, and reads one: `{"healthy_s": S, "version": "..."}`,
seconds from the start of the server's process, or `{"error": "..."}`. What the server prints goes to standard error.
"""

import json
import subprocess
import sys
import time

from serving.health import version_of, wait_until_healthy


def main() -> None:
    """As above."""
    order = json.loads(sys.stdin.readline())
    started_at = time.monotonic()
    server = subprocess.Popen(order["command"], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        wait_until_healthy(server, order["port"])
        _answer({"healthy_s": time.monotonic() - started_at, "version": version_of(order["port"])})
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
    main()
