"""Structured output beside the other fields of a request, and beside other requests."""

import asyncio
import json
from typing import Any

import pytest

from tests.api.conftest import MAX_SEQ_LEN, Server
from tests.api.contract import CHAT, COMPLETIONS, post
from tests.api.test_structured_output import HELLO, SCHEMAS, content, json_schema


async def test_a_structured_answer_that_max_tokens_cuts_says_so(server: Server) -> None:
    body = {"messages": HELLO, "response_format": json_schema(SCHEMAS["const"]), "max_tokens": 5}
    (choice,) = (await post(server, CHAT, body))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"z":', "length")


async def test_a_structured_answer_that_ends_with_its_last_allowed_token_has_ended(server: Server) -> None:
    body = {"messages": HELLO, "guided_choice": ["yes!"], "max_tokens": 4}
    (choice,) = (await post(server, CHAT, body))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("yes!", "stop")


@pytest.mark.parametrize("fields", [{"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 20, "ignore_eos": True}])
async def test_the_end_of_the_grammar_is_the_end_whatever_else_is_asked_for(
    server: Server, fields: dict[str, Any]
) -> None:
    assert await content(server, guided_choice=["yes"], **fields) == "yes"
    assert await content(server, temperature=0, guided_regex="(yes)+", logit_bias={"257": 100}, **fields) == "yes"


async def test_a_stop_string_ends_a_structured_answer_too(server: Server) -> None:
    body = {"messages": HELLO, "guided_choice": ['{"a": 1, "b": 2}'], "stop": [', "b']}
    (choice,) = (await post(server, CHAT, body))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ('{"a": 1', "stop", ', "b')


async def test_a_bias_chooses_within_the_grammar_and_never_beyond_it(server: Server) -> None:
    fields = {"temperature": 0, "guided_choice": ["cat", "dog"]}
    assert await content(server, logit_bias={str(ord("d")): 100}, **fields) == "dog"
    assert await content(server, logit_bias={str(ord("c")): 100}, **fields) == "cat"
    assert await content(server, logit_bias={str(ord("x")): 100, str(ord("d")): -100}, **fields) == "cat"


async def test_free_rows_of_the_same_batch_say_what_they_say_alone(server: Server) -> None:
    """Prompts of one request run together; the structured ones beside them are other requests."""
    free = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    structured = {"messages": HELLO, "temperature": 1.0, "seed": 3, "response_format": json_schema(SCHEMAS["enum"])}
    alone = (await post(server, COMPLETIONS, free))["choices"][0]["text"]
    replies = await asyncio.gather(
        post(server, COMPLETIONS, free),
        *(post(server, CHAT, structured) for _ in range(3)),
        post(server, COMPLETIONS, free),
    )
    assert replies[0]["choices"][0]["text"] == replies[4]["choices"][0]["text"] == alone
    for reply in replies[1:4]:
        assert json.loads(reply["choices"][0]["message"]["content"]) in SCHEMAS["enum"]["enum"]


async def test_a_structured_answer_may_fill_its_slot(server: Server) -> None:
    body = {"messages": HELLO, "guided_regex": "[a-z]*", "temperature": 1.0, "seed": 1, "logit_bias": {"257": -100}}
    reply = await post(server, CHAT, body)
    assert reply["usage"]["total_tokens"] == MAX_SEQ_LEN
    assert reply["choices"][0]["finish_reason"] == "length"
