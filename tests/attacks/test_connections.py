"""Attacks below JSON: compressed and unfinished bodies, floods of connections and requests, readers that do not read,
logs that nobody reads, signals, and too few open files.
"""

import asyncio
import contextlib
import errno
import gzip
import json
import re
import resource
import select
import socket
import time
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.attacks.attacker import CHAT, COMPLETIONS, KEY, MAX_BODY, TOKENIZE, Attacker, Shot, post
from tests.attacks.harness import Attack, Target
from tests.support.server_process import SERVE, long_stream, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

RESPONSES = "/v1/responses"
HELLO = b'{"prompt":"Hello!","max_tokens":1}'
JSON = {"Content-Type": "application/json"}


def head(more: str, path: str = COMPLETIONS) -> bytes:
    usual = f"Host: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
    return f"POST {path} HTTP/1.1\r\n{usual}\r\n{more}\r\n\r\n".encode()


CHUNKED = head("Connection: close\r\nTransfer-Encoding: chunked")


# Compressed bodies


@cache
def bomb(num_gigabytes: int) -> bytes:
    """As gzip: a thousandth of what it holds. One compressed piece stands there again and again."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packer.compress(b"a")
    packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(10**8)) + packer.flush(zlib.Z_FULL_FLUSH)
    return gzip.compress(b"")[:10] + piece * (10 * num_gigabytes) + packer.flush(zlib.Z_FINISH) + bytes(8)


def packed(body: bytes | Callable[[], bytes], encoding: str, status: int, label: str, path: str = COMPLETIONS) -> Shot:
    headers = {"Content-Encoding": encoding}
    return Shot(path, body, label, headers=headers, allowed=frozenset({status}))


COMPRESSED = [
    packed(partial(bomb, 10), "gzip", 413, "a bomb of 10 GB"),
    packed(zlib.compress(bytes(10**7 * 2)), "deflate", 413, "20 MB of zeros"),
    packed(gzip.compress(bytes(MAX_BODY + 1)), "gzip", 413, "a byte too much"),
    packed(gzip.compress(b'{"messages":[' + b"1," * (MAX_BODY // 2 - 20) + b"1]}"), "gzip", 400, "10 MB of ones", CHAT),
    packed(gzip.compress(gzip.compress(bytes(10**7))), "gzip, gzip", 415, "a bomb in a bomb"),
    packed(HELLO, "a" * 4000, 415, "an encoding with a long name"),
]


# Bodies that come slowly, in crumbs, or not at all; replies that nobody reads


async def slow_bodies(attacker: Attacker) -> None:
    """200 clients send a byte now and then."""

    async def trickle() -> None:
        _, writer = await attacker.connect()
        writer.write(head(f"Content-Length: {MAX_BODY}"))
        with contextlib.suppress(OSError):
            for _ in range(8):
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.25)
        writer.transport.abort()

    await asyncio.gather(*(trickle() for _ in range(200)))


async def long_heads(attacker: Attacker) -> None:
    lines = "\r\n".join(f"X-Filling-{number}: {'a' * 4000}" for number in range(2_000))
    for raw in (head(lines), b"GET /" + b"a" * 10**7 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"a" * 10**7):
        await attacker.exchange(raw)
    await attacker.exchange(b"\r\n" * (5 * 10**6), 2.0)


async def page_floods(attacker: Attacker) -> None:
    for path in ("/openapi.json", "/docs", "/metrics", "/", "/v1/models", "/nothing"):
        await attacker.fire_at_once([Shot(path, method="GET")] * 50)


async def burst_on_open_connections(attacker: Attacker) -> None:
    connections = [await attacker.connect() for _ in range(1000)]
    for _, writer in connections:
        writer.write(TOKENS.raw())
    replies = await asyncio.gather(*(reader.read() for reader, _ in connections))
    assert all(reply.startswith(b"HTTP/1.1 200") for reply in replies)
    for _, writer in connections:
        writer.close()


def held(raw: bytes, number: int, seconds: float = 2.0) -> Attack:
    """So many clients send this, and read nothing."""
    return lambda attacker: attacker.hold(raw, number, seconds)


def with_tools(num_bytes: int, *, is_streamed: bool) -> bytes:
    """A request for a response that repeats its tools, and is kept."""
    tool = {"type": "function", "name": "f", "description": "x" * num_bytes}
    body = {"input": "a", "tools": [tool], "tool_choice": "none", "max_output_tokens": 1}
    return json.dumps({**body, "stream": is_streamed, "store": not is_streamed}).encode()


async def unread_repeats(attacker: Attacker) -> None:
    """Declares tools that are as large as a body, and tools that are as large as they may be."""
    for num_bytes in (MAX_BODY - 1000, 1_000_000):
        body = with_tools(num_bytes, is_streamed=True)
        await attacker.hold(head(f"Content-Length: {len(body)}", RESPONSES) + body, 84, 4.0)


async def unread_stored_response(attacker: Attacker) -> None:
    body = with_tools(1_000_000, is_streamed=False)
    _, reply = await attacker.exchange(head(f"Connection: close\r\nContent-Length: {len(body)}", RESPONSES) + body)
    (name,) = re.findall(rb'"id":"(resp_[0-9a-f]+)"', reply)[:1]
    question = head("Content-Length: 0", f"{RESPONSES}/{name.decode()}").replace(b"POST", b"GET", 1)
    await attacker.hold(question, 1000, 4.0)


def sent(make: Callable[[], bytes], limit_s: float = 30.0) -> Attack:
    return lambda attacker: attacker.exchange(make(), limit_s)


def at_once(number: int, shot: Shot, at_most: int = 1000) -> Attack:
    return lambda attacker: attacker.fire_at_once([shot] * number, at_most)


TOKENS = Shot(TOKENIZE, b'{"prompt":"Hello!"}', "burst")
BOMB = Shot(COMPLETIONS, partial(bomb, 1), headers={"Content-Encoding": "gzip"}, allowed=frozenset({413, 429, 503}))
STREAM = b'{"prompt":"a","max_tokens":1900,"ignore_eos":true,"stream":true,"logprobs":5}'
LARGE_REPLY = b'{"tokens":[' + b"97," * 300_000 + b"97]}"
LARGE = ("unread repeats of tools", "unread stored responses")
CONNECTIONS: dict[str, Attack] = {
    "compressed bodies are bounded by what they hold": COMPRESSED,
    "bombs together are bounded too": at_once(20, BOMB),
    "half of 10 MB": held(head(f"Content-Length: {MAX_BODY}") + b"a" * (MAX_BODY // 2), 50),
    "slow bodies": slow_bodies,
    "half of a head": held(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0", 500),
    "2 MB in chunks of a byte": sent(lambda: CHUNKED + b"1\r\na\r\n" * 2_000_000 + b"0\r\n\r\n"),
    "chunks without end": sent(lambda: CHUNKED + (b"100000\r\n" + b"a" * 2**20 + b"\r\n") * 40, 2.0),
    "long chunk extensions": sent(lambda: CHUNKED + (b"1;" + b"x" * 4000 + b"\r\na\r\n") * 2_000 + b"0\r\n\r\n"),
    "unread streams": held(head(f"Content-Length: {len(STREAM)}") + STREAM, 64),
    "unread replies": held(head(f"Content-Length: {len(LARGE_REPLY)}", "/detokenize") + LARGE_REPLY, 20),
    "unread repeats of tools": unread_repeats,
    "unread stored responses": unread_stored_response,
    "10,000 pipelined questions": sent(lambda: b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 10_000, 2.0),
    "2,000 pipelined posts": sent(lambda: (head(f"Content-Length: {len(HELLO)}", TOKENIZE) + HELLO) * 2_000, 2.0),
    "long heads": long_heads,
    "page floods": page_floods,
    "watchers": at_once(300, Shot("/watch", method="GET", leaves_after=2.0)),
    "streams that are left at once": at_once(
        400, post(COMPLETIONS, {**long_stream(1900), "n": 8}, leaves_after=0.05), at_most=20
    ),
    "errors, which cost a log line each": at_once(500, Shot(COMPLETIONS, b"{", "half a body"), at_most=20),
    "a burst of requests": at_once(1000, TOKENS),
    "a burst on open connections": burst_on_open_connections,
}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_connections_of_one_client_hold_up_no_other(target: Target, name: str) -> None:
    target.withstand(CONNECTIONS[name], linger_s=0.5)
    target.is_trusted = name not in LARGE  # whose memory the next attack would not be measured from


# A burst


def test_a_burst_of_a_thousand_connections_is_accepted_without_a_second_attempt(target: Target) -> None:
    """The kernel drops what does not fit into the queue of a listening socket, and tries again after a second."""
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < 1024:
        pytest.skip("this system's listening sockets hold fewer")
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        pending = {}
        for _ in range(1000):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            assert connection.connect_ex(("127.0.0.1", target.process.port)) in (0, errno.EINPROGRESS)
            pending[connection.fileno()] = connection
        poll = select.poll()
        for number in pending:
            poll.register(number, select.POLLOUT)
        took = 0.0
        while pending and took < 10.0:
            for number, _ in poll.poll(100):
                poll.unregister(number)
                del pending[number]
            took = time.monotonic() - begin
    assert not pending
    assert took < 0.9, f"the last of 1,000 connections came after {took:.2f} s"


# Headers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Authorization", "Bearer " + "\u00ff" * 4000),
        ("X-Request-Id", "a" * 7000),
        ("traceparent", "00-" + "0" * 7000),
        ("Content-Type", "application/json; charset=" + "a" * 5000),
        ("Content-Type", "application/json; charset=utf-7"),
        ("Cookie", "a=b;" * 1500),
        ("Range", "bytes=0-" + "9" * 5000),
        ("Upgrade", "websocket"),
        ("Accept-Encoding", "gzip;q=" + "9" * 5000),
        ("If-Modified-Since", "9" * 5000),
    ],
)
def test_no_header_makes_it_fail(target: Target, name: str, value: str) -> None:
    usual = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    headers = {key.encode(): text.encode("latin-1") for key, text in {**usual, name: value}.items()}
    with httpx.Client(base_url=target.process.url, timeout=20) as client:
        for method, path in (("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/")):
            reply = client.request(method, path, headers=headers, content=HELLO if method == "POST" else None)
            assert reply.status_code < 500
    assert target.is_alive


# Processes of their own


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    with running(SERVE, "--log-interval", "0.05", reads_log=False) as process:
        with httpx.Client(base_url=process.url, timeout=10) as client:
            statuses = {client.post(TOKENIZE, json={"prompt": 1}).status_code for _ in range(400)}
            statuses |= {client.post(COMPLETIONS, content=HELLO, headers=JSON).status_code for _ in range(100)}
            assert statuses == {200, 400}
            assert client.get("/health").status_code == 200
        process.popen.terminate()
        assert process.popen.wait(20) == 0


def test_too_few_open_files_are_told_in_the_log_and_served_again_when_there_are_enough() -> None:
    with running(SERVE) as process, httpx.Client(base_url=process.url, timeout=60) as client:
        server = psutil.Process(process.popen.pid)
        with client.stream("POST", COMPLETIONS, json=long_stream(1900)) as stream, contextlib.ExitStack() as stack:
            lines = stream.iter_lines()
            next(lines)
            limit = server.num_fds() + 20
            server.rlimit(resource.RLIMIT_NOFILE, (limit, limit))
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", process.port), 10))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1}).status_code == 200
        assert httpx.get(f"{process.url}/health", timeout=10).status_code == 200  # on a connection of its own
        process.popen.terminate()
        assert process.exit_code() == 0
        assert any(" WARNING " in line and "raise the limit (ulimit -n)" in line for line in process.log)
        assert len(process.log) < 100, "it tells it again and again"


async def test_a_signal_amid_an_attack_ends_it_in_time() -> None:
    """Half bodies, bodies being checked, streams that are read and streams that are not."""
    with running(SERVE, "--api-key", KEY, "--drain-timeout", "2") as process:
        attacker = Attacker(process.port)
        ones = post(CHAT, {"messages": [1] * 1_000_000}, leaves_after=14.0)
        streams = [post(COMPLETIONS, long_stream(1900), leaves_after=14.0)] * 40
        attack = asyncio.gather(
            attacker.fire_at_once([ones] * 4 + streams),
            attacker.hold(head("Content-Length: 1000") + b"{", 20, 14.0),
            attacker.hold(streams[0].raw(), 20, 14.0),
        )
        await asyncio.sleep(1.0)
        process.popen.terminate()
        assert await asyncio.to_thread(process.popen.wait, 10) in (0, 3)
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        await asyncio.sleep(0)  # in which connections are closed
