"""Bodies: which are taken, what is unpacked, how many bytes may wait, and what is left of them then."""

import asyncio
import gc
import gzip
import json
import tracemalloc
import zlib
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chairlift.api import ServerConfig
from chairlift.api.http.bodies import MAX_JSON_VALUES, RawBody, cost_of
from chairlift.api.openai.chat import ChatCompletionRequest
from chairlift.api.openai.tokens import DetokenizeRequest
from chairlift.api.wire.complaints import complaint_of
from chairlift.errors import InvalidRequest
from tests.api.conftest import Server
from tests.api.contract import CHAT, COMPLETIONS, MESSAGES
from tests.api.fault_support import RawClient, connect, forward_of, held, post, serving, until_idle
from tests.engine.async_support import wait_until

BODY = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
ZIPPED = gzip.compress(BODY, mtime=0)  # without the time, so that every process names the tests alike
JSON = {"Content-Type": "application/json"}


async def send(server: Server, data: bytes, headers: dict[str, str], path: str = COMPLETIONS) -> tuple[int, str]:
    """The status, and the error's message if there is one."""
    async with (
        aiohttp.ClientSession(skip_auto_headers=["Content-Type"]) as http,
        http.post(server.url + path, data=data, headers=headers) as response,
    ):
        return response.status, (await response.json()).get("error", {}).get("message", "")


@pytest.mark.parametrize(
    "path", [COMPLETIONS, CHAT, "/v1/responses", MESSAGES, f"{MESSAGES}/count_tokens", "/tokenize", "/detokenize"]
)
async def test_what_a_foreign_page_may_send_anywhere_is_a_415(server: Server, path: str) -> None:
    wanted = "the body must be sent as Content-Type: application/json"
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/json", "json"):
        assert await send(server, BODY, {"Content-Type": kind}, path) == (415, f"{wanted}, not {kind}")
    assert await send(server, BODY, {}, path) == (415, f"{wanted}, and has none")
    latin = {"Content-Type": "application/json; charset=latin-1"}
    assert await send(server, BODY, latin, path) == (415, "the body must be sent as UTF-8, not latin-1")


async def test_compressed_bodies_are_unpacked_and_others_told_the_encodings_that_are(server: Server) -> None:
    bare = zlib.compressobj(wbits=-15)
    deflated = (zlib.compress(BODY), bare.compress(BODY) + bare.flush())
    packed = [("gzip", ZIPPED), ("X-Gzip", ZIPPED), *(("deflate", data) for data in deflated), ("identity", BODY)]
    for encoding, data in packed:
        assert await send(server, data, {**JSON, "Content-Encoding": encoding}) == (200, ""), encoding
    for encoding in ("br", "zstd", "gzip, gzip", "none"):
        message = f"Content-Encoding {encoding} is not known here; known are gzip, x-gzip, deflate"
        assert await send(server, BODY, {**JSON, "Content-Encoding": encoding}) == (415, message)
    for data in (b"", b"no gzip", ZIPPED[:-1], ZIPPED + b"more"):  # what is not one whole stream
        status, message = await send(server, data, {**JSON, "Content-Encoding": "gzip"})
        assert (status, message.partition("check its ")[2]) == (400, "Content-Encoding"), data


async def test_a_body_that_unpacks_to_more_than_is_allowed_is_a_413() -> None:
    async with serving(ServerConfig(max_body_bytes=2000)) as server:
        for size, status in ((2000, 200), (2001, 413), (2**26, 413)):
            data = gzip.compress(BODY.ljust(size))
            reply = await send(server, data, {**JSON, "Content-Encoding": "gzip"})
            assert (reply[0], reply[1][:23]) == (status, "" if status == 200 else "the body is too large: ")


