"""The real process: what it says at its start, how it ends by signals, and how when its engine dies."""

import asyncio
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from chairlift.__main__ import main
from chairlift.api import ServerConfig
from chairlift.api.http.listening import Listener
from chairlift.errors import ConfigurationError
from tests.support.server_process import SERVE, Process, long_stream, run_to_end, running


def test_a_fresh_interpreter_serves() -> None:
    with running(SERVE, is_forked=False) as process:
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        reply = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=20).json()
    assert reply["choices"][0]["message"]["content"] == "17 + 25 = 42."


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "TAKEN"], "cannot listen on 127.0.0.1:"),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000: "),
        (["--ssl-certfile", "cert.pem"], "ssl_certfile without its private key: give ssl_keyfile too, or neither"),
        (["--allowed-origin", "example.org"], "allowed_origin 'example.org' is not an origin"),
        (["--api-key", ""], "api_key is empty"),
        (["--api-key-file", "/nowhere/keys"], "api_key_file /nowhere/keys cannot be read: No such file or directory"),
        (["--max-body-bytes", "0"], "--max-body-bytes must be at least 1, not '0'"),
        (["--idle-timeout", "0"], "--idle-timeout must be above 0, not '0'"),
    ],
)
def test_what_cannot_be_served_is_told_before_a_model_is_loaded(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [str(taken.getsockname()[1]) if flag == "TAKEN" else flag for flag in flags]
        assert main(["serve", "--model", "/nowhere", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"chairlift: error: {words}")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere"], "'/nowhere' is neither a directory"),
        (["--max-seq-len", "100000"], "max_seq_len 100000 is more than the model's 2048 positions"),
        (["--max-batch-size", "1000000"], "lower max_batch_size or raise kv_cache_memory_bytes"),
        (["--device", "tpu"], "device 'tpu'"),
    ],
)
def test_a_setting_that_cannot_work_is_one_clear_line(flags: list[str], words: str) -> None:
    code, stderr = run_to_end("serve", "--port", "0", *flags)
    assert code == 2
    assert "Traceback" not in stderr
    assert words in stderr.splitlines()[-1]


async def test_all_addresses_of_a_name_are_taken_at_one_port_and_who_listens_first_has_it() -> None:
    with Listener(ServerConfig(host="localhost", port=0)) as first:
        addresses = [each.getsockname()[:2] for each in first.sockets]
        (port,) = {port for _, port in addresses}
        assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}
        assert not first.is_open_to_others
        config = ServerConfig(host="localhost", port=port)
        words = f"cannot listen on localhost:{port}: .*; choose another --host or --port"
        with Listener(config) as late:  # the system lets several take an address on which nobody listens yet
            first.accept(asyncio.Protocol)
            with pytest.raises(ConfigurationError, match=words):
                late.accept(asyncio.Protocol)
        with pytest.raises(ConfigurationError, match=words):
            Listener(config)


@pytest.mark.parametrize(("keys", "num_warnings"), [("", 1), ("secret key", 0)])
def test_an_open_address_without_keys_is_warned_of_once(keys: str, num_warnings: int) -> None:
    flags = ("--api-key", keys) if keys else ()
    with running(SERVE, "--host", "0.0.0.0", *flags) as process:
        warnings = [line for line in process.log if " WARNING " in line]
    assert ["it asks for no key" in line for line in warnings] == [True] * num_warnings


def test_keys_of_the_environment_are_asked_for_and_never_logged() -> None:
    with running(SERVE, CHAIRLIFT_API_KEY="first-secret,second-secret") as process:
        for key, status in (("first-secret", 200), ("second-secret", 200), ("third", 401)):
            response = httpx.get(f"{process.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == status
            assert "secret" not in response.text
        process.popen.terminate()
        assert process.exit_code() == 0
        assert "secret" not in "".join(process.log)


def test_limits_reach_the_server() -> None:
    flags = ("--client-timeout", "0.2", "--max-body-bytes", "10")
    with running(SERVE, *flags) as process:

        async def send(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            writer.write(data)
            try:
                return await asyncio.wait_for(reader.read(), 10)
            finally:
                writer.close()

        request = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        request += b"Connection: close\r\nContent-Length: %d\r\n\r\n"
        assert asyncio.run(send(request[:9])) == b""
        assert asyncio.run(send(request % 10)).startswith(b"HTTP/1.1 408 ")
        assert asyncio.run(send(request % 11 + b"a" * 11)).startswith(b"HTTP/1.1 413 ")


def test_generate_prints_the_answer_and_nothing_else() -> None:
    script = f"import sys; sys.stdout = sys.stderr; {SERVE}"
    assert run_to_end("generate", "What is 17 + 25?", script=script) == (0, "17 + 25 = 42.\n")


# --- SIGTERM and SIGINT


SMALL_SEND_BUFFERS = """
import socket, sys
from chairlift.__main__ import main
from chairlift.api.http import Connection

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


@pytest.mark.parametrize("num_workers", ["1", "2"])
@pytest.mark.parametrize("second", [None, signal.SIGTERM, signal.SIGINT])
def test_what_is_cut_short_ends_with_a_proper_last_chunk(second: signal.Signals | None, num_workers: str) -> None:
    """By the drain timeout, or at once by a second signal."""
    drain_timeout = "0.3" if second is None else "60"
    body = {**long_stream(2000), "stream_options": {"include_usage": True}}
    with (
        running(SERVE, "--drain-timeout", drain_timeout, "--api-workers", num_workers) as process,
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


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALVES = (
    b"",
    HEAD,
    HEAD + b"Content-Length: 1000\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\na\r\n",
    HEAD + b"Content-Length: 1000\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\nhalf",
)


def test_half_a_request_and_idle_connections_do_not_hold_the_end_up() -> None:
    with running(SERVE) as process, httpx.Client(base_url=process.url, timeout=60) as idle, ExitStack() as stack:
        assert idle.get("/health").status_code == 200  # and its connection stays open
        for half in HALVES:
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", process.port), 20))
            slow.sendall(half)
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
