"""What clients see when the engine hangs or dies, and when one request cannot be computed."""

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
from chairlift.engine.text.outputs import GenerationState
from chairlift.scheduler import TokenEvent
from tests.api.conftest import SLOTS, Server, in_loop
from tests.api.contract import client_of, text_of
from tests.api.fault_support import forward_of, held, serving, until_idle
from tests.engine.async_support import DEADLINE_S, wait_until
from tests.engine.support import make_tiny_checkpoint
from tests.support.server_process import running

LONG: dict[str, Any] = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0}
HUNG = "a step took longer than 0.3 s"


async def read_stream(client: AsyncOpenAI, **body: Any) -> None:
    async for _ in await client.completions.create(**{**LONG, **body}, stream=True):
        pass


async def status_and_error(server: Server, method: str, path: str, **arguments: Any) -> tuple[int, dict[str, Any]]:
    async with aiohttp.ClientSession() as http, http.request(method, server.url + path, **arguments) as response:
        return response.status, (await response.json())["error"]


async def test_when_a_step_hangs_nobody_does() -> None:
    async with serving(step_timeout=0.3) as server, client_of(server) as client:
        with held(forward_of(server.llm), "hidden") as gate:
            gate.allow(3)
            streams = [asyncio.create_task(read_stream(client)) for _ in range(3)]
            whole = [asyncio.create_task(client.completions.create(**LONG)) for _ in range(SLOTS)]
            errors = await asyncio.wait_for(asyncio.gather(*streams, *whole, return_exceptions=True), DEADLINE_S)
            assert all(isinstance(error, openai.APIError) and HUNG in str(error) for error in errors), errors
            assert [type(error) for error in errors[3:]] == [openai.InternalServerError] * SLOTS
            assert {(e.code, e.type) for e in errors if isinstance(e, openai.APIError)} == {
                ("engine_dead", "server_error")
            }
            assert server.api.num_active == 0
            status, error = await status_and_error(server, "GET", "/health")
            assert (status, error["message"]) == (503, f"the engine died: {HUNG}")


async def test_a_hung_step_makes_health_bad_at_once_and_readers_get_an_error_event() -> None:
    async with serving(step_timeout=0.3) as server, aiohttp.ClientSession() as http:
        with held(forward_of(server.llm), "hidden") as gate:
            gate.allow(3)
            async with http.post(f"{server.url}/v1/completions", json={**LONG, "stream": True}) as response:
                assert response.status == 200
                events = (await response.text()).split("\n\n")
        assert events[-2:] == [
            f'data: {{"error":{{"message":"{HUNG}","type":"server_error","param":null,"code":"engine_dead"}}}}',
            "",
        ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_dead_engines_server_refuses_with_503_so_that_clients_go_elsewhere(stream: bool) -> None:
    async with serving(step_timeout=0.3) as server:
        with held(forward_of(server.llm), "hidden"):
            await status_and_error(server, "POST", "/v1/completions", json=LONG)
            body = {**LONG, "stream": stream}
            async with aiohttp.ClientSession() as http, http.post(f"{server.url}/v1/completions", json=body) as refused:
                assert (refused.status, refused.headers.get("Retry-After")) == (503, "1")
                error = (await refused.json())["error"]
                assert error["message"] == f"the engine died: {HUNG}"
                assert (error["type"], error["code"]) == ("server_error", "unavailable")


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
        assert (await status_and_error(server, "GET", "/health"))[0] == 503


async def test_the_server_of_a_hung_engine_says_so_for_a_while_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("chairlift.api.server._DEATH_NOTICE_S", 0.5)
    llm = AsyncLLM(max_batch_size=SLOTS, max_seq_len=512, dtype="float32", num_threads=1, step_timeout=0.3)

    def address() -> str:
        return next((record.getMessage() for record in caplog.records if "serving on" in record.getMessage()), "")

    with caplog.at_level(logging.INFO), held(forward_of(llm), "hidden"):
        config = ServerConfig(port=0)
        ending = asyncio.create_task(serve(llm, config, Listener(config)))
        await wait_until(lambda: bool(address()), "it serves")
        url = address().split()[-1]
        async with aiohttp.ClientSession() as http:
            async with http.post(f"{url}/v1/completions", json=LONG) as response:
                assert response.status == 500
            async with http.get(f"{url}/health") as response:
                assert response.status == 503
        assert await asyncio.wait_for(ending, DEADLINE_S) == 1


HANGING = """
import sys, threading
import chairlift.__main__, chairlift.api.server
from chairlift.__main__ import main
from chairlift.engine.text.inputs import InputProcessor
from chairlift.engine.sampling.masks import TokenGrammar
from chairlift.engine.execution.runner import ModelRunner

prepare, launch = InputProcessor.prepare, ModelRunner.launch

def hang(*_):
    threading.Event().wait()

InputProcessor.prepare = lambda self, name, prompt, *rest: (hang if prompt == "hang" else prepare)(
    self, name, prompt, *rest
)
TokenGrammar.compute_mask = hang
chairlift.api.server._DEATH_NOTICE_S = chairlift.__main__._LAST_THREADS_S = 0.5
ModelRunner.launch = lambda self, plan: (hang if plan.rows[-1].request.params.seed == 13 else launch)(self, plan)
sys.exit(main())
"""


def test_the_process_ends_although_threads_hang_beside_the_engines() -> None:
    """One of masks and one of texts; the end of an interpreter waits for the threads of pools."""
    with running(HANGING, "--step-timeout", "1.5", "--max-batch-size", "1") as process:
        url = f"{process.url}/v1/completions"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"prompt": "hang"}, timeout=0.5)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={"prompt": "hi", "guided_regex": "[a-z]*"}, timeout=1)
        assert httpx.post(url, json={"prompt": "hi"}, timeout=20).status_code == 200  # a mask that hangs hangs nobody
        answer = httpx.post(url, json={"prompt": "hi", "seed": 13}, timeout=20)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_dead")
        assert process.exit_code() == 1


