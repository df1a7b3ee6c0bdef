"""Keys: asked for where there are any, compared whole; where they come from; and certificates for https."""

import asyncio
import signal
import socket
import ssl
from pathlib import Path

import httpx
import pytest
import trustme
from aiohttp import ClientSession
from cryptography.hazmat.primitives import serialization as pem
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from chairlift.__main__ import COMMANDS
from chairlift.api import ServerConfig
from chairlift.api.http.access import KeyLimits, gather_keys, read_keys
from chairlift.api.http.listening import Listener, tls_context
from chairlift.errors import ConfigurationError
from chairlift.flags import read_settings
from tests.api.conftest import serving
from tests.api.fault_support import GATED, SERVE_WITH_WORKERS
from tests.engine.async_support import DEADLINE_S
from tests.support.server_process import long_stream, running


async def test_every_path_but_those_that_tell_nothing_secret_asks_for_a_key_which_is_known_whole() -> None:
    config = ServerConfig.model_validate({"api_key": ["first key", "zweiter-Schlüssel"]})
    known = ["Bearer first key", "Bearer zweiter-Schlüssel"]
    unknown = ["Bearer first", "Bearer first key2", "Bearer FIRST KEY", "", "Bearer", "Bearer ", "Basic first key"]
    async with serving(config, max_batch_size=1, max_seq_len=64) as server, ClientSession(server.url) as http:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/watch", "/page/nowhere", "/nowhere"):
            async with http.get(path) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
                error = (await response.json())["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "first key" not in str(error)
        for path in ("/health", "/metrics", "/version", "/docs", "/openapi.json", "/", "/page/page.js"):
            assert (await http.get(path)).status == 200
        for header in [*known, *unknown, "first key"]:
            async with http.get("/v1/models", headers={"Authorization": header}) as response:
                code = (await response.json()).get("error", {}).get("code")
                expected = (200, None) if header in known else (401, "invalid_api_key")
                assert (header, (response.status, code)) == (header, expected)


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
    ("content", "words"),
    [
        (b"one\nsecret priority=3", "keys, line 2: .*priority must be LOWEST:HIGHEST, such as -10:10, not '3'"),
        (b"secret priority=high", "keys, line 1: .*such as -10:10, not 'high'"),
        (b"secret priority=3:2", "such as -10:10, not '3:2'"),
        (b"secret queue=0", "queue must be above 0 and at most 1, not '0'"),
        (b"secret queue=nan", "queue must be above 0"),
        (b"secret queue=all", "queue must be above 0 and at most 1, not 'all'"),
        (b"secret prio=1:2", "prio= is unknown or given twice"),
        (b"secret queue=1 queue=1", "queue= is unknown or given twice"),
        (b"# none\n", "contains no key"),
        (b"secret\xff\n", "it is not UTF-8$"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_and_does_not_show(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_keys(tmp_path / "keys")
    assert "secret" not in str(caught.value)


EMPTY = "CHAIRLIFT_API_KEY is set but contains no key"


@pytest.mark.parametrize(
    ("keys", "variable", "words"),
    [([], value, EMPTY) for value in ("", " ", ",", " , ")]
    + [(keys, None, "api_key is empty") for keys in ([""], ["one", "  "])],
)
def test_a_place_without_a_key_does_not_open_the_server(
    keys: list[str], variable: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHAIRLIFT_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("CHAIRLIFT_API_KEY", variable)
    with pytest.raises(ConfigurationError, match=words):
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


@pytest.fixture
def certified(tmp_path: Path) -> ServerConfig:
    """A certificate for 127.0.0.1 and its key; beside them lies the authority that clients must trust."""
    config = ServerConfig(port=0, ssl_certfile=tmp_path / "cert.pem", ssl_keyfile=tmp_path / "key.pem")
    issue(config)
    return config


def issue(config: ServerConfig) -> None:
    """A new certificate, by a new authority."""
    assert config.ssl_certfile is not None
    assert config.ssl_keyfile is not None
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(config.ssl_certfile.with_name("authority.pem"))
    issued.private_key_pem.write_to_path(config.ssl_keyfile)
    issued.cert_chain_pems[0].write_to_path(config.ssl_certfile)


async def test_who_trusts_the_certificate_is_served_and_nobody_else(certified: ServerConfig, tmp_path: Path) -> None:
    context = tls_context(certified)
    assert context is not None
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.verify_mode is ssl.CERT_NONE  # of clients
    trusting = DefaultAsyncHttpxClient(verify=ssl.create_default_context(cafile=tmp_path / "authority.pem"))
    async with serving(certified, max_batch_size=1, max_seq_len=64) as server, httpx.AsyncClient() as http:
        assert server.url.startswith("https://127.0.0.1:")
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=trusting) as client:
            stream = await client.completions.create(model="bundled", prompt="Once", max_tokens=3, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason in ("length", "stop")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await http.get(f"{server.url}/health")
        with pytest.raises(httpx.HTTPError):
            await http.get(f"{server.url.replace('https', 'http')}/health")


async def test_a_handshake_that_does_not_come_ends_the_connection(certified: ServerConfig) -> None:
    config = certified.model_copy(update={"client_timeout": 0.2})
    async with serving(config, max_batch_size=1, max_seq_len=64) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(server.url).port)
        assert await asyncio.wait_for(reader.read(1), DEADLINE_S) == b""
        writer.close()


@pytest.mark.parametrize("name", ["ssl_certfile", "ssl_keyfile"])
def test_a_file_that_is_missing_or_no_pem_is_named(certified: ServerConfig, tmp_path: Path, name: str) -> None:
    for path, words in (
        (None, f"give {name} too, or neither"),
        (tmp_path / "nowhere", f"^{name} {tmp_path}/nowhere cannot be read: No such file or directory$"),
        (tmp_path, f"^{name} {tmp_path} cannot be read: Is a directory$"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            tls_context(certified.model_copy(update={name: path}))
    for content in ("", "no PEM at all\n"):
        getattr(certified, name).write_text(content)
        with pytest.raises(ConfigurationError, match="must be PEM files with a certificate and with its private key"):
            tls_context(certified)


def test_a_key_of_another_certificate_or_with_a_password_is_refused(certified: ServerConfig) -> None:
    path = certified.ssl_keyfile
    assert path is not None
    key = pem.load_pem_private_key(path.read_bytes(), None)
    password = pem.BestAvailableEncryption(b"password")
    path.write_bytes(key.private_bytes(pem.Encoding.PEM, pem.PrivateFormat.PKCS8, password))
    with pytest.raises(ConfigurationError, match="ssl_keyfile has a password; give a key without one"):
        tls_context(certified)
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(path)
    with pytest.raises(ConfigurationError, match=r"key\.pem is not the key of the certificate in .*cert\.pem$"):
        tls_context(certified)


def test_without_a_certificate_there_is_none_to_read_again(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"), Listener(ServerConfig(port=0)) as listener:
        listener.renew_certificate()
    assert caplog.messages == ["SIGHUP: there is no certificate to read again; nothing was done"]


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sighup_reads_the_certificate_again_and_cuts_no_stream(
    num_workers: int, certified: ServerConfig, tmp_path: Path
) -> None:
    cert, key = certified.ssl_certfile, certified.ssl_keyfile
    assert cert is not None
    assert key is not None
    flags = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--api-workers", str(num_workers)]
    gate = tmp_path / "gate"
    with (
        running(GATED + SERVE_WITH_WORKERS, *flags, GATE=str(gate)) as process,
        httpx.stream(
            "POST", f"{process.url}/v1/completions", json=long_stream(300), verify=False, timeout=60
        ) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        first = certificate_at(process.port)
        key.write_text("no PEM at all\n")
        process.popen.send_signal(signal.SIGHUP)
        process.until_logged("the certificate was not renewed: ssl_certfile", num_workers)
        assert certificate_at(process.port) == first
        issue(certified)
        process.popen.send_signal(signal.SIGHUP)
        process.until_logged("the certificate was read again", num_workers)
        renewed = ssl.PEM_cert_to_DER_cert(cert.read_text())
        assert {certificate_at(process.port) for _ in range(8 * num_workers)} == {renewed} != {first}
        gate.touch()
        assert [line for line in lines if line][-1] == "data: [DONE]"


def certificate_at(port: int) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 20) as plain, context.wrap_socket(plain) as connection:
        certificate = connection.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate
