"""Structured output with the client's own helper, `parse`, and what the bundled model knows to extract."""

import json
from enum import Enum
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from tests.api.contract import user


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: int = Field(ge=0, le=20)
    colours: list[Colour] = Field(min_length=1, max_length=2)


class Owner(BaseModel):
    name: Literal["Ada", "Bob"]
    pet: Pet | None


async def test_parse_with_a_pydantic_model(client: AsyncOpenAI) -> None:
    for seed in range(3):
        reply = await client.chat.completions.parse(
            model="bundled",
            messages=[{"role": "user", "content": "Who?"}],
            response_format=Owner,
            temperature=2.0,
            seed=seed,
        )
        owner = reply.choices[0].message.parsed
        assert isinstance(owner, Owner)
        assert owner.name in ("Ada", "Bob")


async def test_a_parsed_answer_can_be_sent_back(client: AsyncOpenAI) -> None:
    """The client leaves the parsed object in the message that it sends."""
    conversation: Any = user("Who?")
    reply = await client.chat.completions.parse(model="bundled", messages=conversation, response_format=Owner, seed=1)
    again = [*conversation, reply.choices[0].message.model_dump(warnings=False), *user("And you?")]
    following = await client.chat.completions.create(model="bundled", messages=again, max_tokens=2)
    assert following.choices[0].finish_reason in ("stop", "length")


async def test_parse_of_an_answer_that_was_cut_is_the_clients_own_error(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        await client.chat.completions.parse(
            model="bundled", messages=[{"role": "user", "content": "Who?"}], response_format=Owner, max_tokens=5
        )


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=150)


@pytest.mark.parametrize(
    ("sentence", "name", "age"),
    [("Maria is 34 years old and lives in Oslo.", "Maria", 34), ("Tom is 7 years old.", "Tom", 7)],
)
async def test_the_bundled_model_extracts_what_a_sentence_says(
    client: AsyncOpenAI, sentence: str, name: str, age: int
) -> None:
    conversation: Any = user(f"Extract the name and age as JSON: {sentence}")
    fields: dict[str, Any] = {"model": "bundled", "messages": conversation, "temperature": 0}
    reply = await client.chat.completions.parse(**fields, response_format=Person)
    assert reply.choices[0].message.parsed == Person(name=name, age=age)
    free = await client.chat.completions.create(**fields, response_format={"type": "json_object"})
    assert json.loads(free.choices[0].message.content or "") == {"name": name, "age": age}
