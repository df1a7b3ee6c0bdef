"""Tests what clients see when the engine hangs or dies, and when one request cannot be computed."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import torch
from openai import AsyncOpenAI

from chairlift.api import ServerConfig
from chairlift.api.http.listening import Listener
from chairlift.api.server import serve
from chairlift.engine.async_llm import AsyncLLM
from tests.api.conftest import ENGINE, SLOTS, Server, in_loop
from tests.api.contract import client_of, text_of
from tests.api.fault_support import HANGING, forward_of, held, serving, until_idle
from tests.engine.async_support import DEADLINE_S, wait_until
from tests.engine.support import make_tiny_checkpoint
from tests.support.engines import core_of
from tests.support.server_process import SERVE, running

LONG: dict[str, Any] = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0}
HUNG = "a step took longer than 1 s"


async def read_stream(client: AsyncOpenAI, **body: Any) -> None:
    async for _ in await client.completions.create(**{**LONG, **body}, stream=True):
        pass


async def test_when_a_step_hangs_nobody_does_and_readers_get_an_error_event() -> None:
    async with serving(step_timeout=1.0) as server, client_of(server) as client, aiohttp.ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            gate.allow(3)
            raw = await http.post(f"{server.url}/v1/completions", json={**LONG, "stream": True})  # which has begun
            streams = [asyncio.create_task(read_stream(client)) for _ in range(2)]
            whole = [asyncio.create_task(client.completions.create(**LONG)) for _ in range(SLOTS)]
            errors = await asyncio.wait_for(asyncio.gather(*streams, *whole, return_exceptions=True), DEADLINE_S)
            assert all(isinstance(error, openai.APIError) and HUNG in str(error) for error in errors), errors
            assert [type(error) for error in errors[2:]] == [openai.InternalServerError] * SLOTS
            kinds = {(error.code, error.type) for error in errors if isinstance(error, openai.APIError)}
            assert kinds == {("engine_dead", "server_error")}
            assert raw.status == 200
            error = f'{{"message":"{HUNG}","type":"server_error","param":null,"code":"engine_dead"}}'
            assert (await raw.text()).endswith(f'\n\ndata: {{"error":{error}}}\n\n')
            await wait_until(lambda: server.api.num_active == 0, "nobody waits")
            died = {"message": f"the engine died: {HUNG}", "type": "server_error", "param": None, "code": "unavailable"}
            async with http.get(f"{server.url}/health") as health:
                assert (health.status, (await health.json())["error"]) == (503, died)
            for stream in (False, True):  # so that clients go elsewhere
                async with http.post(f"{server.url}/v1/completions", json={**LONG, "stream": stream}) as refused:
                    assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
                    assert (await refused.json())["error"] == died


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), MemoryError(), RuntimeError("no luck")])
async def test_a_thread_that_dies_ends_everything_at_once(error: BaseException) -> None:
    async with serving() as server, client_of(server) as client:
        with held(forward_of(server.llm), "hidden") as gate:
            streaming = asyncio.create_task(read_stream(client))
            waiting = asyncio.create_task(client.completions.create(**LONG))
            for _ in range(3):
                await gate.entered()
                gate.allow()
            gate.fail(error)
            said = f"a step failed: {type(error).__name__}: {error}"
            results = await asyncio.wait_for(asyncio.gather(streaming, waiting, return_exceptions=True), DEADLINE_S)
        assert isinstance(results[0], openai.APIError)
        assert isinstance(results[1], openai.InternalServerError)
        assert all(said in str(result) for result in results)
        async with aiohttp.ClientSession() as http, http.get(f"{server.url}/health") as health:
            assert health.status == 503


async def test_the_server_of_a_hung_engine_says_so_for_a_while_and_ends_with_1(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm, config = AsyncLLM(**ENGINE, step_timeout=0.3), ServerConfig(port=0)
    with caplog.at_level(logging.INFO), held(forward_of(llm), "hidden"), Listener(config) as listener:
        ending = asyncio.create_task(serve(llm, config, listener))
        await wait_until(lambda: "serving on" in caplog.text, "it serves")
        async with aiohttp.ClientSession(listener.url) as http:
            assert (await http.post("/v1/completions", json=LONG)).status == 500
            assert (await http.get("/health")).status == 503
        assert await asyncio.wait_for(ending, DEADLINE_S) == 1


HANGING_BESIDE = f"""
{HANGING}
import chairlift.__main__, chairlift.api.server
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.sampling.masks import TokenGrammar

