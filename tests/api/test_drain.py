"""SIGTERM and SIGINT, on the real process: no new work, time to finish, a proper end for what does not, exit codes."""

import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server_process import SERVE, Process, long_stream, running

SMALL_SEND_BUFFERS = """
import socket, sys
from chairlift.__main__ import main
from chairlift.api.http.connections import Connection

real = Connection.connection_made

def connection_made(self, transport):
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    real(self, transport)

Connection.connection_made = connection_made
sys.exit(main())
"""


def draining(process: Process, client: httpx.Client) -> None:
    """Tells the process to end, once it has begun with what was sent before; returns when it knows."""
    assert client.get("/health").status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    while client.get("/health").status_code != 503:
        pass


def chunks(lines: Iterator[str]) -> list[dict[str, Any]]:
    """The rest of a stream, which must end properly."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_running_stream_finishes_while_new_work_is_refused() -> None:
    with running(SERVE) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=long_stream(2000)) as stream:
            lines = stream.iter_lines()
            next(lines)
            draining(process, client)
            late = client.post("/v1/completions", json={"prompt": "late", "max_tokens": 1})
            assert late.status_code == 503
            assert late.headers["Retry-After"] == "1"
            assert late.json()["error"]["code"] == "unavailable"
            assert client.get("/v1/models").status_code == 200
            rest = chunks(lines)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert process.exit_code() == 0


def test_a_router_reads_503_before_requests_are_refused() -> None:
    with running(SERVE, "--drain-delay", "60") as process, httpx.Client(base_url=process.url, timeout=60) as client:
        draining(process, client)
        late = client.post("/v1/completions", json={"prompt": "late", "max_tokens": 1})
        assert late.status_code == 200
        process.popen.send_signal(signal.SIGTERM)  # which ends the delay
        assert process.exit_code() == 0


@pytest.mark.parametrize("second", [None, signal.SIGTERM, signal.SIGINT])
def test_what_is_cut_short_ends_with_a_proper_last_chunk(second: signal.Signals | None) -> None:
    """By the drain timeout, or at once by a second signal."""
    drain_timeout = "0.3" if second is None else "60"
    body = {**long_stream(2000), "stream_options": {"include_usage": True}}
    with (
        running(SERVE, "--drain-timeout", drain_timeout) as process,
        httpx.Client(base_url=process.url, timeout=60) as client,
    ):
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            draining(process, client)
            if second is not None:
                process.popen.send_signal(second)
            *_, last, usage = chunks(lines)
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["choices"] == []
        assert 0 < usage["usage"]["completion_tokens"] < 2000
        assert process.exit_code() == 3  # which waits for less than 60 s


def test_a_whole_reply_that_is_cut_short_brings_what_there_is() -> None:
    body = json.dumps({**long_stream(2000), "stream": False})
    with running(SERVE, "--drain-timeout", "0.3") as process, httpx.Client(base_url=process.url) as client:
        asking = http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)
        asking.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        draining(process, client)
        answer = asking.getresponse()
        assert answer.status == 200
        assert json.loads(answer.read())["choices"][0]["finish_reason"] == "abort"
        assert process.exit_code() == 3
        asking.close()


def test_idle_connections_do_not_hold_the_end_up() -> None:
    with running(SERVE) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        assert client.get("/health").status_code == 200  # and its connection stays open
        with socket.create_connection(("127.0.0.1", process.port)):
            process.popen.send_signal(signal.SIGTERM)
            assert process.exit_code() == 0  # which waits for less than the drain timeout


def test_half_a_body_does_not_hold_the_end_up() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with running(SERVE) as process, socket.create_connection(("127.0.0.1", process.port)) as slow:
        slow.settimeout(20)
        slow.sendall(head + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\nhalf")
        assert slow.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it has begun
        process.popen.send_signal(signal.SIGTERM)
        assert slow.recv(20).startswith(b"HTTP/1.1 503 ")
        assert process.exit_code() == 0  # which waits for less than the drain timeout


def test_a_client_that_reads_nothing_does_not_hold_the_end_up() -> None:
    body = json.dumps({**long_stream(2000), "n": 4}).encode()  # fills every buffer before the drain timeout
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with running(SMALL_SEND_BUFFERS, "--drain-timeout", "1") as process, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", process.port))
        silent.sendall(head.encode() + body)
        silent.recv(1)
        start = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 3
        assert time.monotonic() - start > 1
        assert any("ending 1 requests that still run" in line for line in process.log)
