"""Keys: asked for where there are any, compared whole; where they come from; and certificates for https."""

import asyncio
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
import trustme
from aiohttp import ClientSession
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from chairlift.__main__ import COMMANDS
from chairlift.api import ServerConfig
from chairlift.api.http.access import KeyLimits, KeyRing, gather_keys, read_keys
from chairlift.api.http.listening import Listener, tls_context
from chairlift.errors import ConfigurationError
from chairlift.flags import read_settings
from tests.api.conftest import in_loop, serving
from tests.engine.async_support import DEADLINE_S
from tests.support.server_process import SERVE, Process, long_stream, running

# --- keys


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url() -> AsyncIterator[str]:
    """A server that knows two keys."""
    config = ServerConfig.model_validate({"api_key": ["first key", "zweiter-Schlüssel"]})
    async with serving(config, max_batch_size=1, max_seq_len=64) as server:
        yield server.url


async def test_a_known_key_is_let_in_and_another_is_a_401(url: str) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="first key", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["bundled"]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="first", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
    assert caught.value.code == "invalid_api_key"
    assert "first key" not in str(caught.value)


async def test_every_path_asks_for_a_key_but_health_metrics_version_the_page_and_the_description(url: str) -> None:
    async with ClientSession() as http:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/watch", "/page/nowhere", "/nowhere"):
            async with http.get(url + path) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        for path in ("/health", "/metrics", "/version", "/docs", "/openapi.json", "/", "/page/page.js"):
            async with http.get(url + path) as response:
                assert response.status == 200


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer ", "Basic first key", "first key"])
async def test_a_header_that_is_no_bearer_key_is_a_401(url: str, header: str) -> None:
    async with ClientSession() as http, http.get(f"{url}/v1/models", headers={"Authorization": header}) as response:
        assert response.status == 401


def test_a_ring_knows_its_keys_whole() -> None:
    ring = KeyRing(dict.fromkeys(["abc", "dé"], KeyLimits.parse()))
    assert [ring.knows(key) for key in ("abc", "dé", "ab", "abcd", "", "ABC")] == [True, True] + [False] * 4