prepare = InputProcessor.prepare

def prepare_or_hang(self, name, prompt, *rest):
    return (hang if prompt == "hang" else prepare)(self, name, prompt, *rest)

InputProcessor.prepare = prepare_or_hang
TokenGrammar.compute_mask = hang
chairlift.api.server._DEATH_NOTICE_S = chairlift.__main__._LAST_THREADS_S = 0.5
{SERVE}
"""


@pytest.mark.slow
def test_the_process_ends_although_threads_hang_beside_the_engines() -> None:
    """One of masks and one of texts; the end of an interpreter waits for the threads of pools."""
    with running(HANGING_BESIDE, "--step-timeout", "1.5", "--max-batch-size", "1") as process:
        url = f"{process.url}/v1/completions"
        for body in ({"prompt": "hang"}, {"prompt": "hi", "guided_regex": "[a-z]*"}):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(url, json=body, timeout=1)
        assert httpx.post(url, json={"prompt": "hi"}, timeout=20).status_code == 200  # a mask that hangs hangs nobody
        answer = httpx.post(url, json={"prompt": "hi", "seed": 13}, timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
        assert process.exit_code() == 1


async def test_threads_end_with_their_servers() -> None:
    async with serving() as server, client_of(server) as client:
        await client.completions.create(**{**LONG, "max_tokens": 5})
    await wait_until(lambda: not any(each.name == "chairlift-engine" for each in threading.enumerate()), "none is left")


POISON = 122  # z, the token whose embedding is no number
NOT_A_NUMBER = "no valid token could be computed for this sequence: its logits are not finite, or no token was allowed"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@in_loop
async def poisoned(tiny: str) -> AsyncIterator[Server]:
    """A server of which prompts with one token cannot be computed."""
    async with serving(model=tiny, max_seq_len=256, max_num_batched_tokens=16, attention_backend="torch") as server:
        forward_of(server.llm)._model.model.embed_tokens.weight.data[POISON] = torch.nan
        yield server


BESIDE: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 80, "temperature": 0, "logit_bias": {"122": -100}}
CANNOT: dict[str, Any] = {"prompt": [POISON] * 40, "max_tokens": 5, "model": "bundled"}


async def test_a_poisoned_request_is_a_500_of_its_own_streaming_or_not(poisoned: Server) -> None:
    alone = await text_of(poisoned, BESIDE)
    several = {"prompt": [[1, 2], [POISON], [3]]}
    for extra in ({}, {"n": 3}, several, {"echo": True, "logprobs": 2}):
        beside = [asyncio.create_task(text_of(poisoned, BESIDE)) for _ in range(2)]
        await wait_until(lambda: poisoned.llm.num_unfinished == 2, "they run")
        async with client_of(poisoned) as client:
            with pytest.raises(openai.InternalServerError) as whole:
                await client.completions.create(**{**CANNOT, **extra})
            with pytest.raises(openai.APIError) as streamed:
                await read_stream(client, **{**CANNOT, **extra})
        for caught in (whole.value, streamed.value):
            assert (caught.code, caught.type) == ("request_failed", "server_error")
            assert NOT_A_NUMBER in str(caught)
        assert await asyncio.gather(*beside) == [alone, alone]
        await until_idle(poisoned)
    assert await text_of(poisoned, BESIDE) == alone
    assert core_of(poisoned.llm).cache.blocks[0].isfinite().all()
    assert poisoned.llm.is_healthy


async def test_one_that_breaks_in_the_middle_of_its_stream_ends_with_an_error_event(poisoned: Server) -> None:
    body = {"prompt": "hi", "max_tokens": 5, "temperature": 0, "logit_bias": {str(POISON): 100}, "stream": True}
    with held(forward_of(poisoned.llm), "hidden") as gate:
        gate.allow()
        async with aiohttp.ClientSession() as http, http.post(f"{poisoned.url}/v1/completions", json=body) as response:
            assert response.status == 200  # its first token has gone out
            gate.open()
            events = (await response.text()).split("\n\n")
    assert '"text":"z"' in events[0]
    assert [event[:42] for event in events[1:]] == ['data: {"error":{"message":"no valid token ', ""]
    await until_idle(poisoned)
