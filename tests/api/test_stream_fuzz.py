"""Streams against whole replies, over HTTP: a random model that says any bytes, random stop strings, same seeds."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.api.conftest import Server, in_loop
from tests.api.fault_support import serving, until_idle
from tests.engine.support import make_tiny_checkpoint

NUM_CASES = 24
HALF = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "é日😀ab한\u0301\u200d "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@in_loop
async def babbler(tiny: str) -> AsyncIterator[Server]:
    """A server of a model without sense: one token per byte, many of which make no character."""
    async with serving(model=tiny, max_seq_len=256, max_steps_per_launch=4) as server:
        yield server


def random_body(seed: int) -> dict[str, Any]:
    """Some ask for bytes of a few characters only, so that whole characters come out of the noise."""
    chance = random.Random(seed)
    body: dict[str, Any] = {"seed": seed, "temperature": 1.0, "max_tokens": chance.randint(1, 80), "ignore_eos": True}
    if chance.random() < 0.7:
        body["logit_bias"] = {str(byte): 8.0 for byte in set(CHARACTERS.encode())}
    if chance.random() < 0.3:
        body["n"] = chance.randint(2, 3)
    if chance.random() < 0.3:
        body["logprobs"] = True
    return body


async def whole(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[int, tuple[str, str, Any]]:
    """By choice: text, finish reason, and what stopped it."""
    async with http.post(path, json=body) as response:
        reply = await response.json()
        assert response.status == 200, reply
    return {
        choice["index"]: (
            choice["text"] if "text" in choice else choice["message"]["content"],
            choice["finish_reason"],
            choice.get("stop_reason"),
        )
        for choice in reply["choices"]
    }


async def streamed(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[int, tuple[str, str, Any]]:
    """The same, put together from chunks; nothing may follow a choice's finish reason."""
    texts: dict[int, str] = {}
    ends: dict[int, tuple[str, Any]] = {}
    async with http.post(path, json={**body, "stream": True}) as response:
        events = (await response.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            index = choice["index"]
            assert index not in ends
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[index] = texts.get(index, "") + piece
            if choice["finish_reason"] is not None:
                ends[index] = (choice["finish_reason"], choice.get("stop_reason"))
    return {index: (texts[index], *ends[index]) for index in texts}


def random_stops(text: str, chance: random.Random) -> list[str]:
    """Some of what the text has, and something that it may not have."""
    starts = [chance.randrange(max(1, len(text))) for _ in range(chance.randint(1, 3))]
    stops = [text[start : start + chance.randint(1, 3)] for start in starts] + [chance.choice(CHARACTERS) * 2]
    proper = {stop for stop in stops if stop}
    return [stop for stop in proper if not any(other != stop and other in stop for other in proper)]


def cut(text: str, stops: list[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


async def check(http: aiohttp.ClientSession, path: str, body: dict[str, Any], seed: int) -> None:
    plain = await whole(http, path, body)
    assert await streamed(http, path, body) == plain
    chance = random.Random(seed)
    stops = random_stops(plain[0][0], chance)
    asked = {**body, "stop": stops}
    expected = {index: cut(text, stops) for index, (text, _, _) in plain.items()}
    for answers in (await whole(http, path, asked), await streamed(http, path, asked)):
        assert {index: text for index, (text, _, _) in answers.items()} == expected
        for index, (text, reason, stop) in answers.items():
            is_cut = text != plain[index][0]
            assert (reason, stop in stops) == (("stop", True) if is_cut else ("length", False))


async def test_completions_stream_what_the_whole_reply_says(babbler: Server) -> None:
    async with aiohttp.ClientSession(babbler.url) as http:

        async def check_one(seed: int) -> None:
            body = {**random_body(seed), "prompt": f"{seed}: é"}
            if "logprobs" in body:
                body["logprobs"] = 2
            await check(http, "/v1/completions", body, seed)

        await asyncio.gather(*(check_one(seed) for seed in range(NUM_CASES)))
    await until_idle(babbler)


async def test_chats_stream_what_the_whole_reply_says(babbler: Server) -> None:
    async with aiohttp.ClientSession(babbler.url) as http:

        async def check_one(seed: int) -> None:
            body = {**random_body(seed), "messages": [{"role": "user", "content": f"{seed}: é"}]}
            await check(http, "/v1/chat/completions", body, seed)

        await asyncio.gather(*(check_one(seed) for seed in range(NUM_CASES)))
    await until_idle(babbler)


async def test_the_babbler_says_characters_of_several_bytes_and_parts_of_some(babbler: Server) -> None:
    """Or else the tests above would show little."""
    async with aiohttp.ClientSession(babbler.url) as http:
        bodies = [{**random_body(seed), "prompt": "é", "logprobs": None} for seed in range(9)]
        texts = [(await whole(http, "/v1/completions", body))[0][0] for body in bodies]
    said = set("".join(texts))
    assert HALF in said
    assert any(ord(character) > 0x7F for character in said - {HALF})
