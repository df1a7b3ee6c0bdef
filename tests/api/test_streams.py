"""Streams: their very bytes, beside whole replies of a model that says any bytes; and what usage says of reuse."""

import asyncio
import gc
import itertools
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from openai.types.completion_usage import PromptTokensDetails

from chairlift.api import ServerConfig
from chairlift.api.http.event_stream import EventStream
from tests.api.conftest import Server, in_loop
from tests.api.contract import CHAT, COMPLETIONS, check_chat, chunks_of, counts, post, serving, user, whole_and_chunks
from tests.api.fault_support import silent_for, until_idle
from tests.engine.support import make_tiny_checkpoint

HEAD = '"created":1,"model":"bundled","system_fingerprint":"fp"'

CHAT_CHUNK = (
    f'data: {{"id":"ID",{HEAD},"object":"chat.completion.chunk","choices":[{{"index":0,"stop_reason":null,"delta":'
)
TEXT_CHUNK = f'data: {{"id":"ID",{HEAD},"object":"text_completion","choices":[{{"index":0,"stop_reason":null,'
ASKED = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True, "logit_bias": {"90": 100}}


async def events_of(server: Server, path: str, body: dict[str, object]) -> list[str]:
    """With what differs from reply to reply replaced; how many tokens share a chunk does as well."""
    async with aiohttp.ClientSession(server.url) as http, http.post(f"/v1/{path}", json={**ASKED, **body}) as response:
        text = (await response.read()).decode()
    head = text[len('data: {"id":') : text.index(',"object"')]
    events = re.sub("Z+", "Z", text.replace(head, f'"ID",{HEAD}')).split("\n\n")
    return [each for each, _ in itertools.groupby(events)]


async def test_chunks_have_these_very_bytes(server: Server) -> None:
    assert await events_of(server, "chat/completions", {"messages": user("hi")}) == [
        CHAT_CHUNK + '{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        CHAT_CHUNK + '{"content":"Z"},"logprobs":null,"finish_reason":null}]}',
        CHAT_CHUNK + '{},"logprobs":null,"finish_reason":"length"}]}',
        *("data: [DONE]", ""),
    ]
    assert await events_of(server, "completions", {"prompt": "hi"}) == [
        TEXT_CHUNK + '"text":"Z","logprobs":null,"finish_reason":null}]}',
        TEXT_CHUNK + '"text":"Z","logprobs":null,"finish_reason":"length"}]}',
        *("data: [DONE]", ""),
    ]


# Texts that JSON or the form of events might mistake.
TEXTS = ['"', "\\", "\0", "\x1f\x7f", "é日😀\u2028", "</script>", "%s {} \\u0000", '"sequence_number":0']


async def test_a_stream_leaves_nothing_to_the_garbage_collector(server: Server) -> None:
    """With thousands of streams a minute its rounds would stop all of them, the longer the more there is."""
    gc.collect()
    gc.disable()
    try:
        await events_of(server, "completions", {"prompt": "hi"})
        async with asyncio.timeout(20):
            while any(isinstance(each, EventStream) for each in gc.get_objects()):  # its handler may not be over yet
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


NUM_CASES = 12
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
    body: dict[str, Any] = {"seed": seed, "temperature": 1.0, "max_tokens": chance.randint(1, 50), "ignore_eos": True}
    bias = {"logit_bias": {str(byte): 8.0 for byte in set(CHARACTERS.encode())}}
    body |= bias if chance.random() < 0.7 else {}
    body |= {"n": chance.randint(2, 3)} if chance.random() < 0.3 else {}
    return body | ({"logprobs": True} if chance.random() < 0.3 else {})


def random_stops(text: str, chance: random.Random) -> list[str]:
    """Some of what the text has, and something that it may not have."""
    starts = [chance.randrange(max(1, len(text))) for _ in range(chance.randint(1, 3))]
    stops = [text[start : start + chance.randint(1, 3)] for start in starts] + [chance.choice(CHARACTERS) * 2]
    proper = {stop for stop in stops if stop}
    return [stop for stop in proper if not any(other != stop and other in stop for other in proper)]


def cut(text: str, stops: list[str]) -> str:
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def text_of(choice: dict[str, Any]) -> str:
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


