"""The real process: what it says at its start, how it ends by signals, and how when its engine dies."""

import asyncio
import http.client
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from chairlift.__main__ import main
from chairlift.api import ServerConfig
from chairlift.api.http.listening import Listener
from chairlift.errors import ConfigurationError
from tests.api.fault_support import GATED, SERVE_WITH_WORKERS, SLOW
from tests.support.server_process import SERVE, Process, long_stream, run_to_end, running

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LATE, JSON = {"prompt": "late", "max_tokens": 1}, {"Content-Type": "application/json"}


@pytest.mark.slow
def test_a_fresh_interpreter_serves() -> None:
    with running(SERVE, is_forked=False) as process:
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        reply = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=20).json()
    assert reply["choices"][0]["message"]["content"] == "17 + 25 = 42."


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        # What is told before a model is loaded.
        (["--model", "/nowhere", "--port", "TAKEN"], "cannot listen on 127.0.0.1:"),
        (["--model", "/nowhere", "--host", "256.0.0.1"], "cannot listen on 256.0.0.1:8000: "),
        (["--model", "/nowhere", "--ssl-certfile", "cert.pem"], "ssl_certfile without its private key: give ssl_keyfi"),
        (["--model", "/nowhere", "--allowed-origin", "example.org"], "allowed_origin 'example.org' is not an origin"),
        (["--model", "/nowhere", "--api-key", ""], "api_key is empty"),
        (["--model", "/nowhere", "--api-key-file", "/no/keys"], "api_key_file /no/keys cannot be read: No such file"),
        (["--model", "/nowhere", "--max-body-bytes", "0"], "--max-body-bytes must be at least 1, not '0'"),
        (["--model", "/nowhere", "--idle-timeout", "0"], "--idle-timeout must be above 0, not '0'"),
        (["--model", "/nowhere", "--uds", "/nowhere/socket"], "cannot listen on /nowhere/socket: No such file or"),
        (["--uds", "/tmp/socket", "--api-workers", "2"], "--uds has one process for HTTP; leave --api-workers out"),
        (["--model", "/nowhere", "--port", "0"], "'/nowhere' is neither a directory"),
        # And what only a model tells.
        (["--port", "0", "--max-seq-len", "100000"], "max_seq_len 100000 is more than the model's 2048 positions"),
        (["--port", "0", "--max-batch-size", "1000000"], "max_batch_size or raise kv_cache_memory_bytes"),
        (["--port", "0", "--device", "tpu"], "device 'tpu'"),
    ],
)
def test_what_cannot_be_served_is_one_clear_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [str(taken.getsockname()[1]) if flag == "TAKEN" else flag for flag in flags]
        assert main(["serve", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("chairlift: error: ")
    assert words in line


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


def test_a_unix_socket_is_served_and_removed_and_takes_the_place_of_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with closing(socket.socket(socket.AF_UNIX)) as dead:
        dead.bind(str(path))
    with running(SERVE, "--uds", str(path)) as process:
        assert process.url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o666  # a proxy is another user, whom the directory lets in
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=20) as client:
            assert client.get("http://localhost/v1/models").json()["object"] == "list"
            assert client.get("http://example.org/v1/models").status_code == 403
        code, said = run_to_end("serve", "--uds", str(path))
        assert (code, said) == (
            2,
            f"chairlift: error: cannot listen on {path}: Address already in use; choose another --uds\n",
        )
        process.popen.terminate()
        assert process.exit_code() == 0
    assert not path.exists()


def test_keys_of_the_environment_are_asked_for_and_never_logged() -> None:
    with running(SERVE, "--host", "0.0.0.0", CHAIRLIFT_API_KEY="first-secret,second-secret") as process:
        for key, status in (("first-secret", 200), ("second-secret", 200), ("third", 401)):
            response = httpx.get(f"{process.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert response.status_code == status
            assert "secret" not in response.text
        process.popen.terminate()
        assert process.exit_code() == 0
        assert [line for line in process.log if "secret" in line or " WARNING " in line] == []


def test_limits_reach_the_server_and_an_open_address_without_a_key_is_warned_of() -> None:
    flags = ("--host", "0.0.0.0", "--client-timeout", "0.2", "--max-body-bytes", "10")
    with running(SERVE, *flags) as process:
        (warning,) = (line for line in process.log if " WARNING " in line)
        assert "requires no API key" in warning

        async def send(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", process.port)
            writer.write(data)
            try:
                return await asyncio.wait_for(reader.read(), 10)
            finally:
                writer.close()

        request = HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n"
        assert asyncio.run(send(request[:9])) == b""
        assert asyncio.run(send(request % 10)).startswith(b"HTTP/1.1 408 ")
        assert asyncio.run(send(request % 11 + b"a" * 11)).startswith(b"HTTP/1.1 413 ")


def test_generate_prints_the_answer_and_nothing_else() -> None:
    script = f"import sys; sys.stdout = sys.stderr; {SERVE}"
    assert run_to_end("generate", "What is 17 + 25?", script=script) == (0, "17 + 25 = 42.\n")


SMALL_SEND_BUFFERS = f"""
import socket
from chairlift.api.http.connections import Connection

real = Connection.connection_made

def connection_made(self, transport):
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    real(self, transport)

Connection.connection_made = connection_made
{SERVE}
"""


@contextmanager
def serving(*flags: str, script: str = SERVE) -> Iterator[tuple[Process, httpx.Client]]:
    with running(script, *flags) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        yield process, client


def draining(process: Process, client: httpx.Client) -> None:
    """Tells the process to end, once it has begun with what was sent before; returns when it knows."""
    assert client.get("/health").status_code == 200
    process.popen.send_signal(signal.SIGTERM)
    status = 200
    while status != 503:
        with suppress(httpx.RemoteProtocolError):  # a worker without streams leaves, and its connections
            status = client.get("/health").status_code


def chunks(lines: Iterator[str]) -> list[dict[str, Any]]:
    """The rest of a stream, which must end properly."""
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def test_a_running_stream_finishes_while_new_work_is_refused(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with running(GATED + SERVE, GATE=str(gate)) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=long_stream(300)) as stream:
            lines = stream.iter_lines()
            next(lines)
            draining(process, client)
            late = client.post("/v1/completions", json=LATE)
            assert (late.status_code, late.headers["Retry-After"]) == (503, "1")
            assert late.json()["error"]["code"] == "unavailable"
            assert client.get("/v1/models").status_code == 200
            gate.touch()
            assert chunks(lines)[-1]["choices"][0]["finish_reason"] == "length"
        assert process.exit_code() == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", ["1", "2"])
def test_prompts_are_saved_on_sigterm_and_found_by_the_next_server(tmp_path: Path, num_workers: str) -> None:
    flags = ["--prefix-cache-dir", str(tmp_path / "prompts"), "--api-workers", num_workers]
    body = {"prompt": [65] * 300, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    choices, num_cached = [], []
    for _ in range(2):
        with running(SERVE, *flags, "--model", "bundled") as process:
            reply = httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).json()
            process.popen.terminate()
            assert process.exit_code() == 0
        choices.append(reply["choices"])
        num_cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert (num_cached, choices[0] == choices[1]) == ([0, 256], True)


def test_a_router_reads_503_before_requests_are_refused() -> None:
    with serving("--drain-delay", "60") as (process, client):
        draining(process, client)
        assert client.post("/v1/completions", json=LATE).status_code == 200
        process.popen.send_signal(signal.SIGTERM)  # which ends the delay
        assert process.exit_code() == 0


@pytest.mark.parametrize(
    ("second", "num_workers"),
    [(None, "1"), (signal.SIGINT, "1"), pytest.param(signal.SIGTERM, "2", marks=pytest.mark.slow)],
)
def test_what_is_cut_short_ends_with_a_proper_last_chunk_or_brings_what_there_is(
    second: signal.Signals | None, num_workers: str
) -> None:
    """By the drain timeout, or at once by a second signal."""
    drain_timeout = "0.3" if second is None else "60"
    body = {**long_stream(2000), "stream_options": {"include_usage": True}}
    flags = ("--drain-timeout", drain_timeout, "--api-workers", num_workers)
    with serving(*flags, script=SLOW + SERVE_WITH_WORKERS) as (process, client):
        with (
            closing(http.client.HTTPConnection("127.0.0.1", process.port, timeout=60)) as whole,
            client.stream("POST", "/v1/completions", json=body) as stream,
        ):
            whole.request("POST", "/v1/completions", json.dumps(long_stream(2000) | {"stream": False}), JSON)
            lines = stream.iter_lines()
            next(lines)
            while "\nchairlift_requests_running 2" not in client.get("/metrics").text:
                pass
            draining(process, client)
            if second is not None:
                process.popen.send_signal(second)
            *_, last, usage = chunks(lines)
            answer = whole.getresponse()
            assert answer.status == 200
            assert json.loads(answer.read())["choices"][0]["finish_reason"] == "abort"
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["choices"] == []
        assert 0 < usage["usage"]["completion_tokens"] < 2000
        assert process.exit_code() == 3  # which waits for less than 60 s


HALVES = (
    b"",
    HEAD,
    HEAD + b"Content-Length: 1000\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\na\r\n",
    HEAD + b"Content-Length: 1000\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08",
    HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\nhalf",
)


def test_half_a_request_and_idle_connections_do_not_hold_the_end_up() -> None:
    with serving() as (process, idle), ExitStack() as stack:
        assert idle.get("/health").status_code == 200  # and its connection stays open
        for half in HALVES:
            slow = stack.enter_context(socket.create_connection(("127.0.0.1", process.port), 20))
            slow.sendall(half)
        assert slow.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"  # it has begun
        process.popen.send_signal(signal.SIGTERM)
        assert slow.recv(20).startswith(b"HTTP/1.1 503 ")
        assert process.exit_code() == 0  # which waits for less than the drain timeout


@pytest.mark.slow
def test_a_client_that_reads_nothing_does_not_hold_the_end_up() -> None:
    body = json.dumps({**long_stream(250), "n": 4, "logprobs": 5}).encode()  # more than buffers hold
    with running(SMALL_SEND_BUFFERS, "--drain-timeout", "1") as process, socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", process.port))
        silent.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        silent.recv(1)
        start = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        assert process.exit_code() == 3
        assert time.monotonic() - start > 1
        assert any("ending 1 requests that still run" in line for line in process.log)
