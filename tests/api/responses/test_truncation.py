"""`truncation: "auto"`: the first messages of a conversation that is too long are left out, and the client is told."""

from collections.abc import Sequence
from typing import Any

import pytest

from chairlift.api.responses.truncation import encode_end
from chairlift.engine.text.chat_template import Message
from chairlift.errors import ContextLengthExceeded
from tests.api.conftest import MAX_SEQ_LEN, Server
from tests.api.contract import post, warning_of

RESPONSES = "/v1/responses"
MAX_LEN = 20


def encode(messages: Sequence[Message]) -> list[int]:
    """A token for each character."""
    prompt = [ord(char) for message in messages for char in message["content"]]
    if len(prompt) > MAX_LEN:
        raise ContextLengthExceeded("too long")
    return prompt


def said(*texts: str) -> list[Message]:
    """Turns of the speakers that the first letters stand for."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[text[0]], "content": text} for text in texts]


def shortened(messages: list[Message], num_wanted: int | None = None) -> tuple[str, int]:
    prompt, num_left_out = encode_end(messages, encode, MAX_LEN, num_wanted)
    return "".join(map(chr, prompt)), num_left_out


def test_a_conversation_that_fits_is_whole() -> None:
    assert shortened(said("ss", "u" * 8, "a" * 9)) == ("ss" + "u" * 8 + "a" * 9, 0)
    assert shortened(said("ss", "u" * 8), num_wanted=10) == ("ss" + "u" * 8, 0)


def test_as_few_of_the_first_turns_as_possible_are_left_out() -> None:
    turns = said("ss", "u1111", "a1111", "u2222", "a2222", "t2222", "u3333", "a3333")
    assert shortened(turns) == ("ssu3333a3333", 5)
    assert shortened([*turns[:1], *turns[3:]], num_wanted=8) == ("ssu3333a3333", 3)
    assert shortened(said("u11111", "a11111", "u222", "a222", "u333")) == ("u222a222u333", 2)


def test_a_last_turn_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ContextLengthExceeded):
        shortened(said("s", "u1", "a1", "u" * 30))


async def test_a_response_says_how_many_messages_were_left_out(server: Server) -> None:
    turns: list[dict[str, Any]] = [
        {"role": role, "content": role[0] * (MAX_SEQ_LEN // 4)} for role in ("user", "assistant") * 2
    ]
    turns.append({"role": "user", "content": "hi"})
    body: dict[str, Any] = {"input": turns, "max_output_tokens": 2}
    error = (await post(server, RESPONSES, body, status=400))["error"]
    assert error["code"] == "context_length_exceeded"
    asked = {**body, "truncation": "auto"}
    reply = await post(server, RESPONSES, asked)
    end = await post(server, RESPONSES, {**body, "input": turns[2:]})
    assert (reply["truncation"], reply["usage"]["input_tokens"]) == ("auto", end["usage"]["input_tokens"])
    left_out = '299 - "truncation: the first 2 messages did not fit and were left out"'
    assert await warning_of(server, RESPONSES, asked) == left_out