async def check(server: Server, path: str, body: dict[str, Any], seed: int) -> str:
    """The text of the first choice."""
    plain, _ = await whole_and_chunks(server, path, body, is_alone=False)
    text = text_of(plain["choices"][0])
    stops = random_stops(text, random.Random(seed))
    stopped, _ = await whole_and_chunks(server, path, {**body, "stop": stops}, is_alone=False)
    for free, choice in zip(plain["choices"], stopped["choices"], strict=True):
        assert text_of(choice) == cut(text_of(free), stops)
        is_cut = text_of(choice) != text_of(free)
        end = (choice["finish_reason"], choice["stop_reason"] in stops)
        assert end == (("stop", True) if is_cut else ("length", False))
    return text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_says_what_the_whole_reply_says(babbler: Server, path: str) -> None:
    bodies = [random_body(seed) for seed in range(NUM_CASES)]
    for seed, body in enumerate(bodies):
        if path == CHAT:
            body["messages"] = user(f"{seed}: é")
        else:
            body |= {"prompt": f"{seed}: é"} | ({"logprobs": 2} if "logprobs" in body else {})
    with silent_for(babbler, 600.0):  # no comments, however busy the machine is
        texts = await asyncio.gather(*(check(babbler, path, body, seed) for seed, body in enumerate(bodies)))
    await until_idle(babbler)
    said = set("".join(texts))  # characters of several bytes, and parts of some, or else this would show little
    assert HALF in said
    assert any(ord(character) > 0x7F for character in said - {HALF})


@pytest.mark.parametrize("has_last", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "num_prompt"),
    [(CHAT, {"messages": user("Hello!"), "n": 2}, 9), (COMPLETIONS, {"prompt": ["1 + 1 =", "Once"]}, 11)],
)
async def test_the_usage_so_far_is_told_with_every_chunk(
    server: Server, path: str, body: dict[str, Any], num_prompt: int, has_last: bool
) -> None:
    body = {**body, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    options = {"include_usage": has_last, "continuous_usage_stats": True}
    whole, chunks = await whole_and_chunks(server, path, body, **options)
    assert counts(whole["usage"]) == (num_prompt, 12, num_prompt + 12)
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {num_prompt}
    generated = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (generated[-1], generated) == (12, sorted(generated))
    assert generated[0] == 0 or path == COMPLETIONS  # a chat begins with the role
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * (len(chunks) - has_last) + [0] * has_last


async def test_one_of_several_keys_cannot_have_everybodys_prompts_forgotten() -> None:
    async with serving(ServerConfig(api_key=("a", "b"))) as server, aiohttp.ClientSession() as http:
        headers = {"Authorization": "Bearer a"}
        async with http.post(f"{server.url}/reset_prefix_cache", headers=headers) as response:
            assert response.status == 403
            assert "several API keys" in (await response.json())["error"]["message"]


STORY = "Once upon a time there was a little lift"  # a byte is a token
QUESTION = "What is 17 + 25?"


async def cached(server: Server, prompt: str | list[str] = STORY) -> int:
    """Tokens that a completion says it reused."""
    reply = await post(server, COMPLETIONS, {"prompt": prompt, "temperature": 0, "max_tokens": 3})
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_prompt_that_comes_again_is_reused_but_for_its_last_token_until_it_is_forgotten(server: Server) -> None:
    assert await cached(server) == 0
    assert await cached(server) == len(STORY) - 1
    assert await cached(server, STORY + " that went up") == len(STORY)
    assert await cached(server, [STORY, "never seen", STORY]) == 2 * (len(STORY) - 1)
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/reset_prefix_cache") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    assert await cached(server) == 0


async def test_every_endpoint_and_both_kinds_of_replies_tell_of_it(server: Server) -> None:
    chat = {"messages": user(QUESTION), "temperature": 0}
    first = check_chat(await post(server, CHAT, chat))
    assert (first.usage and first.usage.prompt_tokens_details) == PromptTokensDetails(cached_tokens=0)
    whole, chunks = await whole_and_chunks(server, CHAT, chat, include_usage=True)
    num_reused = whole["usage"]["prompt_tokens"] - 1
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": num_reused}
    assert check_chat(whole).choices == first.choices
    assert chunks[-1]["usage"] == whole["usage"]
    response = await post(server, "/v1/responses", {"input": QUESTION, "temperature": 0})
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": num_reused, "cache_write_tokens": 0}
    assert await cached(server) == 0
    *_, last = await chunks_of(server, COMPLETIONS, {"prompt": STORY, "stream_options": {"include_usage": True}})
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": len(STORY) - 1}
