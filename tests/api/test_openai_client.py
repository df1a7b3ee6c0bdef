"""The official client against the server: contents, not only shapes."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from chairlift import LLM, SamplingParams
from tests.api.conftest import MAX_SEQ_LEN, SLOTS

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 17 + 25?"}]


async def test_the_server_says_what_the_python_call_says(client: AsyncOpenAI) -> None:
    prompts = ["The day after Monday is", "5 + 6 =", "Once upon a time"]
    with LLM(max_seq_len=MAX_SEQ_LEN, dtype="float32") as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=20))
    reply = await client.completions.create(model="bundled", prompt=prompts, temperature=0, max_tokens=20)
    assert [choice.text for choice in reply.choices] == [output.outputs[0].text for output in outputs]


async def test_completions_end_after_16_tokens_unless_told_otherwise(client: AsyncOpenAI) -> None:
    reply = await client.completions.create(model="bundled", prompt="Once upon a time", extra_body={"ignore_eos": True})
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16
    assert reply.choices[0].finish_reason == "length"


async def test_more_requests_than_slots_are_all_answered(client: AsyncOpenAI) -> None:
    replies = await asyncio.gather(
        *(client.completions.create(model="bundled", prompt=f"{i} + 1 =", max_tokens=4) for i in range(SLOTS + 2))
    )
    assert all(reply.usage is not None and reply.usage.completion_tokens <= 4 for reply in replies)


async def test_models_are_listed_and_found_by_name(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == ["bundled"]
    card: Any = await client.models.retrieve("bundled")
    assert (card.owned_by, card.root, card.parent, card.max_model_len) == ("chairlift", "bundled", None, MAX_SEQ_LEN)
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        await client.models.retrieve("gpt-9")


async def test_an_unknown_model_is_a_404(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