def test_of_a_bomb_no_more_is_unpacked_than_is_allowed() -> None:
    bomb = RawBody(gzip.compress(bytes(2**26)), "gzip", 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(aiohttp.web.HTTPRequestEntityTooLarge):
            bomb.parse(DetokenizeRequest)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def cost(value: Any) -> int:
    """Returns what stands outside of strings: 4 for a list or an object, 8 for a name, 1 for a comma."""
    if isinstance(value, dict):
        return 4 + sum(8 + cost(each) for each in value.values()) + max(0, len(value) - 1)
    if isinstance(value, list):
        return 4 + sum(map(cost, value)) + max(0, len(value) - 1)
    return 0


TEXTS = st.text('\\",:[]{}aü', max_size=12)
VALUES = st.recursive(TEXTS | st.floats(), lambda each: st.lists(each) | st.dictionaries(TEXTS, each), max_leaves=40)


@given(value=VALUES, piece=st.sampled_from([1, 2, 3, 64]))
def test_values_are_counted_whatever_strings_hold_and_wherever_pieces_end(value: Any, piece: int) -> None:
    assert cost_of(json.dumps([value, value]).encode(), enough=0, piece=piece) == cost([value, value])


def test_many_values_are_refused_and_a_long_text_full_of_commas_is_not() -> None:
    many = json.dumps({"tokens": [1] * MAX_JSON_VALUES}).encode()
    with pytest.raises(InvalidRequest, match="too many JSON values: 262144 numbers or some 10485 messages at most"):
        RawBody(many, None, len(many)).parse(DetokenizeRequest)
    text = json.dumps({"tokens": [1], "model": ",[{:" * MAX_JSON_VALUES}).encode()
    assert RawBody(text, None, len(text)).parse(DetokenizeRequest).tokens == [1]


def waiting_bytes(server: Server) -> int:
    return server.api.service.bodies._num_waiting


async def half(server: Server, num_bytes: int) -> RawClient:
    """A client that has sent so many bytes of its body, and goes on with nothing."""
    client = await connect(server.url)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: 5000"
    client.send(f"{head}\r\n\r\n".encode() + b" " * num_bytes)
    return client


async def test_one_client_fills_half_of_what_may_wait_until_it_leaves() -> None:
    async with serving(ServerConfig(max_body_bytes=5000)) as server:
        server.api.service.bodies.max_waiting = 10_000
        first = await half(server, 4900)
        await wait_until(lambda: waiting_bytes(server) == 4900, "it waits")
        message = "too many bytes of your requests are pending; send fewer at once"
        assert await send(server, BODY.ljust(101), JSON) == (429, message)
        assert await send(server, BODY.ljust(100), JSON) == (200, "")
        first.reset()
        await wait_until(lambda: waiting_bytes(server) == 0, "it has left")
        assert await send(server, BODY.ljust(5000), JSON) == (200, "")
        assert waiting_bytes(server) == 0


async def test_bytes_are_bounded_for_all_clients_together() -> None:
    one, two = ({**JSON, "Authorization": f"Bearer {key}"} for key in ("one", "two"))
    async with serving(ServerConfig.model_validate({"max_body_bytes": 5000, "api_key": ["one", "two"]})) as server:
        server.api.service.bodies.max_waiting = 5000
        with held(forward_of(server.llm), "hidden"):
            waiting = asyncio.create_task(send(server, BODY.ljust(4950), one))
            await wait_until(lambda: waiting_bytes(server) == 4950, "it waits")
            status, message = await send(server, BODY.ljust(51), two)
            assert (status, message[:46]) == (503, "too many request bytes are pending; try again ")
            waiting.cancel()
        await until_idle(server)
        assert waiting_bytes(server) == 0


async def test_a_stream_that_has_begun_frees_what_its_body_took(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 50, "ignore_eos": True, "stream": True}
    with held(forward_of(server.llm), "hidden") as gate:
        gate.allow(2)
        async with await post(server, body) as client:
            await client.head()
            assert (server.api.num_active, waiting_bytes(server)) == (1, 0)
    await until_idle(server)


async def test_what_waits_keeps_neither_its_body_nor_what_was_read_out_of_it(server: Server) -> None:
    """Hardly anything is left of five megabytes, most of them a field that changes nothing, while the engine works."""
    message = {"role": "assistant", "content": "Hi!", "refusal": "x" * 5_000_000}
    body = {"messages": [message, {"role": "user", "content": "Hello!"}], "max_tokens": 2, "logprobs": True}
    async with await post(server, body, CHAT) as client:
        await client.head()  # what is loaded at first is there now
    with held(forward_of(server.llm), "hidden") as gate:
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            async with await post(server, body, CHAT) as client:
                await gate.entered()
                # A worker's thread may be about to let go of its last reference.
                await wait_until(lambda: tracemalloc.get_traced_memory()[0] < 1_000_000, "what was sent is forgotten")
                gate.open()
                assert "200 OK" in await client.head()
        finally:
            tracemalloc.stop()
            gc.enable()


NAMES = ["stream_options", "response_format", "structured_outputs", "repetition_detection"]


@pytest.mark.parametrize("where", ["", *NAMES])
def test_a_crowd_of_unknown_fields_is_one_complaint(where: str) -> None:
    crowd = {str(number): 1 for number in range(300)}
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [], **({where: crowd} if where else crowd)})
    assert caught.value.error_count() == 1
    told = f"{where}: 300" if where else "301"
    assert str(complaint_of(caught.value)) == f"{told} fields, most of them unknown"