async def test_threads_end_with_their_servers() -> None:
    async with serving() as server, client_of(server) as client:
        await client.completions.create(**{**LONG, "max_tokens": 5})
    await wait_until(lambda: not any(each.name == "chairlift-engine" for each in threading.enumerate()), "none is left")


# --- one request that cannot be computed


POISON = ord("z")  # the token whose embedding is no number
NOT_A_NUMBER = "no valid token could be computed for this sequence: its logits are not numbers, or none was allowed"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@in_loop
async def poisoned(tiny: str) -> AsyncIterator[Server]:
    """A server of which prompts with one token cannot be computed."""
    async with serving(model=tiny, max_seq_len=256, max_num_batched_tokens=16) as server:
        forward_of(server.llm)._model.model.embed_tokens.weight.data[POISON] = torch.nan
        yield server


BESIDE_BUNDLED: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0}
BESIDE: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 150, "temperature": 0, "logit_bias": {str(POISON): -100}}
CANNOT: dict[str, Any] = {"prompt": [POISON] * 40, "max_tokens": 5, "model": "bundled"}


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"prompt": [[1, 2], [POISON], [3]]}, {"echo": True, "logprobs": 2}])
async def test_a_poisoned_request_is_a_500_of_its_own_streaming_or_not(poisoned: Server, extra: dict[str, Any]) -> None:
    alone = await text_of(poisoned, BESIDE)
    beside = [asyncio.create_task(text_of(poisoned, BESIDE)) for _ in range(2)]
    await wait_until(lambda: poisoned.llm.num_unfinished == 2, "they run")
    async with client_of(poisoned) as client:
        with pytest.raises(openai.InternalServerError) as whole:
            await client.completions.create(**{**CANNOT, **extra})
        with pytest.raises(openai.APIError) as streamed:
            async for _ in await client.completions.create(**{**CANNOT, **extra}, stream=True):
                pass
    for caught in (whole.value, streamed.value):
        assert (caught.code, caught.type) == ("request_failed", "server_error")
        assert NOT_A_NUMBER in str(caught)
    assert await asyncio.gather(*beside) == [alone, alone]
    await until_idle(poisoned)
    assert await text_of(poisoned, BESIDE) == alone
    assert poisoned.llm._core.cache.blocks[0].isfinite().all()
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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text_that_cannot_be_made_is_a_failed_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    take = GenerationState.take

    def fail(self: GenerationState, index: int, event: TokenEvent) -> bool:
        if self.generation.params.max_tokens == 77:
            raise RuntimeError("no luck")
        return take(self, index, event)

    monkeypatch.setattr(GenerationState, "take", fail)
    beside = asyncio.create_task(text_of(server, {**BESIDE_BUNDLED, "max_tokens": 50, "ignore_eos": True}))
    body = {**BESIDE_BUNDLED, "max_tokens": 77, "n": 2, "stream": stream}
    async with aiohttp.ClientSession() as http, http.post(f"{server.url}/v1/completions", json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"], error["code"]) == (500, "server_error", "request_failed")
    assert await beside
    await until_idle(server)
