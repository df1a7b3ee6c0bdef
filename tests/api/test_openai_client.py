"""The official client against the server: contents, not only shapes."""

import asyncio
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from chairlift import LLM, SamplingParams
from tests.api.conftest import MAX_SEQ_LEN, SLOTS, Server
from tests.api.contract import counts

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is 17 + 25?"}]


async def test_a_chat_answers_with_what_the_model_knows(client: AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="bundled", messages=QUESTION)
    assert "42" in (reply.choices[0].message.content or "")
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_a_streamed_chat_adds_up_to_the_whole_one(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="bundled", messages=QUESTION)
    stream = await client.chat.completions.create(
        model="bundled", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert chunks[-1].choices == []
    assert counts(chunks[-1].usage) == counts(whole.usage)


async def test_without_include_usage_no_chunk_speaks_of_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="bundled", messages=QUESTION, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


async def test_every_form_of_prompt_is_taken(client: AsyncOpenAI, server: Server) -> None:
    tokens = server.llm.inputs.tokenizer.encode("2 + 2 =")
    forms: list[str | list[str] | list[int] | list[list[int]]] = ["2 + 2 =", ["2 + 2 ="], tokens, [tokens]]
    texts = set()
    for prompt in forms:
        reply = await client.completions.create(model="bundled", prompt=prompt, temperature=0, max_tokens=6)
        texts.add(reply.choices[0].text)
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(tokens)
    assert len(texts) == 1


async def test_choices_are_numbered_over_prompts_and_n(client: AsyncOpenAI) -> None:
    prompts = ["1 + 1 =", "Once upon a time"]
    reply = await client.completions.create(model="bundled", prompt=prompts, n=2, seed=7, temperature=1.5, max_tokens=9)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    stream = await client.completions.create(
        model="bundled", prompt=prompts, n=2, seed=7, temperature=1.5, max_tokens=9, stream=True
    )
    texts = {index: "" for index in range(4)}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {choice.index: choice.text for choice in reply.choices}


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


async def test_a_stop_string_ends_the_text_and_is_not_in_it(client: AsyncOpenAI) -> None:
    free = await client.completions.create(model="bundled", prompt="Once upon a time", temperature=0, max_tokens=60)
    stop = free.choices[0].text[20:24]
    stream = await client.completions.create(
        model="bundled", prompt="Once upon a time", temperature=0, max_tokens=60, stop=[stop, "\x00never"], stream=True
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == free.choices[0].text[: free.choices[0].text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_more_requests_than_slots_are_all_answered(client: AsyncOpenAI) -> None:
    replies = await asyncio.gather(
        *(client.completions.create(model="bundled", prompt=f"{i} + 1 =", max_tokens=4) for i in range(SLOTS + 2))
    )
    assert all(reply.usage is not None and reply.usage.completion_tokens <= 4 for reply in replies)


async def test_a_full_queue_is_a_429_and_the_others_go_on(client: AsyncOpenAI) -> None:
    attempts = [
        client.completions.create(
            model="bundled", prompt=f"{i} +", max_tokens=100, temperature=0, extra_body={"ignore_eos": True}
        )
        for i in range(SLOTS + 2 + 3)
    ]
    replies = await asyncio.gather(*attempts, return_exceptions=True)
    refused = [reply for reply in replies if isinstance(reply, openai.RateLimitError)]
    answered = [reply for reply in replies if not isinstance(reply, BaseException)]
    assert len(refused) == 3
    assert len(answered) == SLOTS + 2
    assert all(int(reply.response.headers["Retry-After"]) >= 1 for reply in refused)
    assert all(reply.usage is not None and reply.usage.completion_tokens == 100 for reply in answered)


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
