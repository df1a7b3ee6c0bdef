"""`/v1/embeddings`, as OpenAI's client and others ask for vectors."""

import asyncio
import math
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.api.conftest import MAX_SEQ_LEN, SLOTS, Server
from tests.api.contract import error_of

EMBEDDINGS = "/v1/embeddings"
TEXTS = ["a snail", "the north wind", "a snail"]


async def test_the_client_gets_a_vector_of_length_one_for_each_text(client: AsyncOpenAI) -> None:
    reply = await client.embeddings.create(model="bundled", input=TEXTS)  # which asks for base64
    first, second, third = (each.embedding for each in reply.data)
    assert ([each.index for each in reply.data], first == third, first == second) == ([0, 1, 2], True, False)
    assert [math.hypot(*each) for each in (first, second)] == pytest.approx([1.0, 1.0])
    numbers = await client.embeddings.create(model="bundled", input="a snail", encoding_format="float")
    assert numbers.data[0].embedding == pytest.approx(first)
    assert (reply.model, numbers.usage.prompt_tokens, numbers.usage.total_tokens) == ("bundled", 7, 7)


async def test_tokens_are_as_good_as_their_text(client: AsyncOpenAI) -> None:
    tokens = [*b"a snail"]
    given: list[Any] = [tokens, [[5], tokens], "a snail"]
    one, several, text = [await client.embeddings.create(model="bundled", input=each) for each in given]
    assert one.data[-1].embedding == several.data[-1].embedding == text.data[-1].embedding


async def test_a_vectors_first_numbers_have_length_one_too(client: AsyncOpenAI) -> None:
    whole = (await client.embeddings.create(model="bundled", input="a snail")).data[0].embedding
    some = (await client.embeddings.create(model="bundled", input="a snail", dimensions=8)).data[0].embedding
    assert some == pytest.approx([each / math.hypot(*whole[:8]) for each in whole[:8]])


async def test_vectors_are_the_same_while_chats_run(client: AsyncOpenAI, server: Server) -> None:
    alone = await client.embeddings.create(model="bundled", input=TEXTS)
    chat: Any = {"model": "bundled", "messages": [{"role": "user", "content": "Tell me!"}], "max_tokens": 60}
    *_, together = await asyncio.gather(
        *(client.chat.completions.create(**chat) for _ in range(SLOTS - 2)),
        client.embeddings.create(model="bundled", input=TEXTS),
    )
    assert [each.embedding for each in together.data] == [each.embedding for each in alone.data]
    assert server.is_idle


async def test_more_texts_than_slots_wait_for_them(client: AsyncOpenAI) -> None:
    texts = [f"{number} snails" for number in range(SLOTS + 2)]
    reply = await client.embeddings.create(model="bundled", input=texts)
    assert [each.index for each in reply.data] == list(range(SLOTS + 2))


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "input is empty"),
        ({"input": ""}, "input", "the prompt is empty"),
        ({"input": [1, "a"]}, "input", "input must be a string, a list of strings"),
        ({"input": {"text": "a"}}, "input", "input must be a string, a list of strings"),
        ({"input": [100_000]}, "input", "token id 100000 is not in the model's vocabulary"),
        ({"input": "a" * (MAX_SEQ_LEN + 1)}, "input", f"your input resulted in {MAX_SEQ_LEN + 1} tokens, 1 too many"),
        ({"input": "a", "dimensions": 10_000}, "dimensions", "is not between 1 and the vector's"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "the checkpoint has no prompt 'query'"),
        ({"input": "a", "temperature": 1}, "temperature", "temperature"),
    ],
)
async def test_what_cannot_become_a_vector_is_named(
    server: Server, fields: dict[str, Any], param: str, said: str
) -> None:
    error = await error_of(server, EMBEDDINGS, fields)
    assert error["param"] == param
    assert said in error["message"]


async def test_a_long_text_is_cut_if_asked_to(client: AsyncOpenAI) -> None:
    text = "a" * MAX_SEQ_LEN
    with pytest.raises(BadRequestError):
        await client.embeddings.create(model="bundled", input=text + "b")
    extra = {"truncate_prompt_tokens": -1}
    reply = await client.embeddings.create(model="bundled", input=text + "b", extra_body=extra)
    assert reply.usage.prompt_tokens == MAX_SEQ_LEN


async def test_prompts_of_vectors_are_counted_like_others(client: AsyncOpenAI, server: Server) -> None:
    before = server.llm.read_stats().totals.num_prompt_tokens
    await client.embeddings.create(model="bundled", input=["a snail", "b snail"])
    assert server.llm.read_stats().totals.num_prompt_tokens - before == 14
    assert server.api.service.counts.responses["/v1/embeddings", 200] > 0