def test_keys_are_read_from_a_file_line_by_line_with_limits_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    lines = ("# ours", " usual ", "", "with spaces queue=0.25", "urgent priority=-10:10")
    path.write_text("\n".join([*lines, "both priority=-1:1\tqueue=1", "YWJj=", ""]))
    assert read_keys(path) == {
        "usual": KeyLimits(0, 100, 0.5),
        "with spaces": KeyLimits(0, 100, 0.25),
        "urgent": KeyLimits(-10, 10, 0.5),
        "both": KeyLimits(-1, 1, 1.0),
        "YWJj=": KeyLimits(0, 100, 0.5),
    }


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ("priority=3", "priority must be LOWEST:HIGHEST, such as -10:10, not '3'"),
        ("priority=high", "such as -10:10, not 'high'"),
        ("priority=3:2", "such as -10:10, not '3:2'"),
        ("queue=0", "queue must be above 0 and at most 1, not '0'"),
        ("queue=nan", "queue must be above 0"),
        ("queue=all", "queue must be above 0 and at most 1, not 'all'"),
        ("prio=1:2", "prio= is unknown or given twice"),
        ("queue=1 queue=1", "queue= is unknown or given twice"),
    ],
)
def test_a_limit_that_is_none_is_refused_by_its_line_without_the_key(tmp_path: Path, limits: str, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"one\nsecret {limits}\n")
    with pytest.raises(ConfigurationError, match=f"keys, line 2: .*{words}") as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"# none\n", "contains no key"), (b"secret\xff\n", "it is not UTF-8$"), (None, "cannot be read: No such file")],
)
def test_a_file_without_keys_is_refused_and_does_not_show(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_keys(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
def test_a_variable_without_a_key_does_not_open_the_server(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHAIRLIFT_API_KEY", value)
    with pytest.raises(ConfigurationError, match="CHAIRLIFT_API_KEY is set but contains no key"):
        gather_keys(ServerConfig())


@pytest.mark.parametrize("keys", [[""], ["one", "  "]])
def test_an_empty_key_is_refused(keys: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    with pytest.raises(ConfigurationError, match="api_key is empty"):
        gather_keys(ServerConfig.model_validate({"api_key": keys}))


@pytest.mark.parametrize(
    ("flags", "variables", "keys"),
    [
        (["--api-key", "key-1", "--api-key", "[key-2"], {}, ["key-1", "[key-2"]),
        ([], {"CHAIRLIFT_SERVE__API_KEY": "key-1,key-2"}, ["key-1", "key-2"]),  # as every flag has its variable
        (["--api-key", "key-3"], {"CHAIRLIFT_SERVE__API_KEY": "key-1,key-2"}, ["key-3"]),
        (["--api-key", " key-3 "], {"CHAIRLIFT_API_KEY": "key-1, key 2"}, ["key-3", "key-1", "key 2"]),
        (["--api-key", "key-3", "--api-key-file", "FILE"], {"CHAIRLIFT_API_KEY": "key-1"}, ["key-3", "key-1", "key-4"]),
        ([], {}, []),
    ],
)
def test_keys_come_through_the_command_line(
    flags: list[str], variables: dict[str, str], keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    path.write_text("key-4\n")
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, config = read_settings(COMMANDS["serve"], [str(path) if flag == "FILE" else flag for flag in flags])
    assert list(gather_keys(config)) == keys
    assert "key-" not in repr(config)


# --- https, with a certificate made for the test


@dataclass(frozen=True)
class Files:
    """A certificate for 127.0.0.1, its key, and the authority that clients must trust."""

    cert: Path
    key: Path
    authority: Path

    @property
    def config(self) -> ServerConfig:
        return ServerConfig(port=0, ssl_certfile=self.cert, ssl_keyfile=self.key)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    files = Files(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "authority.pem")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(files.authority)
    issued.private_key_pem.write_to_path(files.key)
    issued.cert_chain_pems[0].write_to_path(files.cert)
    return files


@in_loop
async def secure_url(files: Files) -> AsyncIterator[str]:
    """A server with that certificate."""
    async with serving(files.config, max_batch_size=1, max_seq_len=64) as server:
        yield server.url


async def test_the_openai_client_streams_over_https(secure_url: str, files: Files) -> None:
    assert secure_url.startswith("https://127.0.0.1:")
    trusting = DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=files.authority))
    async with AsyncOpenAI(base_url=f"{secure_url}/v1", api_key="none", max_retries=0, http_client=trusting) as client:
        stream = await client.completions.create(model="bundled", prompt="Once", max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


async def test_who_does_not_trust_the_certificate_or_speaks_http_gets_nothing(secure_url: str) -> None:
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(f"{secure_url}/health")
        with pytest.raises(httpx.HTTPError):
            await client.get(f"{secure_url.replace('https', 'http')}/health")


async def test_a_handshake_that_does_not_come_ends_the_connection(files: Files) -> None:
    config = files.config.model_copy(update={"client_timeout": 0.2})
    async with serving(config, max_batch_size=1, max_seq_len=64) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
        assert await asyncio.wait_for(reader.read(1), DEADLINE_S) == b""
        writer.close()


def test_nothing_older_than_tls_1_2_is_spoken(files: Files) -> None:
    context = tls_context(files.config)
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE  # of clients
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize("missing", ["ssl_certfile", "ssl_keyfile"])
def test_one_file_without_the_other_is_refused(files: Files, missing: str) -> None:
    config = files.config.model_copy(update={missing: None})
    with pytest.raises(ConfigurationError, match=rf"give {missing} too, or neither"):
        tls_context(config)


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile"])
def test_a_file_that_cannot_be_read_is_named(files: Files, tmp_path: Path, name: str) -> None:
    for path, reason in ((tmp_path / "nowhere", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigurationError, match=rf"^{name} {path} cannot be read: {reason}$"):
            tls_context(files.config.model_copy(update={name: path}))


def test_a_key_of_another_certificate_is_refused(files: Files) -> None:
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(files.key)
    with pytest.raises(ConfigurationError, match=r"key\.pem is not the key of the certificate in .*cert\.pem$"):
        tls_context(files.config)


@pytest.mark.parametrize("name", ["cert", "key"])
@pytest.mark.parametrize("content", ["", "no PEM at all\n"])
def test_files_that_hold_something_else_are_refused(files: Files, name: str, content: str) -> None:
    getattr(files, name).write_text(content)
    with pytest.raises(ConfigurationError, match="must be PEM files with a certificate and with its private key"):
        tls_context(files.config)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(files: Files) -> None:
    key = load_pem_private_key(files.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password"))
    files.key.write_bytes(locked)
    with pytest.raises(ConfigurationError, match="ssl_keyfile has a password; give a key without one"):
        tls_context(files.config)


def test_without_a_certificate_there_is_none_to_read_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), Listener(ServerConfig(port=0)) as listener:
        listener.renew_certificate()
    assert caplog.messages == ["SIGHUP: there is no certificate to read again; nothing was done"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_sighup_reads_the_certificate_again_and_cuts_no_stream(num_workers: int, files: Files) -> None:
    flags = ["--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key), "--api-workers", str(num_workers)]
    with running(SERVE, *flags) as process, streaming(process, 1500) as lines:
        first = certificate_of(process)
        files.key.write_text("no PEM at all\n")
        process.popen.send_signal(signal.SIGHUP)
        process.until_logged("the certificate was not renewed: ssl_certfile", num_workers)
        assert certificate_of(process) == first
        issued = trustme.CA().issue_cert("127.0.0.1")
        issued.private_key_pem.write_to_path(files.key)
        issued.cert_chain_pems[0].write_to_path(files.cert)
        process.popen.send_signal(signal.SIGHUP)
        process.until_logged("the certificate was read again", num_workers)
        renewed = ssl.PEM_cert_to_DER_cert(files.cert.read_text())
        assert {certificate_of(process) for _ in range(8 * num_workers)} == {renewed} != {first}
        assert [line for line in lines if line][-1] == "data: [DONE]"


@contextmanager
def streaming(process: Process, num_tokens: int) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    body = long_stream(num_tokens)
    with (
        httpx.Client(base_url=process.url, verify=False, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        yield lines


def certificate_of(process: Process) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", process.port), 20) as plain, context.wrap_socket(plain) as connection:
        certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate
