"""One request that cannot be computed, as its client and the others see it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
import torch

from chairlift.engine.text.outputs import GenerationState
from chairlift.scheduler import TokenEvent
from tests.api.conftest import Server, in_loop
from tests.api.contract import client_of, text_of
from tests.api.fault_support import forward_of, held, serving, until_idle
from tests.engine.async_support import wait_until
from tests.engine.support import make_tiny_checkpoint

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
