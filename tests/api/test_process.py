"""The real process: what it says at its start, and how it ends when its engine dies."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from chairlift.__main__ import main
from chairlift.api import ServerConfig
from chairlift.api.http.listening import Listener
from chairlift.errors import ConfigurationError
from tests.support.server_process import SERVE, long_stream, run_to_end, running

DIES_IN_A_STEP = """
import sys
from chairlift.__main__ import main
from chairlift.engine.core import EngineCore

real_step, num_steps = EngineCore.step, 0

def step(self):
    global num_steps
    num_steps += 1
    if num_steps > 5:
        raise RuntimeError("injected fault")
    return real_step(self)

EngineCore.step = step
sys.exit(main())
"""


def test_a_fresh_interpreter_serves() -> None:
    with running(SERVE, is_forked=False) as process:
        body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        reply = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=20).json()
    assert reply["choices"][0]["message"]["content"] == "17 + 25 = 42."


def test_a_fault_in_a_step_ends_every_request_with_an_error_and_the_process_with_1() -> None:
    with running(DIES_IN_A_STEP) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=long_stream(2000)) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "injected fault" in lines[-1]
        assert '"error"' in lines[-1]
        assert client.get("/health").status_code == 503
        assert client.post("/v1/completions", json={"prompt": "late"}).status_code == 503
        assert process.exit_code() == 1


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
    command = [sys.executable, "-m", "chairlift", "generate", "What is 17 + 25?"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd())
    assert result.returncode == 0
    assert "42" in result.stdout
    assert len(result.stdout.splitlines()) == 1
